"""A third party's kernel: a package of two files adds one to the CPU's backend, and nothing of ours is edited.

Run it with ``python demos/third_party_kernel.py``. What pip would install is written to a folder on the path here.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

PACKAGE = """
import dataclasses
import torch
from kernel_pytorch.hardware_abstraction import AddedKernel
from kernel_pytorch.ops.rms_norm import KERNEL_TORCH


def supports(call, device):
    return None if call["x"].shape[-1] <= 1024 else "takes rows of up to 1024 elements"


def forward(device, x, weight, eps):
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    y = x.float() * rstd[..., None]
    return (y if weight is None else y * weight.float()).to(x.dtype), rstd


KERNEL = dataclasses.replace(KERNEL_TORCH, name="acme", module=__name__, supports=supports, backward=False)
ADDED = AddedKernel(backend="cpu", kernel=KERNEL, before="torch")
"""
ENTRY_POINT = "[kernel_pytorch.kernels]\nacme = acme_norm:ADDED\n"

folder = Path(tempfile.mkdtemp())
(folder / "acme_norm.py").write_text(PACKAGE)
(folder / "acme_norm-1.0.dist-info").mkdir()
(folder / "acme_norm-1.0.dist-info" / "METADATA").write_text(
    "Metadata-Version: 2.1\nName: acme-norm\nVersion: 1.0\n"
)
(folder / "acme_norm-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINT)
sys.path.insert(0, str(folder))

import torch  # noqa: E402 - the package is there from here on

import kernel_pytorch as kp  # noqa: E402
from kernel_pytorch.hardware_abstraction import registered_op  # noqa: E402
from kernel_pytorch.hardware_abstraction.dispatch import function_of  # noqa: E402
from kernel_pytorch.testing import compare  # noqa: E402

op = registered_op("rms_norm")
print("A row that it takes, one that it refuses, and one that needs a gradient:\n")
for x in (torch.randn(4, 64), torch.randn(4, 2048), torch.randn(4, 64, requires_grad=True)):
    print(kp.explain(kp.rms_norm, x, device="cpu"), "\n")

print("Held to the same contract as ours, against float64:\n")
print("case          result  error / budget")
for name in ("one-row", "odd-hidden", "scales"):
    arguments = op.case(name).arguments(torch.float32, torch.device("cpu"))
    for found in compare(op, function_of(op).pinned("acme"), arguments, gradients=False):
        print(f"{name:12}  {found.tensor:6}  {found.error / found.budget:.0%}")
        assert found.ok
