"""kp.rope: against Hugging Face's function, on generated shapes, its errors, and the files that adding it touched."""

from __future__ import annotations

import ast
import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_pytorch as kp
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.ops.rope.definition import ROPE, tables
from kernel_pytorch.testing import compare, interpreting, poisoned, pretend

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
every_kernel = pytest.mark.parametrize(
    "kernel",
    [
        "torch",
        # On a GPU the contract tests run the kernel itself.
        pytest.param("triton", marks=pytest.mark.skipif(not interpreting(), reason="needs the interpreter")),
    ],
)


def heads(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on(kernel: str) -> contextlib.AbstractContextManager[Any]:
    return pretend("nvidia/h200") if kernel == "triton" else contextlib.nullcontext()


@st.composite
def calls(draw: st.DrawFn, formats: tuple[torch.dtype, ...]) -> dict[str, Any]:
    batch, q_heads, k_heads = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(0, 3))
    length, dim = draw(st.sampled_from([1, 2, 7, 33])), draw(st.integers(2, 70))
    rotary = 2 * draw(st.integers(1, dim // 2))
    dtype, seed = draw(st.sampled_from(formats)), draw(st.integers(0, 1 << 30))
    order = draw(st.permutations(range(4)))
    entries = draw(st.sampled_from([1, batch]))

    def laid_out(number: int, count: int) -> torch.Tensor:
        sizes = (batch, count, length, dim)
        x = heads(seed + number, *(sizes[at] for at in order), dtype=dtype)
        return x.permute([order.index(at) for at in range(4)])

    table_dtype = draw(st.sampled_from([dtype, torch.float32]))
    return {
        "q": laid_out(0, q_heads),
        "k": laid_out(1, k_heads) if k_heads else None,
        "cos": heads(seed + 2, entries, length, rotary, dtype=table_dtype),
        "sin": heads(seed + 3, entries, length, rotary, dtype=table_dtype),
        "interleaved": draw(st.booleans()),
    }


@every_kernel
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_generated_calls_meet_the_budget(kernel: str, data: st.DataObject) -> None:
    formats = (torch.float32, torch.float16) + ((torch.bfloat16,) if kernel == "torch" else ())
    arguments = data.draw(calls(formats))
    with on(kernel), poisoned():
        found = compare(ROPE, function_of(ROPE).pinned(kernel), arguments)
    assert {one.tensor for one in found} >= {"q_out", "k_out", "dq"}
    assert not [str(one) for one in found if not one.ok]


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_is_that_of_the_definition_in_float64(interleaved: bool) -> None:
    q, k = (heads(seed, 2, 2, 3, 6).double().requires_grad_() for seed in (0, 1))
    cos, sin = (heads(seed, 2, 3, 4).double() for seed in (2, 3))
    assert torch.autograd.gradcheck(lambda q, k: kp.rope(q, k, cos, sin, interleaved=interleaved), (q, k))


def test_it_equals_hugging_face_models() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    cohere = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    q, k = heads(0, 2, 4, 9, 32), heads(1, 2, 2, 9, 32)
    for model, interleaved in ((llama, False), (cohere, True)):
        cos, sin = (table.expand(2, -1, -1) for table in tables(9, 32, interleaved, CPU))
        wanted = model.apply_rotary_pos_emb(q, k, cos, sin)
        for ours, theirs in zip(kp.rope(q, k, cos, sin, interleaved=interleaved), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_one_tensor_alone_and_tables_without_a_batch() -> None:
    q, (cos, sin) = heads(0, 2, 3, 5, 8), tables(5, 8, False, CPU)
    alone, nothing = kp.rope(q, None, cos[0], sin[0])
    assert nothing is None
    assert torch.equal(alone, kp.rope(q, q, cos, sin)[1])


@every_kernel
def test_a_loss_of_k_alone_has_a_zero_gradient_in_q(kernel: str) -> None:
    q, k = (heads(seed, 1, 2, 3, 8).requires_grad_() for seed in (0, 1))
    cos, sin = tables(3, 8, False, CPU)
    with on(kernel):
        dq, dk = torch.autograd.grad(kp.rope(q, k, cos, sin, kernel=kernel)[1].sum(), (q, k), allow_unused=True)
    assert dq is None or not dq.any()
    assert dk.any()


def test_compiled_and_exported() -> None:
    q, (cos, sin) = heads(0, 1, 2, 5, 8), tables(5, 8, False, CPU)

    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return kp.rope(q, None, cos, sin)[0] * 2

    wanted = Model()(q)
    assert torch.equal(torch.compile(Model(), fullgraph=True, backend="aot_eager")(q), wanted)
    exported = torch.export.export(Model(), (q,))
    assert "kernel_pytorch.rope" in str(exported.graph)
    assert torch.equal(exported.module()(q), wanted)


Q, COS = torch.ones(2, 4, 5, 8), torch.ones(1, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1.0, None, COS, COS), TypeError, r"q=1\.0: expected a tensor"),
        ((Q[0], None, COS, COS), ValueError, r"q has shape \[4, 5, 8\]: use \(batch, heads, length, head_dim\)"),
        ((Q, Q[:1], COS, COS), ValueError, r"k has batch 1 and q 2: they must be equal"),
        ((Q, Q.half(), COS, COS), TypeError, r"k has dtype float16 and q float32: use one dtype"),
        ((Q, None, COS[:, :4], COS), ValueError, r"cos has shape \[1, 4, 8\]: .* must be \(1 or 2, 5, rotary"),
        (
            (Q, None, COS[..., :3], COS),
            ValueError,
            r"cos has 3 rotary dimensions: use an even number from 2 to q's",
        ),
        ((Q, None, COS, COS[..., :4]), ValueError, r"cos is .* and sin is .*: they must have one shape and dtype"),
        ((Q, None, COS.half(), COS), TypeError, r"cos has dtype float16 and q float32: use q's dtype or float32"),
        ((Q, None, COS.clone().requires_grad_(), COS), ValueError, r"cos requires a gradient.*cos\.detach\(\)"),
    ],
    ids=["number", "rank", "batch", "dtype", "length", "odd", "differ", "table-dtype", "gradient"],
)
def test_errors_name_the_argument_its_value_and_the_remedy(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kp.rope(*arguments)


def test_an_op_touches_the_files_that_contributing_lists() -> None:
    """The modules that register the op outside its folder are those of the table in CONTRIBUTING.md."""
    package = ROOT / "src" / "kernel_pytorch"
    users = package / "optimization" / "candidates"  # kp.optimize may put the op into a model; no op needs that
    touched = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*.py")
        if not {package / "ops" / "rope", users} & {*path.parents} and _imports(path, "rope")
    }
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## Add an op")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(src/kernel_pytorch/[\w/]+\.py)`", section, re.MULTILINE))
    assert touched == listed
    assert len(touched) <= 6


def _imports(path: Path, op: str) -> bool:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    ops = [node for node in imports if str(node.module).startswith("kernel_pytorch.ops")]
    return any(op in {name.name for name in node.names} for node in ops)
