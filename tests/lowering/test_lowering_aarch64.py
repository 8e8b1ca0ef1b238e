"""The runtime cross-compiled for 64-bit Arm, run under qemu. ``make cross`` downloads what it needs."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import kernel_pytorch as kp
from kernel_pytorch.lowering.build import SOURCES, _run, _tool
from kernel_pytorch.lowering.checkpoint import TextProgram, lower_checkpoint
from kernel_pytorch.testing.checkpoints import tiny_checkpoint
from lowering_models import Block

WHEELS = sorted((Path(sys.prefix) / "aarch64").glob("executorch-*aarch64.whl"))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> Callable[[str], list[str]]:
    """The command that runs a program of the Arm build here."""
    for tool, package in (("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu"), ("qemu-aarch64", "qemu-user")):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}: install Debian's {package}")
    if not WHEELS:
        pytest.skip("no ExecuTorch for Arm: run make cross")
    folder = tmp_path_factory.mktemp("aarch64")
    zipfile.ZipFile(WHEELS[-1]).extractall(folder)
    executorch, made = folder / "executorch", folder / "build"
    configure = [_tool("cmake"), "-S", str(SOURCES), "-B", str(made), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", f"-DCMAKE_PREFIX_PATH={executorch}"]
    configure += [f"-DCMAKE_TOOLCHAIN_FILE={SOURCES / 'cmake' / 'aarch64-linux-gnu.cmake'}"]
    configure += [
        "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON",
        f"-DKERNEL_PYTORCH_TESTS={Path(__file__).parent / 'native'}",
    ]
    configure += [f"-DKERNEL_PYTORCH_TOKENIZERS={os.environ.get('KERNEL_PYTORCH_TOKENIZERS', '')}"]
    _run(configure)
    _run([_tool("cmake"), "--build", str(made), "--parallel", "2"])
    libraries = f"LD_LIBRARY_PATH={executorch / 'lib'}:{made}"
    return lambda name: ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-E", libraries, str(made / name)]


def test_kernels_agree_with_double_precision(emulated: Callable[[str], list[str]]) -> None:
    command = emulated("tests/kernel_pytorch_tests")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failures" in done.stdout
    assert done.stdout.startswith("i8mm: dotprod: baseline: ")  # qemu's processor has all of them


class Narrow(torch.nn.Module):
    """Attention, a norm and an activation in float16 or bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = kp.rms_norm(torch.nn.functional.gelu(x))
        heads = y.view(1, 30, 2, 20).transpose(1, 2)
        mask = kp.masks.documents([10, 20], kp.masks.causal()) | kp.masks.sinks(2)
        return kp.attention(heads, heads, heads, mask).transpose(1, 2).reshape(1, 30, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_arm_computes_what_this_processor_does(
    emulated: Callable[[str], list[str]], tmp_path: Path, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    if dtype == torch.float32:
        model, x = Block(kp.masks.causal() & kp.masks.window(7)), torch.randn(1, 33, 64)
    else:
        model, x = Narrow(), torch.randn(1, 30, 40, dtype=dtype)
    program = kp.lower(model.eval(), (x,))
    program.save(tmp_path / "model.pte")
    (tmp_path / "x.bin").write_bytes(x.view(torch.uint8).numpy().tobytes())
    command = [*emulated("kernel_pytorch_runner"), "model.pte", "--input", "x.bin", "--output", "y.bin"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    found = torch.frombuffer(bytearray((tmp_path / "y.bin").read_bytes()), dtype=dtype).view(x.shape)
    torch.testing.assert_close(found, program(x), rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_arm_generates_the_tokens_of_this_processor(emulated: Callable[[str], list[str]], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "llama")
    program = lower_checkpoint(folder, TextProgram(chunk=16))
    program.save(tmp_path / "text.pte")
    shutil.copy(folder / "tokenizer.json", tmp_path)
    generator = kp.TextGenerator(program.load(), AutoTokenizer.from_pretrained(folder))
    prompt = "once upon a time there was a lazy dog that kept the memory"
    found = generator.generate(prompt, max_tokens=12)
    command = [*emulated("kernel_pytorch_runner"), str(tmp_path / "text.pte"), "--generate", "12"]
    ids = " ".join(map(str, generator.tokenizer(prompt)["input_ids"]))
    done = subprocess.run(command, input=ids, capture_output=True, text=True, timeout=120, check=False)
    assert tuple(map(int, done.stdout.split())) == found.tokens, done.stderr
    if os.environ.get("KERNEL_PYTORCH_TOKENIZERS"):
        done = subprocess.run([*command, "--prompt", prompt], capture_output=True, timeout=120, check=False)
        assert done.stdout.decode() == found.text + "\n", done.stderr
