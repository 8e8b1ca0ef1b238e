"""Private APIs of torch: each behaves as expected, or its fallback is used."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import kernel_pytorch
from kernel_pytorch._compat import compiler, memory, modes, structures
from kernel_pytorch._compat.private import CompatibilityWarning, private

PACKAGE = Path(kernel_pytorch.__file__).parent
# Operators and the constructor of tensor subclasses, which torch documents under a leading underscore.
_ALLOWED = re.compile(
    r"``.*?``|torch\.(_scaled_mm|_scaled_grouped_mm|_native_multi_head_attention|Tensor\._make_wrapper_subclass)\b"
    r"|torch\.ops\.aten\._"
)
_PRIVATE = re.compile(r"\btorch(\.\w+)*\._[a-zA-Z]\w*|from torch[\w.]* import .*\b_\w+|forward_ad\._\w+")


def test_modes_are_seen() -> None:
    class Watching(structures.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert modes.dispatch_mode_count() == 0
    with Watching():
        assert modes.dispatch_mode_count() == 1
        with structures.disable_modes():
            assert modes.dispatch_mode_count() == 0


def test_tracing_is_seen() -> None:
    """By Dynamo, and by AOTAutograd, which calls functions that Dynamo does not trace."""
    seen = []

    @torch.compiler.allow_in_graph
    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(modes.graph_tracing())
        return x.sum()

    def g(x: torch.Tensor) -> torch.Tensor:
        return f(x) + modes.graph_tracing()

    assert not modes.graph_tracing()
    assert torch.compile(g, backend="aot_eager", fullgraph=True)(torch.ones(2)) == 3
    assert seen[-1]


def test_transforms_are_seen() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(modes.transform_active())
        return x.sum()

    f(torch.ones(2))
    torch.func.vmap(f)(torch.ones(2, 2))
    torch.func.grad(f)(torch.ones(2))
    assert seen == [False, True, True]


def test_forward_mode_is_seen() -> None:
    assert not modes.forward_ad_active()
    with forward_ad.dual_level():
        assert modes.forward_ad_active()


def test_batched_gradients_are_seen() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, dy: torch.Tensor) -> torch.Tensor:
            seen.append(modes.is_legacy_batched(dy))
            return dy

    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Look.apply(x), x, torch.eye(2), is_grads_batched=True)
    assert seen == [True]


def test_compiler_counters_and_limits() -> None:
    before = compiler.compile_counts()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert compiler.compile_counts()[0] == before[0] + 1
    assert compiler.compile_supported()
    with compiler.compile_limits(recompile_limit=3):
        assert torch._dynamo.config.recompile_limit == 3
    assert callable(compiler.flex_attention_operator())
    table = torch.arange(4)
    with compiler.index_by_tensors():
        assert torch.vmap(lambda i: table[i])(torch.tensor([2, 0])).tolist() == [2, 0]


def test_integer_matmul() -> None:
    a, b = torch.randint(-9, 9, (17, 8), dtype=torch.int8), torch.randint(-9, 9, (8, 16), dtype=torch.int8)
    assert torch.equal(memory.int8_matmul(a, b), a.int() @ b.int())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_allocation_on_a_gpu() -> None:
    found = memory.empty_strided_cuda((2, 3), (3, 1), torch.float32)
    assert (found.shape, found.stride(), found.is_cuda) == ((2, 3), (3, 1), True)


@pytest.mark.parametrize("path", ["torch._nowhere.name", "torch._C._no_such_name"])
def test_a_missing_name_has_an_alternative_and_a_warning(path: str) -> None:
    with pytest.warns(CompatibilityWarning, match=f"{re.escape(path)} cannot be used.*: slower"):
        assert private(path, test=callable, without="slower", otherwise=7) == 7
    with pytest.raises(ImportError, match=re.escape(path)):
        private(path, test=callable, without="install another")


def test_a_name_that_behaves_differently_is_not_used() -> None:
    with pytest.warns(CompatibilityWarning, match="behaves differently"):
        assert private("torch._C._len_torch_dispatch_stack", test=lambda f: f() < 0, without="x", otherwise=1) == 1


def test_private_names_stand_in_one_place() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] == "_compat" or "kit" in inside.parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code = _ALLOWED.sub("", line.partition("#")[0])
            if _PRIVATE.search(code):
                found.append(f"{inside}:{number}: {line.strip()}")
    assert not found, "move these to kernel_pytorch/_compat:\n" + "\n".join(found)
