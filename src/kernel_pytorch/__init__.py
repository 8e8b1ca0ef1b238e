"""KernelPyTorch: fast, exact kernels for PyTorch on whatever hardware is there, chosen and explained."""

__version__ = "0.1.0"

import importlib
from typing import TYPE_CHECKING

from kernel_pytorch import masks
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.explanation import explain
from kernel_pytorch.hardware_abstraction.policy_scope import policy
from kernel_pytorch.hardware_abstraction.registry import Backend, device, devices
from kernel_pytorch.hardware_abstraction.selection import Policy, UnsupportedCallError
from kernel_pytorch.kv_cache import KVCache
from kernel_pytorch.ops.attention import PageTable, attention
from kernel_pytorch.ops.attention.everywhere import attention_everywhere
from kernel_pytorch.ops.attention.hugging_face import register_with_transformers
from kernel_pytorch.ops.rms_norm import rms_norm
from kernel_pytorch.ops.rope import rope

if TYPE_CHECKING:  # __getattr__ imports these at first use
    from kernel_pytorch import context_parallel, fp8
    from kernel_pytorch.lowering import TextGenerator, load, lower
    from kernel_pytorch.optimization import apply, optimize

register_with_transformers()


def __getattr__(name: str) -> object:
    if name in ("context_parallel", "fp8"):  # imported at first use: torch.distributed is slow to import
        return importlib.import_module(f"kernel_pytorch.{name}")
    if name in ("TextGenerator", "load", "lower"):  # imported at first use: ExecuTorch takes seconds
        return getattr(importlib.import_module("kernel_pytorch.lowering"), name)
    if name in ("apply", "optimize"):
        return getattr(importlib.import_module("kernel_pytorch.optimization"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Backend",
    "Device",
    "KVCache",
    "PageTable",
    "Policy",
    "TextGenerator",
    "UnsupportedCallError",
    "__version__",
    "apply",
    "attention",
    "attention_everywhere",
    "context_parallel",
    "device",
    "devices",
    "explain",
    "fp8",
    "load",
    "lower",
    "masks",
    "optimize",
    "policy",
    "rms_norm",
    "rope",
]
