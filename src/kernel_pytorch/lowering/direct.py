"""Run a payload without ExecuTorch, for tests and for eager mode."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch.lowering.payload import DTYPES, MOST_DIMENSIONS, Payload
from kernel_pytorch.lowering.runtime import native

__all__ = ["DirectProgram", "PayloadError"]


class PayloadError(ValueError):
    """Raised if the C++ runtime refuses a payload or its inputs; the message has the reason."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_uint8),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * MOST_DIMENSIONS),
    )


@cache
def _library() -> Any:
    library = native()
    library.kernel_pytorch_load.restype = ctypes.c_void_p
    library.kernel_pytorch_load.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
        *(ctypes.c_char_p, ctypes.c_size_t),
    )
    library.kernel_pytorch_run.restype = ctypes.c_bool
    library.kernel_pytorch_run.argtypes = (
        *(ctypes.c_void_p, ctypes.POINTER(_Tensor), ctypes.c_size_t),
        *(ctypes.POINTER(_Tensor), ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
    )
    library.kernel_pytorch_free.argtypes = (ctypes.c_void_p,)
    return library


@cache
def _openmp() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch has loaded, or None."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        with contextlib.suppress(OSError, AttributeError):
            found = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
            return ctypes.cast(found, ctypes.c_void_p).value
    return None


def _tensors(tensors: Sequence[torch.Tensor]) -> Any:
    made = (_Tensor * max(len(tensors), 1))()
    for at, tensor in enumerate(tensors):
        dims = (ctypes.c_int64 * MOST_DIMENSIONS)(*tensor.shape)
        made[at] = _Tensor(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.ndim, dims)
    return made


def _described(tensors: Sequence[tuple[torch.dtype, int]]) -> Any:
    made = (_Tensor * len(tensors))()
    for at, (dtype, length) in enumerate(tensors):
        made[at] = _Tensor(None, DTYPES[dtype], 1, (ctypes.c_int64 * MOST_DIMENSIONS)(length))
    return made


class DirectProgram:
    """A loaded payload; call it with contiguous input tensors and output tensors to fill.

    Programs with the same nonzero ``owner`` share their caches. ``on_torch_threads`` is the number of torch's
    threads to run on, if torch uses GNU OpenMP; otherwise ExecuTorch's thread pool is used.
    """

    def __init__(self, payload: Payload | bytes, owner: int = 0, on_torch_threads: int = 0) -> None:
        self._program = None
        self._library = _library()
        data = payload if isinstance(payload, bytes) else payload.to_bytes()
        # At an aligned address, as in ExecuTorch: constants are read in place.
        self._bytes = ctypes.create_string_buffer(len(data) + 64)
        self._reason = ctypes.create_string_buffer(512)
        start = -ctypes.addressof(self._bytes) % 64
        ctypes.memmove(ctypes.addressof(self._bytes) + start, data, len(data))
        self._program = self._library.kernel_pytorch_load(
            ctypes.addressof(self._bytes) + start,
            len(data),
            owner,
            _openmp() if on_torch_threads else None,
            on_torch_threads,
            self._reason,
            len(self._reason),
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

    def at_addresses(
        self, inputs: Sequence[tuple[torch.dtype, int]], outputs: Sequence[tuple[torch.dtype, int]]
    ) -> Callable[..., None]:
        """Return a function of the addresses of flat tensors of fixed dtypes and lengths, inputs first.

        Not thread-safe. A call has a few microseconds less overhead, because tensor descriptors are built once.
        """
        taken, given = _described(inputs), _described(outputs)
        run = self._library.kernel_pytorch_run
        # Convert pointers and array elements here once, instead of in every call.
        pointers = [ctypes.cast(array, ctypes.POINTER(_Tensor)) for array in (taken, given)]
        sizes = [ctypes.c_size_t(size) for size in (len(inputs), len(outputs), len(self._reason))]
        reason = ctypes.cast(self._reason, ctypes.c_char_p)
        fixed = (ctypes.c_void_p(self._program), pointers[0], sizes[0], pointers[1], sizes[1], reason, sizes[2])
        tensors = (*taken, *given)

        def call(*addresses: int) -> None:
            for tensor, address in zip(tensors, addresses, strict=True):
                tensor.data = address
            if not run(*fixed):
                raise PayloadError(self._reason.value.decode())  # keep self alive as long as the function

        return call

    def __del__(self) -> None:
        if self._program:
            self._library.kernel_pytorch_free(self._program)
            self._program = None
