"""Launching a Triton kernel again without working out again which compiled kernel it is.

Triton's own launch binds and specialises every argument in Python and asks the driver about every pointer, tens of
microseconds for a kernel with many arguments, which an eager step that launches several kernels a layer waits for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

__all__ = ["Place", "Ready", "current_stream", "launch", "watched"]

_MOST = 4096


class Place(NamedTuple):
    """The memory of a contiguous tensor from a byte on, as numbers of a dtype: a view that torch is not asked for."""

    tensor: torch.Tensor
    dtype: torch.dtype
    first_byte: int = 0

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() + self.first_byte

    def view(self) -> torch.Tensor:
        return self.tensor.view(-1).view(torch.uint8)[self.first_byte :].view(self.dtype)


class Ready(NamedTuple):
    """A compiled kernel with its grid and constants, to be launched by addresses on a stream of its device."""

    run: Any
    grid: tuple[int, int, int]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]

    def __call__(self, stream: int, *arguments: int) -> None:
        # Addresses in place of tensors: the driver is not asked whose they are.
        self.run(*self.grid, stream, self.function, self.metadata, None, None, None, *arguments, *self.constants)


_compiled: dict[tuple[Any, ...], Ready] = {}


def watched() -> bool:
    """Whether a profiler wants to be told of launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream(index: int) -> int:
    """Of a GPU."""
    stream: int = driver.active.get_current_stream(index)
    return stream


def launch(
    function: Any, grid: tuple[int], key: tuple[Any, ...], *arguments: Any, **constants: Any
) -> Ready | None:
    """``function[grid](*arguments, **constants)``, the first time; the compiled kernel itself from then on.

    Args:
        key: whatever a specialisation depends on: the constants' values, integers, pointer types and alignment, and
            the device, which must be the current one.
        arguments: every argument that is not a constant, in order: tensors, places and integers. The constants
            follow them in the signature.

    Returns:
        The kernel for the next launch with this key and grid; None where it was interpreted.
    """
    full = (id(function), *key)
    ready = _compiled.get(full)
    if ready is None or watched():
        typed = [argument.view() if type(argument) is Place else argument for argument in arguments]
        kernel = function[grid](*typed, **constants)
        # Not what an interpreter returns, nor one who only catches launches.
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
    ready(stream, *(argument if type(argument) is int else argument.data_ptr() for argument in arguments))
    return ready
