"""Loaded programs: threads that share one, damaged files, outputs and inputs as the model has them."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fuzz_pte
import kernel_pytorch as kp


def test_threads_share_a_program() -> None:
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.LayerNorm(64)
    loaded = kp.lower(torch.nn.Sequential(*layers).eval(), (torch.randn(32, 64),)).load()
    inputs = [torch.randn(32, 64) for _ in range(4)]
    wanted = [loaded(x) for x in inputs]
    wrong: list[int] = []

    def call(number: int) -> None:
        wrong.extend(number for _ in range(300) if not torch.equal(loaded(inputs[number]), wanted[number]))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


MEMORY = """
import pathlib, sys, torch
import kernel_pytorch as kp
from kernel_pytorch.lowering import registered

def own():
    return int(pathlib.Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024

registered()
before = own()
kp.load(sys.argv[1])(torch.ones(1, 1024))
print(own() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads Linux's /proc")
def test_weights_are_mapped_and_not_copied(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 8192), torch.nn.Linear(8192, 1024)).eval()
    kp.lower(model, (torch.ones(1, 1024),)).save(tmp_path / "wide.pte")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "wide.pte")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    weights = sum(weight.nbytes for weight in model.parameters())  # 64 MB
    assert int(done.stdout.splitlines()[-1]) < weights / 4


@pytest.fixture(scope="module")
def small() -> bytes:
    return fuzz_pte.program()


def test_every_damage_of_a_file_is_refused_or_harmless() -> None:
    # A process of its own forks for each case: before ExecuTorch has threads, which do not survive a fork.
    command = [sys.executable, fuzz_pte.__file__, "--cases", "120", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["refused"][""] > 100, found


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_flipped_bit_is_named(small: bytes, at: float) -> None:
    flipped = bytearray(small)
    flipped[int(len(small) * at)] ^= 1
    with pytest.raises(ValueError, match=r"the program is no program .*: it is damaged: its checksum is wrong"):
        kp.load(bytes(flipped))


def test_a_cut_file_is_named(small: bytes) -> None:
    with pytest.raises(ValueError, match=r"the program is no program .*: it is cut: it has [\d,]+ bytes and needs"):
        kp.load(small[: len(small) // 2])


def test_another_file_is_named(tmp_path) -> None:
    path = tmp_path / "notes.pte"
    path.write_text("no program")
    with pytest.raises(ValueError, match=r"notes.pte is no program .*: it has no ExecuTorch header"):
        kp.load(path)


def test_a_file_without_a_checksum_loads(small: bytes) -> None:
    tokens = torch.ones(1, 5, dtype=torch.int64)
    assert all(map(torch.equal, kp.load(small[:-512])(tokens), kp.load(small)(tokens)))


def test_executorch_alone_loads_a_file_with_a_checksum(tmp_path) -> None:
    from executorch.runtime import Runtime

    path = tmp_path / "conv.pte"
    kp.lower(torch.nn.Conv2d(1, 2, 3).eval(), (torch.ones(1, 1, 5, 5),)).save(path)
    method = Runtime.get().load_program(path).load_method("forward")
    assert method.execute([torch.ones(1, 1, 5, 5)])[0].shape == (1, 2, 3, 3)


class Positive(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x > 0)


def test_an_output_whose_shape_depends_on_data() -> None:
    x = torch.tensor([[1.0, -1.0, 2.0], [-3.0, 4.0, 5.0]])
    loaded = kp.lower(Positive().eval(), (x,)).load()
    for given in (x, -x):
        assert torch.equal(loaded(given), Positive()(given))


def test_a_dynamic_batch_takes_one() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).eval()
    dynamic = ({0: torch.export.Dim("batch", min=1, max=8)},)
    program = kp.lower(model, (torch.randn(3, 8),), dynamic_shapes=dynamic)
    for batch in (1, 2, 8):
        assert program.compare(torch.randn(batch, 8))[0].snr > 100
    with pytest.raises(ValueError, match=r"it was lowered for 1 to 8"):
        program.load()(torch.randn(0, 8))


@pytest.mark.parametrize("inputs", [torch.ones(2, 8), [torch.ones(2, 8)], {"forward": torch.ones(2, 8)}])
def test_inputs_are_a_tuple(inputs) -> None:
    with pytest.raises(TypeError, match=r"inputs.* is a .*: pass a tuple of the model's inputs, as \(x,\) for one"):
        kp.lower(torch.nn.LayerNorm(8).eval(), inputs)


@pytest.mark.parametrize("call", ["kp.lower(torch.nn.Linear(2, 2), (torch.ones(1, 2),))", "kp.load('x.pte')"])
def test_without_executorch_it_says_what_to_install(call: str, tmp_path) -> None:
    (tmp_path / "x.pte").write_bytes(b"")
    code = f"""
import importlib.metadata, sys
sys.modules["executorch"] = None
def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.distribution = missing
import torch
import kernel_pytorch as kp
try:
    {call}
except Exception as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(kp.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "pip install 'kernel-pytorch[lowering]'" in done.stdout, done.stdout + done.stderr[-2000:]


def test_a_file_is_mapped_and_may_be_replaced(tmp_path) -> None:
    path = tmp_path / "layer.pte"
    first, second = (torch.nn.Linear(8, 8).eval() for _ in range(2))
    x = torch.randn(2, 8)
    kp.lower(first, (x,)).save(path)
    loaded = kp.load(path)
    if sys.platform == "linux":
        assert str(path) in Path("/proc/self/maps").read_text()
    kp.lower(second, (x,)).save(path)
    torch.testing.assert_close(loaded(x), first(x))
    torch.testing.assert_close(kp.load(path)(x), second(x))
    assert [entry.name for entry in tmp_path.iterdir()] == ["layer.pte"]
    path.with_name("empty.pte").touch()
    with pytest.raises(ValueError, match=r"empty.pte is no program .*: it has no ExecuTorch header"):
        kp.load(path.with_name("empty.pte"))
