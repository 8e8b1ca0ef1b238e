"""Launching a Triton kernel again without working out again which compiled kernel it is.

Triton's own launch binds and specialises every argument in Python, tens of microseconds for a kernel with many
constants, which an eager step that launches several kernels a layer waits for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["launch"]

_MOST = 4096
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(function: Any, grid: tuple[int, ...], key: tuple[Any, ...], *arguments: Any, **constants: Any) -> None:
    """``function[grid](*arguments, **constants)``, the first time; the compiled kernel itself from then on.

    Args:
        key: whatever a specialisation depends on: the constants' values, integers, pointer types and alignment.
        arguments: every argument that is not a constant, in order; the constants follow them in the signature.
    """
    full = (function, *key)
    found = _compiled.get(full)
    if found is None:
        kernel = function[grid](*arguments, **constants)
        # Not what an interpreter returns, nor one who only catches launches.
        if type(kernel).__name__ == "CompiledKernel":
            names = [parameter.name for parameter in function.params]
            last = tuple(constants[name] for name in names[len(arguments) :])
            if len(_compiled) >= _MOST:
                _compiled.clear()
            _compiled[full] = (kernel, last)
        return
    kernel, last = found
    kernel[(*grid, 1, 1)[:3]](*arguments, *last)
