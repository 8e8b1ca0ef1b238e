"""``kernel-pytorch lower``: lower a model, report what was delegated, and compare with eager PyTorch."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from kernel_pytorch.cli.factory import from_function

__all__ = ["lower"]


def lower(source: str, out: Path, backend: str, recipe: str | None) -> None:
    from kernel_pytorch.lowering.program import lower as lower_model

    console = Console()
    model, inputs = from_function(source)
    model, inputs = model.eval(), tuple(inputs)
    with console.status("exporting the model") as status:
        program = lower_model(model, inputs, backend=backend, recipe=recipe, tell=status.update)
        program.save(out)
        status.update("comparing with eager PyTorch")
        differences = program.compare()
    console.print(str(program.report), markup=False, soft_wrap=True)
    for difference in differences:
        console.print(str(difference), markup=False)
    console.print(f"written to {out}", markup=False, soft_wrap=True)
