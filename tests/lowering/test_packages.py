"""Packages for AOTInductor: lowered on the CPU, loaded without this library in Python and C++, or refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kernel_pytorch as kp
from kernel_pytorch.lowering.build import _tool
from kernel_pytorch.lowering.package import PackagedProgram

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "demos" / "package_runner"
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")),
    reason="AOTInductor needs a C++ compiler",
)
pytestmark = needs_compiler


class Block(torch.nn.Module):
    """Every kind of our operators that inference has: norm, rotary embedding, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.out = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, dim = x.shape[1:]
        y = kp.rms_norm(x, self.norm)
        angles = torch.arange(length)[:, None] * torch.linspace(1, 0.01, 4)
        angles = torch.cat([angles, angles], dim=-1)
        heads = y.view(x.shape[0], length, 4, dim // 4).transpose(1, 2)
        q, k = kp.rope(heads, heads, angles.cos(), angles.sin())
        y = kp.attention(q, k, heads, kp.masks.causal() & (kp.masks.window(5) | kp.masks.sinks(2)))
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


@pytest.fixture(scope="module")
def package() -> PackagedProgram:
    torch.manual_seed(0)
    return kp.lower(Block().eval(), (torch.randn(2, 20, 32),), runtime="aoti")


@pytest.fixture(scope="module")
def dynamic() -> PackagedProgram:
    length = torch.export.Dim("length", min=2, max=64)
    return kp.lower(Block().eval(), (torch.randn(1, 20, 32),), runtime="aoti", dynamic_shapes=({1: length},))


def test_a_package_computes_what_the_model_does(package: PackagedProgram) -> None:
    (difference,) = package.compare()
    assert difference.snr > 100, difference
    (difference,) = package.compare(torch.randn(2, 20, 32))
    assert difference.snr > 100, difference


def test_the_report_names_what_became_of_each_call(package: PackagedProgram) -> None:
    found = {call.op: call for call in package.report.calls}
    assert {name: call.kernel for name, call in found.items()} == {
        "rms_norm": "torch",
        "rope": "torch",
        "attention": "scaled_dot_product_attention",
    }
    passed_over = dict(found["attention"].passed_over)
    assert "cannot be traced" in passed_over.pop("tiled")
    assert passed_over in ({}, {"native": "runs outside of torch, through Python"})  # whether the runtime is built
    said = str(package.report)
    assert f"package of {package.path.stat().st_size:,} bytes for" in said
    assert "rope: torch" in said


def test_dynamic_lengths_serve_every_length(dynamic: PackagedProgram) -> None:
    for length in (2, 3, 20, 64):
        (difference,) = dynamic.compare(torch.randn(1, length, 32))
        assert difference.snr > 100, (length, difference)
    (attention,) = (call for call in dynamic.report.calls if call.op == "attention")
    assert attention.kernel == "scaled_dot_product_attention"
    assert "fixed lengths" in dict(attention.passed_over)["tiled"]


def test_causal_attention_keeps_torchs_kernel_at_dynamic_lengths() -> None:
    class Causal(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return kp.attention(x, x, x, kp.masks.causal())

    length = torch.export.Dim("length", min=2, max=64)
    package = kp.lower(Causal().eval(), (torch.randn(1, 2, 9, 8),), runtime="aoti", dynamic_shapes=({2: length},))
    assert [call.kernel for call in package.report.calls] == ["cpu-flash"]
    (difference,) = package.compare(torch.randn(1, 2, 33, 8))
    assert difference.snr > 100


LOAD = """
import sys
sys.modules["kernel_pytorch"] = None  # importing it is an error from here on
import torch
x, expected = torch.load(sys.argv[2])
found = torch._inductor.aoti_load_package(sys.argv[1])(x)
torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
print("same")
"""


def test_a_package_runs_where_we_are_not_installed(package: PackagedProgram, tmp_path: Path) -> None:
    x = torch.randn(2, 20, 32)
    package.save(tmp_path / "model.pt2")
    torch.save((x, package.eager(x).detach()), tmp_path / "example.pt")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model.pt2"), str(tmp_path / "example.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "same\n", done.stderr


def test_a_package_runs_in_c_plus_plus(dynamic: PackagedProgram, tmp_path: Path) -> None:
    build = [_tool("cmake"), "-S", str(DEMO), "-B", str(tmp_path / "build"), "-G", "Ninja"]
    build += [f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"]
    for command in (build, [_tool("cmake"), "--build", str(tmp_path / "build")]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    dynamic.save(tmp_path / "model.pt2")
    x = torch.randn(1, 12, 32)
    (tmp_path / "x.bin").write_bytes(x.numpy().tobytes())
    runner = [str(tmp_path / "build" / "package_runner"), str(tmp_path / "model.pt2"), "cpu"]
    done = subprocess.run(
        [*runner, "1,12,32", str(tmp_path / "x.bin"), str(tmp_path / "y.bin")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = torch.frombuffer(bytearray((tmp_path / "y.bin").read_bytes()), dtype=torch.float32).view(1, 12, 32)
    torch.testing.assert_close(found, dynamic.eager(x).detach(), rtol=1e-5, atol=1e-5)


def test_loading_says_what_is_wrong(package: PackagedProgram, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    package.save(path)
    loaded = kp.load(path)
    assert loaded.facts["torch"] == torch.__version__
    with pytest.raises(
        ValueError,
        match=r"model\.pt2: input 0 is float32\[2, 21, 32\] on cpu; it was lowered for float32\[2, 20, 32\] on cpu",
    ):
        loaded(torch.randn(2, 21, 32))
    with pytest.raises(ValueError, match="input 0 is a ndarray; it was lowered for"):
        loaded(torch.randn(2, 20, 32).numpy())
    with pytest.raises(ValueError, match="input 0 is float64"):
        loaded(torch.randn(2, 20, 32).double())
    with pytest.raises(ValueError, match="takes 1 inputs, and 2 were given"):
        loaded(torch.randn(2, 20, 32), 3)
    data = bytearray(path.read_bytes())
    for place in (len(data) // 2, len(data) // 3):
        damaged = bytearray(data)
        damaged[place] ^= 1
        (tmp_path / "damaged.pt2").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged\.pt2 is no package that can be loaded"):
            kp.load(tmp_path / "damaged.pt2")
    (tmp_path / "cut.pt2").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"cut\.pt2 is no package that can be loaded"):
        kp.load(tmp_path / "cut.pt2")


def test_memory_in_another_order_is_read_rightly(package: PackagedProgram) -> None:
    wide = torch.randn(2, 32, 21)
    for x in (wide[:, :, 1:].transpose(1, 2), torch.randn(2 * 20 * 32 + 1)[1:].view(2, 20, 32)):
        (difference,) = package.compare(x)
        assert difference.snr > 100, difference


def test_a_dynamic_package_says_which_sizes_it_takes(dynamic: PackagedProgram) -> None:
    with pytest.raises(
        ValueError,
        match=r"input 0 is float32\[1, 65, 32\] on cpu; it was lowered for float32\[1, 2\.\.64, 32\] on cpu",
    ):
        dynamic.load()(torch.randn(1, 65, 32))


def test_saving_is_whole_or_not_at_all(
    package: PackagedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"name ends in \.pt2"):
        package.save(tmp_path / "model.pte")

    def full(source: object, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*model\.pt2' was not written"):
        package.save(tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


class Cached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = kp.KVCache(2, 8, window=4, longest=4)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self.cache(x, x, x, position)


class Paged(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return kp.attention(q, k, k, kp.masks.causal(), pages=kp.PageTable(table, lengths))


PAGED = (torch.ones(1, 2, 1, 8), torch.ones(3, 2, 4, 8), torch.tensor([[1, 2]]).int(), torch.tensor([7]).int())
X = torch.ones(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: kp.lower(Block().eval(), (X,), backend="nvidia"), "torch sees no cuda device here"),
        (lambda: kp.lower(Block().eval(), (X,), backend="intel"), "torch sees no xpu device here"),
        (lambda: kp.lower(Block().eval(), (X,), backend="amd", recipe="int8-dynamic"), "recipe='int8-dynamic'"),
        (lambda: kp.lower(Block().eval(), (X,), runtime="aoti", measure=True), "measure=True"),
        (lambda: kp.lower(Block().eval(), (X,), runtime="tvm"), "runtime='tvm': use one of executorch, aoti"),
        (lambda: kp.lower(Block(), (X,), runtime="aoti"), r"call model\.eval\(\) first"),
        (lambda: kp.lower(Block().eval(), X, runtime="aoti"), r"pass a tuple of the model's inputs, as \(x,\)"),
        (lambda: kp.lower({"a": Block()}, {"a": (X,)}, runtime="aoti"), "a package has one method"),
        (
            lambda: kp.lower(Paged().eval(), PAGED, runtime="aoti"),
            "paged_attention cannot be packaged for .*\n  gather: ",
        ),
        (lambda: kp.lower(Cached().eval(), (X, torch.tensor([0])), runtime="aoti"), "cached_attention"),
    ],
)
def test_what_cannot_be_packaged_is_refused(call: Callable[[], object], said: str) -> None:
    if "torch sees no" in said and torch.accelerator.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises((ValueError, TypeError), match=said):
        call()


@pytest.mark.parametrize("device", ["nvidia/h200", "amd/mi300x"])
def test_the_graph_of_a_gpu_package_computes_and_compiles(device: str) -> None:
    """Without a GPU: launches run in Triton's interpreter and are compiled for the device."""
    program = HERE / "packages_without_gpu.py"
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program), device, "block", "decode", "table", "softcap", "paged", "dynamic"],
        env=kept, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    called = {name: {op: launches for op, _, launches, _ in case["calls"]} for name, case in found.items()}
    assert called == {
        "block": {"rms_norm": ["_forward_short"], "rope": ["_rotate_tile"], "attention": ["_forward"]},
        "decode": {"attention": ["_split_kv", "_merge"]},
        "table": {"attention": ["_forward"]},
        "softcap": {"score_mod_attention": ["_forward"]},
        "paged": {"paged_attention": ["_split_kv"]},
        "dynamic": {"rms_norm": ["_forward_short"]},
    }
    for name, case in found.items():
        assert case["error"] < 1e-5, (name, case)
        assert sorted(case["compiled"]) == sorted(
            launch for launches in called[name].values() for launch in launches
        )


def test_kernels_get_numbers_as_triton_passes_them() -> None:
    """Inductor's own way is float64, in which a kernel would then compute."""
    from torch._inductor import config
    from torch._inductor.codegen.common import SizeArg
    from torch._inductor.codegen.triton_utils import signature_of
    from torch._inductor.virtualized import V

    from kernel_pytorch._compat.packages import _float32_scalars

    class OnGpu:
        current_device = torch.device("cuda")

    with config.patch(_float32_scalars()), V.set_graph_handler(OnGpu()):
        assert signature_of(SizeArg("scale", 0.125), size_dtype=None) == "fp32"


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a package is compiled on it")


@needs_cuda
def test_a_gpu_package_holds_triton_kernels_and_agrees(tmp_path: Path) -> None:
    backend = kp.device().backend
    model, x = Block().eval().cuda(), torch.randn(2, 20, 32, device="cuda")
    package = kp.lower(model, (x,), backend=backend)
    assert all(call.launches for call in package.report.calls), package.report
    (difference,) = package.compare()
    assert difference.snr > 90
    package.save(tmp_path / "model.pt2")
    torch.save((x, model(x).detach()), tmp_path / "example.pt")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model.pt2"), str(tmp_path / "example.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "same\n", done.stderr
