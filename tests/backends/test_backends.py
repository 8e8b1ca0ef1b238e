"""The backend contract on the four built-in backends: op x kernel x case x dtype."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from kernel_pytorch.hardware_abstraction.op import Case, Kernel
from kernel_pytorch.hardware_abstraction.registry import backend
from kernel_pytorch.testing import BackendContract
from kernel_pytorch.testing.devices import test_device


class TestCpu(BackendContract):
    backend_name = "cpu"


class GpuContract(BackendContract):
    """Skips kernels in plain torch operations without the GPU: ``TestCpu`` runs the same code on the same tensors."""

    @contextlib.contextmanager
    def _ready(self, kernel: Kernel, case: Case, number_format: str) -> Iterator[dict[str, Any]]:
        on_cpu = kernel.language == "torch" and kernel in backend("cpu").kernels
        if on_cpu and not test_device(self.backend_name).present:
            pytest.skip("TestCpu runs this kernel")
        with super()._ready(kernel, case, number_format) as arguments:
            yield arguments


class TestNvidia(GpuContract):
    backend_name = "nvidia"


class TestAmd(GpuContract):
    backend_name = "amd"


class TestIntel(GpuContract):
    backend_name = "intel"


def test_the_cpu_runs_every_kernel_that_is_skipped_elsewhere() -> None:
    on_cpu = set(backend("cpu").kernels)
    for name in ("nvidia", "amd", "intel"):
        kernels = [kernel for kernel in backend(name).kernels if kernel.language == "torch"]
        assert kernels
        assert set(kernels) <= on_cpu
