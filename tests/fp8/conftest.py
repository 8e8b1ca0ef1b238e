"""Fixtures of the FP8 tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp8_kernels import HERE
from kernel_pytorch.testing.devices import interpreting, pretend


@pytest.fixture(params=["torch", "triton"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kernel by name: Triton's on the GPU, or in the interpreter without one."""
    if request.param == "torch" or HERE == "cuda":
        yield request.param
    elif interpreting():
        with pretend("nvidia/h200"):
            yield request.param
    else:
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1 for the interpreter")
