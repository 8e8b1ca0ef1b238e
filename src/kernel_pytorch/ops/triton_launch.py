"""Low-overhead launches of Triton kernels: the compiled kernel is looked up once and then launched directly.

Triton's launcher binds and specialises every argument in Python and queries the driver about every pointer. That
takes tens of microseconds for a kernel with many arguments, and an eager step launches several kernels per layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

from kernel_pytorch._compat.memory import empty_strided_cuda as _empty_strided_cuda

__all__ = ["Launches", "Place", "Ready", "empty", "launch", "number_beside", "zeros"]

_MOST = 4096


class Place(NamedTuple):
    """A typed pointer into a contiguous tensor: a view without the cost of creating a tensor."""

    tensor: torch.Tensor
    dtype: torch.dtype
    first_byte: int = 0

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() + self.first_byte

    def view(self) -> torch.Tensor:
        return self.tensor.view(-1).view(torch.uint8)[self.first_byte :].view(self.dtype)

    def at(self, byte: int, dtype: torch.dtype) -> Place:
        """Return the place this many bytes further on."""
        return Place(self.tensor, dtype, self.first_byte + byte)


def empty(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a contiguous tensor of at most two dimensions on x's device, which must be the current GPU.

    Allocates without the dispatcher, as compiled code does, because a cast has several results and a step many casts.
    In deterministic mode it allocates by torch, which may fill the memory.
    """
    if not x.is_cuda or torch.are_deterministic_algorithms_enabled():
        return x.new_empty(shape, dtype=dtype)
    sizes = tuple(shape)  # the private function does not take a torch.Size
    strides = (sizes[1], 1) if len(sizes) == 2 else (1,) * len(sizes)
    found: torch.Tensor = _empty_strided_cuda(sizes, strides, dtype)
    return found


# Zeroed scratch memory for the atomics of a launch. torch would allocate and launch a kernel for these few bytes;
# here they are taken from a larger zeroed buffer, different ones each time, so that they need not be cleared.
_ZEROS, _PIECE = 1 << 16, 128
_zeros: dict[int, tuple[torch.Tensor, Iterator[int]]] = {}


def zeros(x: torch.Tensor, size: int) -> Place:
    """Return zeroed scratch memory on x's device, 16-byte aligned, for kernels launched now on the current stream."""
    index = x.get_device()
    # Other streams may be captured in a CUDA graph, whose replays reuse the same memory, or run their kernels after
    # the memory was given to another launch.
    if not x.is_cuda or size > _PIECE or driver.active.get_current_stream(index) != 0:
        return Place(x.new_zeros(-(-size // 4), dtype=torch.int32), torch.int32)
    tensor, pieces = _zeros.get(index, (x, iter(())))
    byte = next(pieces, None)
    if byte is None:
        with torch.inference_mode(False):
            tensor = torch.zeros(_ZEROS // 4, dtype=torch.int32, device=x.device)
        pieces, byte = iter(range(_PIECE, _ZEROS, _PIECE)), 0
        _zeros[index] = (tensor, pieces)
    return Place(tensor, torch.int32, byte)


_numbers: dict[tuple[int, int], Place] = {}
_numbers_lock = threading.Lock()


def number_beside(tensor: torch.Tensor) -> Place | None:
    """Return a float32 scalar on a tensor's GPU, initially 0, that persists for the tensor's address.

    For values that may be lost, or left over from another tensor at the same address. Returns None off the default
    stream, because kernels on several streams could use the scalar at the same time.
    """
    index = tensor.get_device()
    if not tensor.is_cuda or driver.active.get_current_stream(index) != 0:
        return None
    key = (index, tensor.data_ptr())
    with _numbers_lock:
        place = _numbers.get(key)
        if place is None:
            if len(_numbers) >= _MOST:
                del _numbers[next(iter(_numbers))]  # the oldest
            with torch.inference_mode(False):
                number = torch.zeros(1, dtype=torch.float32, device=tensor.device)
            place = _numbers[key] = Place(number, torch.float32)
    return place


class Ready(NamedTuple):
    """A compiled kernel with its grid and constants, launched with addresses on a stream of its device."""

    run: Any
    grid: tuple[int, int, int]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]

    def __call__(self, stream: int, *arguments: int | float) -> None:
        # Addresses instead of tensors: the launcher does not query the driver about them.
        self.run(*self.grid, stream, self.function, self.metadata, None, None, None, *arguments, *self.constants)


_compiled: dict[tuple[Any, ...], Ready] = {}


def _watched() -> bool:
    """Return whether a profiler has registered launch hooks."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch(
    function: Any, grid: tuple[int], key: tuple[Any, ...], *arguments: Any, **constants: Any
) -> Ready | None:
    """Run ``function[grid](*arguments, **constants)`` the first time, and the compiled kernel from then on.

    Args:
        key: everything that a specialisation depends on: constants, integers, pointer types and alignment, and the
            device, which must be the current one.
        arguments: every argument that is not a constant, in order: tensors, places and integers. The constants
            follow them in the signature.

    Returns:
        The kernel for the next launch with this key and grid; None if it was interpreted.
    """
    full = (id(function), *key)
    ready = _compiled.get(full)
    if ready is None or _watched():
        typed = [argument.view() if type(argument) is Place else argument for argument in arguments]
        kernel = function[grid](*typed, **constants)
        # The interpreter and a patched launcher (in tests) return something else.
        if type(kernel).__name__ == "CompiledKernel":
            names = [parameter.name for parameter in function.params]
            last = tuple(constants[name] for name in names[len(arguments) :])
            if len(_compiled) >= _MOST:
                _compiled.clear()
            ready = Ready(kernel.run, (*grid, 1, 1), kernel.function, kernel.packed_metadata, last)
            _compiled[full] = ready
        return ready
    active = driver.active
    stream = active.get_current_stream(active.get_current_device())
    ready(stream, *(x if type(x) is int or type(x) is float else x.data_ptr() for x in arguments))
    return ready


class Launches:
    """A sequence of kernels that are launched together, each with a selection of one list of arguments.

    Args:
        kernels: each with its grid and constants.
        names: of the arguments, in order; a kernel gets those that its signature names.
        key: everything that a specialisation depends on, except the ``which`` of a call.
    """

    def __init__(
        self,
        kernels: Sequence[tuple[Any, tuple[int], dict[str, Any]]],
        names: Sequence[str],
        key: tuple[Any, ...],
    ) -> None:
        self._kernels, self._key = kernels, key
        places = {name: number for number, name in enumerate(names)}
        self._chosen = [
            itemgetter(*(places[name] for name in function.arg_names if not name.isupper()))
            for function, _, _ in kernels
        ]
        self._ready: dict[tuple[Any, ...], list[Ready]] = {}

    def __call__(
        self, index: int, which: tuple[Any, ...], addresses: tuple[int, ...], typed: Callable[[], tuple[Any, ...]]
    ) -> None:
        """Launch the kernels on the current stream of the GPU with this index, which must be the current one.

        Args:
            which: the rest of what a specialisation depends on: dtypes and the alignment of pointers.
            addresses: the arguments as integers.
            typed: returns the same arguments as tensors, places and integers, for the first call of a kind.
        """
        ready = self._ready.get(which)
        if ready is None or _watched():
            arguments = typed()
            kernels = [
                launch(function, grid, (index, *which, *self._key), *chosen(arguments), **constants)
                for (function, grid, constants), chosen in zip(self._kernels, self._chosen, strict=True)
            ]
            if None not in kernels:
                self._ready[which] = [kernel for kernel in kernels if kernel is not None]
            return
        stream = driver.active.get_current_stream(index)
        for kernel, chosen in zip(ready, self._chosen, strict=True):
            kernel(stream, *chosen(addresses))

    def one(self, number: int, which: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        """Launch one of the kernels on the current GPU, with arguments by name."""
        function, grid, constants = self._kernels[number]
        chosen = [arguments[name] for name in function.arg_names if not name.isupper()]
        launch(function, grid, ("one", *which, *self._key), *chosen, **constants)
