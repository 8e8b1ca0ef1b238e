"""The backend contract: a test class that every backend must pass, including third parties'.

In a test file::

    from kernel_pytorch.testing import BackendContract

    class TestAcme(BackendContract):
        backend_name = "acme"

One generic test covers op x kernel x case x dtype, so every kernel of the registry is tested. Without the hardware,
Triton kernels run in the interpreter (set ``TRITON_INTERPRET=1``) and others skip with a reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from kernel_pytorch.hardware_abstraction import registry
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import Case, Kernel, Op, registered_op, registered_ops
from kernel_pytorch.hardware_abstraction.registry import Backend
from kernel_pytorch.testing.budget import compare, exceeded
from kernel_pytorch.testing.devices import cannot_run, pretend, test_device
from kernel_pytorch.testing.poison import poisoned

__all__ = ["BackendContract", "prepared"]

_OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@contextlib.contextmanager
def prepared(kernel: Kernel, device: Device, case: Case, dtype: torch.dtype) -> Iterator[dict[str, Any] | str]:
    """Yield the case's arguments, on the pretended device if it is not present, or the reason to skip."""
    reason = cannot_run(kernel, device, dtype)
    if reason is not None:
        yield reason
        return
    where = torch.device(device.torch_device or "cpu")
    with contextlib.nullcontext() if device.present else pretend(device):
        arguments = dict(case.arguments(dtype, where))
        call = function_of(registered_op(kernel.op)).call("forward", tuple(arguments.values()), True)
        refusal = kernel.refusal(call, device)
        yield arguments if refusal is None else f"the kernel refuses the case: {refusal}"


class BackendContract:
    """Subclass it in a test file and set ``backend_name``."""

    backend_name: ClassVar[str]

    @property
    def record(self) -> Backend:
        return registry.backend(self.backend_name)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        names = metafunc.fixturenames
        if "kernel" not in names:
            return
        every = "case" in names
        rows, ids = [], []
        for kernel in self.record.kernels:
            op = registered_op(kernel.op)
            for case in op.cases:
                if case.benchmark or (not every and case is not op.cases[0]):
                    continue
                for number_format in case.formats:
                    row = (kernel, case, number_format) if every else (kernel, number_format)
                    rows.append(row)
                    ids.append("-".join(part if isinstance(part, str) else part.name for part in (op, *row)))
        metafunc.parametrize("kernel, case, number_format" if every else "kernel, number_format", rows, ids=ids)

    def test_record_is_known_under_its_name(self) -> None:
        assert self.record.name == self.backend_name
        assert self.record.title

    def test_probe_returns_its_own_devices_and_never_raises(self) -> None:
        for device in self.record.probe():
            assert isinstance(device, Device)
            assert device.backend == self.backend_name
            assert device.present, f"{device.name} was probed but has no torch_device"

    def test_every_kernel_serves_a_known_op_and_can_be_imported(self) -> None:
        known = {op.name for op in registered_ops()}
        for kernel in self.record.kernels:
            assert kernel.op in known
            assert callable(kernel.function("forward"))
            assert not kernel.backward or callable(kernel.function("backward"))

    def test_supports_gives_none_or_a_reason_for_every_case_and_device(self) -> None:
        for device in (*self.record.catalogue, *self.record.probe()):
            for kernel in self.record.kernels:
                op = registered_op(kernel.op)
                for case in op.cases:
                    arguments = case.arguments(torch.float16, torch.device("meta"))
                    call = function_of(op).call("forward", tuple(arguments.values()))
                    reason = kernel.refusal(call, device)
                    assert reason is None or (isinstance(reason, str) and reason), f"{kernel.name}: {reason!r}"

    def test_kernel_meets_its_budget(self, kernel: Kernel, case: Case, number_format: str) -> None:
        """Compare outputs and all gradients with float64, with poisoned memory, by the public function."""
        op = registered_op(kernel.op)
        with self._ready(kernel, case, number_format) as arguments, poisoned():
            comparisons = compare(op, function_of(op).pinned(kernel.name), arguments, gradients=kernel.backward)
        assert not exceeded(comparisons), exceeded(comparisons)

    def test_custom_op_passes_opcheck(self, kernel: Kernel, number_format: str) -> None:
        op = registered_op(kernel.op)
        with self._ready(kernel, op.cases[0], number_format) as arguments:
            _require_gradients(op, arguments)
            overload = getattr(torch.ops.kernel_pytorch, op.name).default
            # torch's check of the autograd registration fails on device types other than three.
            where = torch.device(test_device(self.backend_name).torch_device or "cpu").type
            left_out = set() if where in ("cpu", "cuda", "xpu") else {"test_autograd_registration"}
            # torch's check of the schema multiplies the arguments, which FP8 tensors do not support.
            if any(isinstance(value, torch.Tensor) and _is_8_bit(value) for value in arguments.values()):
                left_out.add("test_schema")
            checks = [name for name in _OPCHECKS if name not in left_out]
            values = function_of(op).encoded(tuple(arguments.values()))
            torch.library.opcheck(overload, (*values, f"kernel={kernel.name}"), test_utils=checks)

    def test_compile_keeps_the_op_whole(self, kernel: Kernel, number_format: str) -> None:
        """Compare fullgraph compilation with eager mode, bit for bit, forward and backward."""
        op = registered_op(kernel.op)
        with self._ready(kernel, op.cases[0], number_format) as arguments:
            leaves = _require_gradients(op, arguments)
            run = function_of(op).pinned(kernel.name)

            def shifted(*values: Any) -> tuple[torch.Tensor, ...]:
                outputs = run(*values)
                return (outputs[0] + 1,) if leaves else tuple(out.view(torch.uint8) for out in outputs if out.ndim)

            torch.compiler.reset()
            results = []
            for function in (shifted, torch.compile(shifted, fullgraph=True, backend="aot_eager")):
                out = function(*arguments.values())
                gradients = torch.autograd.grad(out[0], leaves, torch.ones_like(out[0])) if leaves else ()
                results.append((*out, *gradients))
            for eager, compiled in zip(*results, strict=True):
                assert torch.equal(eager, compiled)

    @contextlib.contextmanager
    def _ready(self, kernel: Kernel, case: Case, number_format: str) -> Iterator[dict[str, Any]]:
        import pytest

        dtype = getattr(torch, number_format)
        with prepared(kernel, test_device(self.backend_name), case, dtype) as arguments:
            if isinstance(arguments, str):
                pytest.skip(arguments)
            yield arguments


def _is_8_bit(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.dtype.itemsize == 1


def _require_gradients(op: Op, arguments: dict[str, Any]) -> list[torch.Tensor]:
    if not op.differentiable_outputs:
        return []
    leaves = [arguments[name] for name in op.differentiable if isinstance(arguments[name], torch.Tensor)]
    for leaf in leaves:
        leaf.requires_grad_()
    return leaves
