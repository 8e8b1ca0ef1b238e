"""Ops inside transforms of torch.func: ``grad``, ``vjp``, ``jacrev`` and ``vmap``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kernel_pytorch.hardware_abstraction.dispatch import Function

__all__ = ["Transformed", "no_forward_mode", "no_second_derivative", "restore", "save"]


def save(ctx: Any, saved: list[Any]) -> None:
    ctx.save_for_backward(*(value for value in saved if isinstance(value, torch.Tensor)))
    ctx.others = [None if isinstance(value, torch.Tensor) else (value,) for value in saved]


def restore(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if other is None else other[0] for other in ctx.others]


def no_forward_mode(name: str) -> str:
    return f"{name} has no forward-mode derivative: use the reverse mode, as torch.autograd.grad"


def no_second_derivative(name: str) -> str:
    return (
        f"{name} has no second derivative: leave out create_graph=True, or differentiate its formula in plain torch "
        "operations"
    )


class Transformed(torch.autograd.Function):
    """The op under torch.func transforms, which need an autograd.Function instead of a custom op's autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Function, policy: str, *values: Any) -> tuple[torch.Tensor, ...]:
        return function._through_torch(values, policy)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        function, policy, *values = inputs
        ctx.function, ctx.policy, ctx.count = function, policy, len(values)
        ctx.absent = [values[i] is None for i in function._differentiable]
        save(ctx, function.gather_saved(tuple(values), output))
        ctx.mark_non_differentiable(*(output[i] for i in function._hidden_outputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        function = ctx.function
        taken = [gradients[i] for i in function._grad_outputs]
        result = _Backward.apply(function, ctx.policy, *taken, *restore(ctx))  # type: ignore[no-untyped-call]
        return (None, None, *function.spread(result, ctx.count, ctx.absent))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(no_forward_mode(ctx.function.op.name))


class _Backward(torch.autograd.Function):
    """The backward under torch.func transforms, which differentiate it again: that raises an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Function, policy: str, *values: Any) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = function._backward_op(*values, policy)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.name = inputs[0].op.name

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(no_second_derivative(ctx.name))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(no_forward_mode(ctx.name))
