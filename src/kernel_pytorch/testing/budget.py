"""Compare a kernel with the float64 reference, within an error budget derived from independent low-precision runs.

No tolerance is chosen by hand. The reference runs in float64, as ground truth, and as a plain program in the tensors'
dtype: float32 arithmetic, sequential accumulation, results rounded once. The latter runs on the arguments, and on
arguments perturbed at random by one rounding, which measures the conditioning. In every row the kernel's error may be
twice the largest row error of these runs, plus one rounding. Errors are relative to the amax of a row; for results
that are small differences of large terms (``Op.cancelling``), relative to at least the amax of the median row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernel_pytorch._compat.structures import TorchDispatchMode
from kernel_pytorch.hardware_abstraction.op import Op

__all__ = ["Comparison", "compare", "exceeded"]

_SLACK = 2.0  # another order of accumulation has another error, at most twice as large


@dataclass(frozen=True)
class Comparison:
    """The error of one tensor and its budget, relative to the amax of a row."""

    tensor: str
    error: float
    budget: float

    @property
    def ok(self) -> bool:
        return self.error <= self.budget

    def __str__(self) -> str:
        verdict = "within" if self.ok else "EXCEEDS"
        return f"{self.tensor}: error {self.error:.3g} {verdict} its budget {self.budget:.3g}"


def exceeded(comparisons: tuple[Comparison, ...]) -> str:
    """Describe the comparisons that exceed their budget; empty if none does."""
    return "; ".join(str(comparison) for comparison in comparisons if not comparison.ok)


def compare(
    op: Op,
    run: Callable[..., tuple[torch.Tensor, ...]],
    arguments: Mapping[str, Any],
    *,
    gradients: bool = True,
) -> tuple[Comparison, ...]:
    """Run an implementation and the reference on the same arguments; compare outputs and gradients.

    Args:
        run: takes the op's arguments in order and returns its outputs; differentiable if ``gradients``.

    Example:
        >>> import torch
        >>> from kernel_pytorch.hardware_abstraction import registered_op
        >>> op = registered_op("rms_norm")
        >>> case = op.case("odd-hidden").arguments(torch.float32, torch.device("cpu"))
        >>> all(comparison.ok for comparison in compare(op, op.reference, case))
        True
    """
    gradients = gradients and bool(op.differentiable_outputs)
    if op.exact:
        return _identical(op, run, arguments)
    storage = next(value.dtype for value in arguments.values() if isinstance(value, torch.Tensor))
    working = torch.float32 if storage.itemsize <= 4 else storage
    upstream = _upstream(op, arguments)
    truth = _run(op, op.reference, arguments, torch.float64, upstream, gradients)
    actual = _run(op, run, arguments, None, upstream, gradients)
    numbers = sum(value.numel() for value in arguments.values() if isinstance(value, torch.Tensor))
    seeds = range(1 if numbers > 1 << 20 else 4)  # small tensors need several draws to find the worst error
    moved = [{name: _moved(value, working, seed) for name, value in arguments.items()} for seed in seeds]
    plain = op.low_precision(storage) if op.low_precision else op.reference
    with _PlainSums():  # type: ignore[no-untyped-call]
        yardsticks = [_run(op, plain, values, working, upstream, gradients) for values in (arguments, *moved)]
    comparisons = []
    for name, exact in truth.items():
        # Compare by row, so that a large row cannot hide a wrong small one.
        hidden = op.outputs[len(op.differentiable_outputs) :] if op.differentiable_outputs else ()
        by_row = exact.ndim >= 1 and name not in hidden
        out = actual[name]
        if out.shape != exact.shape:
            raise AssertionError(f"{name} has shape {list(out.shape)}, the reference {list(exact.shape)}")
        runs = [run[name].to(out.dtype) for run in yardsticks]
        comparisons.append(_compared(name, out, exact, runs, by_row, name in op.cancelling))
    return tuple(comparisons)


def _identical(
    op: Op, run: Callable[..., tuple[torch.Tensor, ...]], arguments: Mapping[str, Any]
) -> tuple[Comparison, ...]:
    """Compare outputs byte for byte: the error is the number of different elements, and the budget 0."""
    comparisons = []
    truth, actual = op.reference(*arguments.values()), run(*arguments.values())
    for name, wanted, out in zip(op.outputs, truth, actual, strict=True):
        if (out.shape, out.dtype) != (wanted.shape, wanted.dtype):
            raise AssertionError(
                f"{name} is {out.dtype}{list(out.shape)}, the reference {wanted.dtype}{list(wanted.shape)}"
            )
        bytes_of_both = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (out, wanted)]
        differing = torch.ne(*bytes_of_both).view(-1, out.element_size()).any(dim=1).sum()
        comparisons.append(Comparison(name, float(differing), 0.5))
    return tuple(comparisons)


def _compared(
    name: str, out: torch.Tensor, exact: torch.Tensor, yardsticks: list[torch.Tensor], by_row: bool, cancels: bool
) -> Comparison:
    unit = torch.finfo(out.dtype).eps / 2
    if out.numel() == 0:
        return Comparison(name, 0.0, _SLACK * 2 * unit)
    scale = _by_row(torch.where(exact.to(out.dtype).isfinite(), exact, 0).abs(), by_row)
    if cancels and bool((scale > 0).any()):
        scale = scale.clamp_min(float(scale[scale > 0].median()))

    def relative(values: torch.Tensor) -> float:
        errors = _errors(values, exact, by_row)
        # A row of exact zeros must be zeros.
        return float(torch.where(errors == 0, 0, errors / scale).max())

    worst = max(relative(run) for run in yardsticks)
    budget = _SLACK * (max(worst, unit) + unit)  # in a small tensor all roundings may be favourable by chance
    return Comparison(name, relative(out), budget)


_PLAIN_PRODUCTS = 1 << 27  # larger matmuls are left to the library: sequential accumulation takes too long


class _PlainSums(TorchDispatchMode):
    """Computes sums, means and matmuls with sequential accumulation.

    torch's sums are more accurate than a kernel's loop, and a vendor's matmul often adds several partial sums.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            a, b = args
            if a.numel() * b.shape[-1] > _PLAIN_PRODUCTS:
                return func(*args, **(kwargs or {}))
            total = a.new_zeros(*a.shape[:-1], b.shape[-1])
            for k in range(a.shape[-1]):
                total.addcmul_(a[..., k : k + 1], b[..., k : k + 1, :])
            return total
        mean = func in (torch.ops.aten.mean.dim, torch.ops.aten.mean.default)
        if not mean and func not in (torch.ops.aten.sum.dim_IntList, torch.ops.aten.sum.default):
            return func(*args, **(kwargs or {}))
        x, dims, keepdim = (*args, None, False)[:3] if len(args) == 1 else (*args, False)[:3]
        dims = sorted({dim % x.ndim for dim in dims} if dims else range(x.ndim))
        kept = [dim for dim in range(x.ndim) if dim not in dims]
        count = math.prod(x.shape[dim] for dim in dims)
        flat = x.permute(*dims, *kept).reshape(count, *(x.shape[dim] for dim in kept)).contiguous()
        if x.is_cpu or count == 0:  # torch's cumsum on a CPU accumulates in double
            total = x.new_zeros(flat.shape[1:])
            for part in flat:
                total += part
        else:
            total = flat.cumsum(0)[-1]
        total = total / count if mean else total
        if keepdim:
            total = total.reshape([1 if dim in dims else x.shape[dim] for dim in range(x.ndim)])
        return total


def _moved(value: Any, working: torch.dtype, seed: int) -> Any:
    """Return a tensor in the working dtype with each element perturbed by at most one rounding."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    wide = value.detach().to(working)
    place = (
        wide.device if wide.numel() > 1 << 20 else torch.device("cpu")
    )  # drawn on the CPU: the same for every device
    generator = torch.Generator(device=place).manual_seed(seed)
    step = torch.rand(wide.shape, generator=generator, device=place, dtype=working).sub_(0.5).to(wide.device)
    return torch.where(wide.isfinite(), wide + wide * step.mul_(torch.finfo(working).eps), wide)


def _upstream(op: Op, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return random output gradients in the outputs' dtype, the same for every run."""
    outputs = dict(zip(op.outputs, op.fake(*arguments.values()), strict=True))
    generator = torch.Generator(device="cpu").manual_seed(20261115)  # differs from the seeds of the cases
    return {
        name: torch.randn(outputs[name].shape, generator=generator).to(outputs[name])
        for name in op.differentiable_outputs
    }


def _run(
    op: Op,
    run: Callable[..., Any],
    arguments: Mapping[str, Any],
    dtype: torch.dtype | None,
    upstream: dict[str, torch.Tensor],
    gradients: bool,
) -> dict[str, torch.Tensor]:
    """Return outputs by name and gradients as ``d<argument>``, with tensors converted to ``dtype`` if given."""
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.detach() if dtype is None else value.detach().to(dtype)
            value.requires_grad_(gradients and name in op.differentiable)
        values[name] = value
    outputs = dict(zip(op.outputs, run(*values.values()), strict=True))
    results = {name: output.detach() for name, output in outputs.items()}
    if op.meaning is not None:
        results = op.meaning(results)
    if gradients:
        wanted = [name for name in op.differentiable if isinstance(values[name], torch.Tensor)]
        # An output that the reference detaches takes no gradient in any run; the first run, float64, decides.
        for name in op.differentiable_outputs:
            if not outputs[name].requires_grad:
                upstream.pop(name, None)
        found = torch.autograd.grad(
            [outputs[name] for name in upstream],
            [values[name] for name in wanted],
            [gradient.to(outputs[name].dtype) for name, gradient in upstream.items()],
        )
        results |= {f"d{name}": gradient for name, gradient in zip(wanted, found, strict=True)}
    return results


def _by_row(values: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Return the largest value of each row, or the values themselves without rows."""
    return (values.unsqueeze(0) if values.ndim == 1 else values).amax(dim=-1) if by_row else values


def _errors(out: torch.Tensor, exact: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Return the largest error of each row; infinite for an infinity or NaN that float64 does not round to."""
    representable = exact.to(out.dtype)
    finite = representable.isfinite()
    same = (out == representable) | (out.isnan() & representable.isnan())
    error = torch.where(finite, (out.to(exact.dtype) - exact).abs(), torch.where(same, 0.0, torch.inf))
    return _by_row(error.nan_to_num(nan=torch.inf, posinf=torch.inf), by_row)
