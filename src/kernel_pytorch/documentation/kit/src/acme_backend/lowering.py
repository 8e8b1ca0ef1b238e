"""Acme's ``Lowering`` record, for ``kp.lower``, the command line, the probe and the pages."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import torch

from acme_backend.delegate import AcmeBackend
from acme_backend.partitioner import AcmeOptions, AcmePartitioner
from acme_backend.quantizer import RECIPES, quantize
from kernel_pytorch.lowering import Lowering, Probe, probe


@cache
def register() -> ctypes.CDLL:
    """Load the library, building it if needed; it registers ``AcmeBackend`` with ExecuTorch."""
    import executorch.runtime  # noqa: F401 - has the registry that the library adds itself to

    ready = LOWERING.build(tell=lambda text: print(f"acme: {text}", file=sys.stderr))
    return ctypes.CDLL(str(ready.library))


LOWERING = Lowering(
    delegate=AcmeBackend.__name__,
    options=AcmeOptions,
    partitioners=lambda options: (AcmePartitioner(options),),
    recipes=RECIPES,
    quantize=quantize,
    register=register,
    sources=Path(__file__).with_name("native"),
    native_name="acme",
    # A small model per operator: the probe lowers and runs each for the pages' table of operators. List operators
    # that are not supported too, so that the pages say so.
    probes=(
        Probe("aten::linear", lambda: torch.nn.Linear(32, 24), ((4, 32),)),
        Probe("aten::linear", lambda: torch.nn.Linear(32, 24, bias=False), ((4, 32),), variant="no bias"),
        probe(
            "aten::linear",
            torch.nn.functional.linear,
            *((4, 32), (24, 32)),
            variant="weights that are an input",
            dynamic=False,
        ),
        probe("aten::relu", torch.relu, (4, 32)),
        probe("aten::gelu", torch.nn.functional.gelu, (4, 32)),
    ),
)
