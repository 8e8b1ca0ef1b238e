"""A model with our operators outside the process that made it: exported, and as an AOTInductor package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernel_pytorch as kp

LOAD = """
import sys
import torch
x, expected = torch.load(sys.argv[2])
try:
    torch._inductor.aoti_load_package(sys.argv[1])(x)
except RuntimeError as error:
    assert "Could not find schema for kernel_pytorch::" in str(error), error
else:
    raise AssertionError("the pages say that the operators must be registered")
import kernel_pytorch
torch.testing.assert_close(torch._inductor.aoti_load_package(sys.argv[1])(x), expected, rtol=0, atol=0)
"""


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kp.attention(x, x, kp.rms_norm(x), kp.masks.causal() & kp.masks.window(3))


@pytest.fixture(scope="module")
def exported() -> tuple[torch.export.ExportedProgram, torch.Tensor, torch.Tensor]:
    x = torch.randn(1, 2, 8, 16)
    with torch.no_grad():
        return torch.export.export(Model().eval(), (x,)), x, Model()(x)


def test_an_exported_program_is_saved_and_loaded(
    exported: tuple[torch.export.ExportedProgram, torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    program, x, expected = exported
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(x), expected, rtol=0, atol=0)


def test_an_aot_inductor_package_runs_where_the_operators_are_registered(
    exported: tuple[torch.export.ExportedProgram, torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    program, x, expected = exported
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    torch.save((x, expected), tmp_path / "example.pt")

    command = [sys.executable, "-c", LOAD, package, str(tmp_path / "example.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
