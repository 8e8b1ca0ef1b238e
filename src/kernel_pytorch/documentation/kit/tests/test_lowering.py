"""Lowering and running a model: in Python and C++, in float32 and quantized, and refusals."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from acme_backend.example import model
from acme_backend.lowering import LOWERING
from acme_backend.partitioner import AcmeOptions

import kernel_pytorch as kp

DELEGATE = "AcmeBackend"


@pytest.mark.parametrize("recipe", [None, *LOWERING.recipes])
def test_the_example_runs_in_the_delegate_alone(recipe: str | None) -> None:
    layers, inputs = model()
    program = kp.lower(layers, inputs, backend="acme", recipe=recipe)
    assert program.report.left == ()
    assert [delegate.backend for delegate in program.report.delegates] == [DELEGATE]
    (difference,) = program.compare(torch.randn(4, 64))
    assert difference.snr > 60


def test_the_recipe_makes_the_program_smaller_and_stays_near_the_model() -> None:
    layers, (x,) = model()
    whole = kp.lower(layers, (x,), backend="acme")
    small = kp.lower(layers, (x,), backend="acme", recipe="int8-weight")
    assert len(small.buffer) < len(whole.buffer) / 2
    torch.testing.assert_close(small(x), layers(x), rtol=0.02, atol=0.02)


def test_cpp_gives_the_same_numbers(tmp_path: Path) -> None:
    layers, _ = model()
    x = torch.randn(4, 64)
    kp.lower(layers, (x,), backend="acme").save(tmp_path / "model.pte")
    (tmp_path / "x.bin").write_bytes(x.numpy().tobytes())
    runner = str(LOWERING.build().runner)
    files = [str(tmp_path / name) for name in ("model.pte", "x.bin", "y.bin")]
    subprocess.run([runner, *files], check=True, capture_output=True, timeout=60)
    y = torch.frombuffer(bytearray((tmp_path / "y.bin").read_bytes()), dtype=torch.float32).view(4, 32)
    torch.testing.assert_close(y, layers(x))


def test_what_is_not_taken_has_a_reason_and_still_runs() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.ReLU()).eval()
    program = kp.lower(layers, (torch.randn(2, 8),), backend="acme")
    assert {refusal.reason for refusal in program.report.left} == {"no rule for this operator"}
    assert program.compare()[0].snr > 60


def test_an_option_leaves_its_operator_out() -> None:
    program = kp.lower(torch.nn.ReLU().eval(), (torch.randn(4),), backend="acme", options=AcmeOptions(relu=False))
    assert [refusal.reason for refusal in program.report.left] == ["the options leave out relu"]


@pytest.mark.parametrize("cut", [0, 3, 40, -1])
def test_a_damaged_program_is_refused(cut: int) -> None:
    layers, inputs = model()
    program = kp.lower(layers, inputs, backend="acme")
    start = program.buffer.index((0x314B504B).to_bytes(4, "little"))
    damaged = bytearray(program.buffer)
    damaged[start + cut if cut >= 0 else start + 20] ^= 0xFF
    with pytest.raises(ValueError, match="this runtime can load"):
        kp.load(bytes(damaged))
