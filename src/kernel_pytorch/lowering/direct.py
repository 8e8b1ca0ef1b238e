"""Running a payload without ExecuTorch around it: what tests use, and what eager mode can."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kernel_pytorch.lowering.payload import DTYPES, MOST_DIMENSIONS, Payload
from kernel_pytorch.lowering.runtime import registered

__all__ = ["DirectProgram", "PayloadError"]


class PayloadError(ValueError):
    """The C++ runtime refused a payload or its inputs; the message says why."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_uint8),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * MOST_DIMENSIONS),
    )


def _library() -> Any:
    library = registered()
    library.kernel_pytorch_load.restype = ctypes.c_void_p
    library.kernel_pytorch_load.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t),
    )
    library.kernel_pytorch_run.restype = ctypes.c_bool
    library.kernel_pytorch_run.argtypes = (
        *(ctypes.c_void_p, ctypes.POINTER(_Tensor), ctypes.c_size_t),
        *(ctypes.POINTER(_Tensor), ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
    )
    library.kernel_pytorch_free.argtypes = (ctypes.c_void_p,)
    return library


def _tensors(tensors: Sequence[torch.Tensor]) -> Any:
    made = (_Tensor * max(len(tensors), 1))()
    for at, tensor in enumerate(tensors):
        dims = (ctypes.c_int64 * MOST_DIMENSIONS)(*tensor.shape)
        made[at] = _Tensor(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.ndim, dims)
    return made


class DirectProgram:
    """A payload, loaded; call it with contiguous tensors and the outputs to fill.

    Programs with the same ``owner``, any number but 0, share their caches.
    """

    def __init__(self, payload: Payload | bytes, owner: int = 0) -> None:
        self._program = None
        self._library = _library()
        data = payload if isinstance(payload, bytes) else payload.to_bytes()
        # As ExecuTorch does, at an aligned address: constants are read where they are.
        self._bytes = ctypes.create_string_buffer(len(data) + 64)
        self._reason = ctypes.create_string_buffer(512)
        start = -ctypes.addressof(self._bytes) % 64
        ctypes.memmove(ctypes.addressof(self._bytes) + start, data, len(data))
        self._program = self._library.kernel_pytorch_load(
            ctypes.addressof(self._bytes) + start, len(data), owner, self._reason, len(self._reason)
        )
        if not self._program:
            raise PayloadError(self._reason.value.decode())

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        for name, tensors in (("inputs", inputs), ("outputs", outputs)):
            if not all(tensor.is_contiguous() for tensor in tensors):
                raise ValueError(f"{name} must be contiguous: call .contiguous() on them")
        done = self._library.kernel_pytorch_run(
            self._program,
            _tensors(inputs),
            len(inputs),
            _tensors(outputs),
            len(outputs),
            self._reason,
            len(self._reason),
        )
        if not done:
            raise PayloadError(self._reason.value.decode())

    def __del__(self) -> None:
        if self._program:
            self._library.kernel_pytorch_free(self._program)
            self._program = None
