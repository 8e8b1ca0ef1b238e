"""``kernel-pytorch build-runtime``: build the C++ runtime of a backend."""

from __future__ import annotations

from rich.console import Console

__all__ = ["build_runtime"]


def build_runtime(backend: str, *, only_path: bool = False) -> None:
    from kernel_pytorch.lowering import lowering_of

    with Console(stderr=only_path).status("looking for the runtime") as status:
        ready = lowering_of(backend).build(tell=status.update)
    said = str(ready.prefix) if only_path else f"the runtime is in {ready.prefix}"
    Console().print(said, markup=False, highlight=False, soft_wrap=True)
