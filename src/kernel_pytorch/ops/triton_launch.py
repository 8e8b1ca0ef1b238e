"""Launching a Triton kernel again without working out again which compiled kernel it is.

Triton's own launch binds and specialises every argument in Python and asks the driver about every pointer, tens of
microseconds for a kernel with many arguments, which an eager step that launches several kernels a layer waits for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

__all__ = ["Place", "launch"]

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


class _Ready(NamedTuple):
    """A compiled kernel, and what its launcher takes before and after the arguments."""

    run: Any
    function: Any
    metadata: Any
    last: tuple[Any, ...]


_compiled: dict[tuple[Any, ...], _Ready] = {}


def launch(function: Any, grid: tuple[int], key: tuple[Any, ...], *arguments: Any, **constants: Any) -> None:
    """``function[grid](*arguments, **constants)``, the first time; the compiled kernel itself from then on.

    Args:
        key: whatever a specialisation depends on: the constants' values, integers, pointer types and alignment, and
            the device, which must be the current one.
        arguments: every argument that is not a constant, in order: tensors, places and integers. The constants
            follow them in the signature.
    """
    full = (function, *key)
    ready = _compiled.get(full)
    if ready is None:
        typed = [argument.view() if type(argument) is Place else argument for argument in arguments]
        kernel = function[grid](*typed, **constants)
        # Not what an interpreter returns, nor one who only catches launches.
        if type(kernel).__name__ == "CompiledKernel":
            names = [parameter.name for parameter in function.params]
            last = tuple(constants[name] for name in names[len(arguments) :])
            if len(_compiled) >= _MOST:
                _compiled.clear()
            _compiled[full] = _Ready(kernel.run, kernel.function, kernel.packed_metadata, last)
        return
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler's, which wants to be told
        typed = [argument.view() if type(argument) is Place else argument for argument in arguments]
        function[grid](*typed, **constants)
        return
    active = driver.active
    stream = active.get_current_stream(active.get_current_device())
    # Numbers for pointers: the driver is not asked whose they are.
    pointers = [argument if type(argument) is int else argument.data_ptr() for argument in arguments]
    ready.run(*grid, 1, 1, stream, ready.function, ready.metadata, None, None, None, *pointers, *ready.last)
