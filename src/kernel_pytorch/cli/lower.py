"""``kernel-pytorch lower``: lower a model, report what was delegated, and compare with eager PyTorch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from kernel_pytorch.cli.factory import from_function
from kernel_pytorch.cli.output_file import check_writable

__all__ = ["lower", "lower_folder"]


def _show(console: Console, program: Any, out: Path) -> None:
    console.print(str(program.report), markup=False, soft_wrap=True)
    for method in program.inputs:
        of_method = f"{method}: " if len(program.inputs) > 1 else ""
        for difference in program.compare(method=method):
            console.print(f"{of_method}{difference}", markup=False)
    console.print(f"written to {out}", markup=False, soft_wrap=True)


def lower(source: str, out: Path, backend: str, recipe: str | None, *, debug: bool = False) -> None:
    from kernel_pytorch.lowering.quiet import quiet_libraries, quiet_native

    check_writable("out", out, "model.pte")
    console = Console()
    model, inputs = from_function(source)
    model, inputs = model.eval(), tuple(inputs)
    with console.status("exporting the model") as status, quiet_libraries(not debug), quiet_native():
        from kernel_pytorch.lowering.entry import lower as lower_model

        runtime: Any = "aoti" if out.suffix == ".pt2" else "executorch"  # each only loads files of its own name
        program: Any = lower_model(
            model, inputs, backend=backend, runtime=runtime, recipe=recipe, tell=status.update
        )
        program.save(out)
        status.update("comparing with eager PyTorch")
        _show(console, program, out)


def lower_folder(folder: Path, out: Path, how: dict[str, Any], *, debug: bool = False) -> None:
    """Lower a Hugging Face checkpoint folder, and write its tokenizer next to the program."""
    from kernel_pytorch.lowering.quiet import quiet_libraries, quiet_native

    check_writable("out", out, "model.pte")
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
