"""Programs are decomposed once for all partitioners, and what they want whole stays whole."""

import pytest
import torch
from torch.export import ExportedProgram

import kernel_pytorch as kp
from kernel_pytorch.lowering.decomposition import decomposed
from kernel_pytorch.lowering.target import CPU


class Mixed(torch.nn.Module):
    """Linears with and without constant weights, operators that write in place, and a branch-free activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = torch.nn.Linear(8, 8), torch.nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(self.linear(x).relu_(), weight)
        y.mul_(2)
        return torch.nn.functional.hardswish(self.conv(y), inplace=True)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 2, 8, 8), torch.randn(8, 8)


def test_what_a_partitioner_wants_stays_whole_and_the_rest_does_not() -> None:
    program = torch.export.export(Mixed().eval(), inputs())
    exact = program.module()(*inputs())
    made, asked = decomposed(program, CPU.partitioners(CPU.options()))
    names = [str(node.target) for node in made.graph.nodes if node.op == "call_function"]
    assert names.count("aten.linear.default") == 1  # the other has no constant weights
    assert names.count("aten.hardswish.default") == 1
    assert not [name for name in names if "hidden" in name or name.endswith(("_.default", "_.Tensor"))], names
    torch.testing.assert_close(made.module()(*inputs()), exact, rtol=1e-5, atol=1e-5)
    operators, check = asked[0].ops_to_not_decompose(made)
    assert check is None
    assert torch.ops.aten.linear.default in operators


def test_a_method_is_decomposed_once_beside_executorchs_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[int] = []
    real = ExportedProgram.run_decompositions

    def counted(self: ExportedProgram, table: dict | None = None, **options: object) -> ExportedProgram:
        tables.append(len(table or {}))
        return real(self, table, **options)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), torch.randn(3, 8)
    program = kp.lower(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=9)},))
    assert len(tables) == 2
    assert sorted(size > 0 for size in tables) == [False, True]
    assert program.compare()[0].snr > 100


def test_a_program_with_operators_that_write_in_place_is_equal_to_eager() -> None:
    program = kp.lower(Mixed().eval(), inputs())
    assert program.compare()[0].snr > 100
