"""``kernel-pytorch lower``: lower a model, report what was delegated, and compare with eager PyTorch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from kernel_pytorch.cli.factory import from_function

__all__ = ["lower", "lower_folder"]


def check_writable(out: Path, name: str = "out") -> None:
    """Raise an error that names the argument if the file cannot be written, before minutes of work."""
    if out.is_dir():
        raise IsADirectoryError(f"{name}={str(out)!r} is a folder: name a file, such as {out / 'model.pte'}")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{name}={str(out)!r}: there is no folder {str(out.parent)!r}; make it first")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise PermissionError(
            f"{name}={str(out)!r} cannot be written: choose another place, or change its permissions"
        )


def _show(console: Console, program: Any, out: Path) -> None:
    console.print(str(program.report), markup=False, soft_wrap=True)
    for method in program.inputs:
        of_method = f"{method}: " if len(program.inputs) > 1 else ""
        for difference in program.compare(method=method):
            console.print(f"{of_method}{difference}", markup=False)
    console.print(f"written to {out}", markup=False, soft_wrap=True)


def lower(source: str, out: Path, backend: str, recipe: str | None, *, debug: bool = False) -> None:
    from kernel_pytorch.lowering.quiet import quiet_libraries, quiet_native

    check_writable(out)
    console = Console()
    model, inputs = from_function(source)
    model, inputs = model.eval(), tuple(inputs)
    with console.status("exporting the model") as status, quiet_libraries(not debug), quiet_native():
        from kernel_pytorch.lowering.entry import lower as lower_model

        runtime: Any = "aoti" if out.suffix == ".pt2" else "executorch"  # each loads files of its own name alone
        program: Any = lower_model(
            model, inputs, backend=backend, runtime=runtime, recipe=recipe, tell=status.update
        )
        program.save(out)
        status.update("comparing with eager PyTorch")
        _show(console, program, out)


def lower_folder(folder: Path, out: Path, how: dict[str, Any], *, debug: bool = False) -> None:
    """Lower a Hugging Face checkpoint folder, and write its tokenizer next to the program."""
    from kernel_pytorch.lowering.quiet import quiet_libraries, quiet_native

    check_writable(out)
    console = Console()
    with console.status("loading ExecuTorch") as status, quiet_libraries(not debug), quiet_native():
        from kernel_pytorch.lowering.checkpoint import TextProgram, lower_checkpoint

        program = lower_checkpoint(folder, TextProgram(**how), tell=status.update)
        program.save(out)
        tokenizer = folder / "tokenizer.json"
        if tokenizer.is_file():
            shutil.copyfile(tokenizer, out.with_name("tokenizer.json"))
        status.update("comparing with eager PyTorch")
        _show(console, program, out)
