"""Pytrees, dispatch modes and fake tensors, which torch has in private modules."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from kernel_pytorch._compat.private import private

if TYPE_CHECKING:
    from torch._C import _disabled_torch_function_impl as disabled_torch_function
    from torch._guards import active_fake_mode
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_modes
else:
    _NEEDED = "install a version of torch that kernel-pytorch was checked with"
    active_fake_mode = private("torch._guards.active_fake_mode", test=callable, without=_NEEDED)
    disable_modes = private("torch.utils._python_dispatch._disable_current_modes", test=callable, without=_NEEDED)
    disabled_torch_function = private("torch._C._disabled_torch_function_impl", test=callable, without=_NEEDED)
    preserve_version = private(
        "torch.autograd.grad_mode._unsafe_preserve_version_counter", test=callable, without=_NEEDED
    )
    FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor", test=callable, without=_NEEDED)
    OpOverload = private("torch._ops.OpOverload", test=callable, without=_NEEDED)
    pytree = private(
        "torch.utils._pytree",
        test=lambda tree: tree.tree_leaves([1, {"a": (2,)}]) == [1, 2],
        without=_NEEDED,
    )
    TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode", test=callable, without=_NEEDED)

__all__ = [
    "FakeTensor",
    "OpOverload",
    "TorchDispatchMode",
    "active_fake_mode",
    "disable_modes",
    "disabled_torch_function",
    "has_composite_kernel",
    "preserve_version",
    "pytree",
]


@cache
def _has_kernel() -> Any:
    return private(
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        test=lambda f: f("aten::relu", "CPU") is True,
        without="operators are not taken apart",
        otherwise=lambda *_: False,
    )


def has_composite_kernel(operator: Any) -> bool:
    """Return whether an operator is a composite of other operators, so that export decomposes it."""
    return bool(_has_kernel()(operator.name(), "CompositeImplicitAutograd"))
