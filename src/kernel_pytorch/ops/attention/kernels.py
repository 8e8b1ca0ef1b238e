"""Records of the attention kernels, with ``supports``: which calls each one can serve, or the reason why not."""

from __future__ import annotations

from functools import cache

import torch

from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.library import CUDNN_FRONTEND, FLASH_ATTENTION_4, Library
from kernel_pytorch.hardware_abstraction.op import Call, Kernel
from kernel_pytorch.masks.code import BLOCKS, NOT_IN_RUNTIME
from kernel_pytorch.masks.relative import MOST_RELATIVE_INTERVALS, relative_intervals
from kernel_pytorch.ops.attention.definition import lse_dtype, lse_flows
from kernel_pytorch.ops.attention.sequences import packed_sequences, tile_refusal, window_of

__all__ = [
    "KERNEL_CPU_FLASH",
    "KERNEL_CUDNN",
    "KERNEL_CUDNN_FLEX",
    "KERNEL_CUDNN_FLEX_DETERMINISTIC",
    "KERNEL_FLASH",
    "KERNEL_FLASH_4",
    "KERNEL_FLASH_4_DETERMINISTIC",
    "KERNEL_NATIVE",
    "KERNEL_PAGED_GATHER",
    "KERNEL_PAGED_TRITON",
    "KERNEL_SCORE_MOD_TILED",
    "KERNEL_SCORE_MOD_TRITON",
    "KERNEL_TILED",
    "KERNEL_TRITON",
    "KERNEL_TRITON_SPLIT_KV",
]

_FLASH_4_DIMS = (32, 64, 96, 128, 160, 192, 256)
_CUDNN_FLEX_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 128)
"""The head dimensions whose outputs and gradients met their float64 budgets on an H200."""
MOST_INTERVALS = 16
"""Maximum number of intervals per query in cuDNN's masks: its time grows with their number."""


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


_MOST_SPLIT_ROWS = 128


def _split_kv_supports(call: Call, device: Device) -> str | None:
    q, k = call["q"], call["k"]
    rows = q.shape[2] * (q.shape[1] // k.shape[1])
    if rows > _MOST_SPLIT_ROWS or 4 * q.shape[2] > k.shape[2]:
        return (
            f"is for few queries over many keys: at most {_MOST_SPLIT_ROWS} queries x heads of a group, and a "
            f"quarter of the keys; there are {rows}, and {q.shape[2]} queries over {k.shape[2]} keys"
        )
    known = call["mask"].layout(q.shape[2], k.shape[2]) if call["mask"].node.uses(BLOCKS) else None
    if known is not None and q.shape[2] > known.finest_block:
        return f"is for queries in one row of the mask's tables: {q.shape[2]} exceed blocks of {known.finest_block}"
    return _triton_supports(call, device)


def _paged_triton_supports(call: Call, device: Device) -> str | None:
    intervals = relative_intervals(call["mask"].node)
    if intervals is None or len(intervals) > MOST_RELATIVE_INTERVALS:
        return (
            "works out a query's keys from causal, windows and sinks, in at most "
            f"{MOST_RELATIVE_INTERVALS} intervals; the mask is {call['mask']}"
        )
    return _triton_supports(call, device)


def _fixed_form(call: Call) -> str | None:
    """Return why kernels of other libraries cannot serve the call, whatever its mask, or None."""
    q, k = call["q"], call["k"]
    if 0 in q.shape or 0 in k.shape:
        return "takes no empty tensors"
    if call["scale"] < 1e-30:
        return f"takes a positive scale; it is {call['scale']}"
    if call["wanted"] == "parts" and q.dtype != lse_dtype(q.dtype):
        return f"rounds its results to {q.format}, and parts are merged unrounded"
    return None


def _torch_mask(call: Call) -> str | None:
    """Return why PyTorch's own kernels cannot serve the call's mask, or None."""
    q, k = call["q"], call["k"]
    if reason := _fixed_form(call):
        return reason
    if lse_flows(call["wanted"]) and (call.needs_grad or call.phase == "backward"):
        return "has no gradient through the log-sum-exp, and return_lse asks for it"
    mask = call["mask"].simplified(q.shape[2], k.shape[2])
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
    """Return why the C++ runtime cannot be used, or None. Cached for the process."""
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


def _adopted(call: Call, device: Device, library: Library) -> str | None:
    """Return why a kernel of an adopted library cannot serve the call, whatever its mask, or None."""
    q = call["q"]
    if device.arch != "sm_90":
        return f"passed its cases on sm_90 alone, and this is {device.arch}"
    if reason := library.missing():
        return reason
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"multiplies float16 and bfloat16; q is {q.format}"
    return _fixed_form(call)


def _flash_4_supports(call: Call, device: Device) -> str | None:
    q, k, v, mask = call["q"], call["k"], call["v"], call["mask"]
    if reason := _adopted(call, device, FLASH_ATTENTION_4):
        return reason
    if q.shape[3] != v.shape[3] or q.shape[3] not in _FLASH_4_DIMS:
        return (
            f"is right for one head_dim of {', '.join(map(str, _FLASH_4_DIMS))} (others give wrong dq, or do not "
            f"compile); q has {q.shape[3]} and v {v.shape[3]}"
        )
    if window_of(mask.node):
        return None
    if packed_sequences(mask.node):
        same = q.shape[2] == k.shape[2]
        return None if same else f"packs as many queries as keys; there are {q.shape[2]} and {k.shape[2]}"
    if not mask.node.uses(BLOCKS):
        return f"knows windows, packed sequences and block tables; the mask is {mask}"
    if q.shape[3] > 128:
        return f"walks block tables at head_dim up to 128; it is {q.shape[3]}"
    return tile_refusal(mask.layout(q.shape[2], k.shape[2]))


def _flash_4_deterministic_supports(call: Call, device: Device) -> str | None:
    trains = call.needs_grad or call.phase == "backward"
    if trains and call["mask"].node.uses(BLOCKS):
        return "has no deterministic backward for block tables on sm_90"
    return _flash_4_supports(call, device)


def _cudnn_flex_supports(call: Call, device: Device) -> str | None:
    q, k, v, mask = call["q"], call["k"], call["v"], call["mask"]
    if reason := _adopted(call, device, CUDNN_FRONTEND):
        return reason
    if q.shape[3] not in _CUDNN_FLEX_DIMS or v.shape[3] not in _CUDNN_FLEX_DIMS or v.shape[3] > q.shape[3]:
        return (
            f"is right for head_dim {', '.join(map(str, _CUDNN_FLEX_DIMS))} and values no wider (104 and 112 give "
            f"wrong dq); q has {q.shape[3]} and v {v.shape[3]}"
        )
    relative = relative_intervals(mask.node)
    if relative is not None and len(relative) <= MOST_INTERVALS:
        return None  # do not build the layout, which would differ in every decoding step
    known = mask.layout(q.shape[2], k.shape[2])
    if known.tables:
        return "takes intervals of keys, and the mask has block tables"
    if known.slots > MOST_INTERVALS:
        return f"takes at most {MOST_INTERVALS} intervals a query; the mask has {known.slots}"
    return None


def _kernel(
    name: str,
    module: str,
    supports: object,
    language: str,
    *,
    deterministic: bool = True,
    backward: bool = True,
    op: str = "attention",
    cpp: tuple[str, ...] = (),
) -> Kernel:
    return Kernel(
        op=op,
        name=name,
        module=f"kernel_pytorch.ops.attention.{module}",
        supports=supports,  # type: ignore[arg-type]
        language=language,  # type: ignore[arg-type]
        deterministic=deterministic,
        backward=backward,
        cpp=cpp,
    )


_NATIVE_FILES = tuple(
    f"lowering/native/{name}"
    for name in (
        *("core/mask.cpp", "core/mask.h", "operators/attention.cpp", "operators/attention_backward.cpp"),
        *("operators/tiled_attention.cpp", "operators/tiled_attention.h", "operators/tile_ranges.h"),
        *("kernels/attention.h", "kernels/attention_backward.h", "kernels/attention_few.h"),
        *("kernels/rows.h", "kernels/simd.h"),
    )
)
KERNEL_TILED = _kernel("tiled", "tiled_kernel", _tiled_supports, "torch")
KERNEL_TRITON = _kernel("triton", "triton_kernel", _triton_supports, "triton")
KERNEL_TRITON_SPLIT_KV = _kernel("triton-split-kv", "triton_split_kv_kernel", _split_kv_supports, "triton")
KERNEL_CPU_FLASH = _kernel("cpu-flash", "cpu_flash_kernel", _cpu_flash_supports, "torch")
KERNEL_NATIVE = _kernel("native", "native_kernel", _native_supports, "native", cpp=_NATIVE_FILES)
KERNEL_FLASH = _kernel("flash", "flash_kernel", _flash_supports, "native", deterministic=False)
KERNEL_CUDNN = _kernel("cudnn", "cudnn_kernel", _cudnn_supports, "native", deterministic=False)
KERNEL_FLASH_4 = _kernel("flash-4", "flash4_kernel", _flash_4_supports, "native", deterministic=False)
KERNEL_FLASH_4_DETERMINISTIC = _kernel(
    "flash-4-deterministic", "flash4_deterministic_kernel", _flash_4_deterministic_supports, "native"
)
KERNEL_CUDNN_FLEX = _kernel("cudnn-flex", "cudnn_flex_kernel", _cudnn_flex_supports, "native", deterministic=False)
KERNEL_CUDNN_FLEX_DETERMINISTIC = _kernel(
    "cudnn-flex-deterministic", "cudnn_flex_deterministic_kernel", _cudnn_flex_supports, "native"
)
KERNEL_SCORE_MOD_TRITON = _kernel("triton", "triton_kernel", _triton_supports, "triton", op="score_mod_attention")
KERNEL_SCORE_MOD_TILED = _kernel("tiled", "score_mod_kernel", _tiled_supports, "torch", op="score_mod_attention")
KERNEL_PAGED_TRITON = _kernel(
    "triton-split-kv",
    "triton_paged_kernel",
    _paged_triton_supports,
    "triton",
    backward=False,
    op="paged_attention",
)
KERNEL_PAGED_GATHER = _kernel(
    "gather", "paged_gather_kernel", _tiled_supports, "torch", backward=False, op="paged_attention"
)
