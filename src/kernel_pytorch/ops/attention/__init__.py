"""Exact attention for any mask, dense and block-sparse, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import Function
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.masks import Mask, full
from kernel_pytorch.masks.code import NOT_IN_RUNTIME
from kernel_pytorch.ops.attention.definition import ATTENTION, lse_dtype, lse_flows

__all__ = ["KERNEL_CPU_FLASH", "KERNEL_CUDNN", "KERNEL_FLASH", "KERNEL_TILED", "KERNEL_TRITON", "attention"]

_function = Function(ATTENTION)

spreading: list[Callable[..., Any]] = []
"""What takes calls without a group, the last one first: a model that is spread over ranks does, inside it."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    group: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention: ``softmax(q k^T * scale) v`` over the keys that the mask lets through.

    Args:
        q: (batch, q_heads, q_len, head_dim).
        k, v: (batch, kv_heads, kv_len, head_dim), with q_heads a multiple of kv_heads; v may have another
            head_dim. Any strides, any lengths.
        mask: what to attend to, of ``kp.masks``; everything when left out.
        scale: ``head_dim ** -0.5`` when left out.
        return_lse: also return the log-sum-exp of the scores, (batch, q_heads, q_len) in float32, through which
            gradients flow as well.
        kernel: pin an implementation by name (``kp.explain`` lists them) instead of the best that fits.
        group: the ranks that a sequence is spread over, as a ``kp.context_parallel.Context``, a process group or a
            mesh dimension: q, k and v are then this rank's tokens. ``kp.context_parallel.Chunks`` goes through the
            keys of one device in chunks instead.

    Returns:
        (batch, q_heads, q_len, v's head_dim), contiguous. A query that attends to nothing gets zeros, an lse of
        -inf and no gradient.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> q, k, v = (torch.randn(1, 4, 128, 64) for _ in range(3))
        >>> kp.attention(q, k, v, kp.masks.causal() & kp.masks.window(32)).shape
        torch.Size([1, 4, 128, 64])
    """
    if spreading and group is None:
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = spreading[-1](
            q, k, v, mask, scale=scale, return_lse=return_lse, kernel=kernel
        )
        return found
    if scale is None:
        # Where q has no head_dim, the check says so.
        known = isinstance(q, torch.Tensor) and q.ndim > 0 and q.shape[-1] > 0
        scale = float(q.shape[-1]) ** -0.5 if known else 1.0
    if group is not None:
        from kernel_pytorch.distributed.attention import spread_attention

        out, lse = spread_attention(
            q, k, v, full() if mask is None else mask, scale, return_lse and _may_train(q, k, v), group, kernel
        )
        return (out, lse) if return_lse else out
    wanted = "lse" if return_lse else "grad" if _may_train(q, k, v) else "out"
    out, lse = _function(q, k, v, full() if mask is None else mask, scale, wanted, kernel=kernel)
    return (out, lse) if return_lse else out


def _may_train(*tensors: torch.Tensor) -> bool:
    """Whether a backward may follow; torch.compile and torch.func do not say, so there it may."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", True) for x in tensors)


def _tiled_supports(call: Call, device: Device) -> str | None:
    return None


def _triton_supports(call: Call, device: Device) -> str | None:
    q, v = call["q"], call["v"]
    if q.dtype == torch.float64:
        return "computes in float32, and q is float64; use float32 or the tiled kernel"
    if not device.supports(q.format):
        return f"{device.arch} does not compute in {q.format}"
    widest = max(q.shape[3], v.shape[3])
    if widest > 256:
        return f"holds a head in registers: head_dim {widest} exceeds 256"
    return None


def _torch_mask(call: Call) -> str | None:
    """Why PyTorch's own kernels cannot serve the call's mask, or None."""
    q, k, mask = call["q"], call["k"], call["mask"]
    if 0 in q.shape or 0 in k.shape:
        return "takes no empty tensors"
    if call["scale"] < 1e-30:
        return f"takes a positive scale; it is {call['scale']}"
    if call["wanted"] == "parts" and q.dtype != lse_dtype(q.dtype):
        return f"rounds its results to {q.format}, and parts are merged unrounded"
    if lse_flows(call["wanted"]) and (call.needs_grad or call.phase == "backward"):
        return "has no gradient through the log-sum-exp, and return_lse asks for it"
    if mask.is_full or (mask.is_causal and q.shape[2] == k.shape[2]):
        return None
    return f"knows full and causal with as many queries as keys; the mask is {mask}"


def _cpu_flash_supports(call: Call, device: Device) -> str | None:
    if call["q"].shape[3] != call["v"].shape[3]:
        return f"needs one head_dim; v has {call['v'].shape[3]} and q {call['q'].shape[3]}"
    return _torch_mask(call)


def _native_supports(call: Call, device: Device) -> str | None:
    q = call["q"]
    if q.format not in ("float32", "float16", "bfloat16"):
        return f"computes in float32, and q is {q.format}; use float32 or the tiled kernel"
    if call["wanted"] == "parts" and q.dtype != lse_dtype(q.dtype):
        return f"rounds its results to {q.format}, and parts are merged unrounded"
    if call["mask"].node.uses(*NOT_IN_RUNTIME):
        return f"does not read this mask: {call['mask']}"
    return _runtime_missing()


@cache
def _runtime_missing() -> str | None:
    """Asked once: a runtime that is built later serves the next process."""
    from kernel_pytorch.lowering.build import BuildError, Runtime, runtime_prefix

    try:
        there = Runtime(runtime_prefix()).present
    except BuildError as error:
        return f"needs the C++ runtime: {error}"
    return None if there else "needs the C++ runtime, which is not built: run kernel-pytorch build-runtime"


def _cudnn_supports(call: Call, device: Device) -> str | None:
    q, v = call["q"], call["v"]
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"multiplies float16 and bfloat16; q is {q.format}"
    if q.shape[3] % 8 or v.shape[3] % 8 or max(q.shape[3], v.shape[3]) > 128:
        return f"needs head_dim a multiple of 8 and at most 128; q has {q.shape[3]} and v {v.shape[3]}"
    if call["k"].shape[2] == 1:
        return "takes no single key: cuDNN refuses it, or crashes"
    if device.arch in ("sm_80", "sm_86", "sm_89"):
        return f"is fastest from sm_90 on, and this is {device.arch}"
    return _torch_mask(call)


def _flash_supports(call: Call, device: Device) -> str | None:
    q, v = call["q"], call["v"]
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"multiplies float16 and bfloat16; q is {q.format}"
    if q.shape[3] != v.shape[3] or q.shape[3] > 256 or q.shape[3] % 8:
        return f"needs one head_dim, a multiple of 8, at most 256; q has {q.shape[3]} and v {v.shape[3]}"
    return _torch_mask(call)


def _kernel(name: str, module: str, supports: object, language: str, *, deterministic: bool = True) -> Kernel:
    return Kernel(
        op="attention",
        name=name,
        module=f"kernel_pytorch.ops.attention.{module}",
        supports=supports,  # type: ignore[arg-type]
        language=language,  # type: ignore[arg-type]
        deterministic=deterministic,
    )


KERNEL_TILED = _kernel("tiled", "tiled_kernel", _tiled_supports, "torch")
KERNEL_TRITON = _kernel("triton", "triton_kernel", _triton_supports, "triton")
KERNEL_CPU_FLASH = _kernel("cpu-flash", "cpu_flash_kernel", _cpu_flash_supports, "torch")
KERNEL_NATIVE = _kernel("native", "native_kernel", _native_supports, "native")
KERNEL_FLASH = _kernel("flash", "flash_kernel", _flash_supports, "native", deterministic=False)
KERNEL_CUDNN = _kernel("cudnn", "cudnn_kernel", _cudnn_supports, "native", deterministic=False)
