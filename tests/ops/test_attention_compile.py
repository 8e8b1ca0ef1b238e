"""kp.attention and masks under torch.compile and torch.export: whole graphs, no recompiles, no stale masks."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kernel_pytorch as kp
from kernel_pytorch.masks import Mask, blocks, causal, documents, full, prefix, sinks, window

OP = torch.ops.kernel_pytorch.attention.default
BACKWARD = torch.ops.kernel_pytorch.attention_backward.default
Q, K, V = (torch.randn(1, 2, 96, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def table(seed: int, share: float = 0.5) -> torch.Tensor:
    return torch.rand(6, 6, generator=torch.Generator().manual_seed(seed)) < share


def compilations(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[int]:
    """How often it was compiled up to each call; every call must give what eager mode gives, to the bit."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    counts = []
    for arguments in calls:
        assert torch.equal(compiled(*arguments), function(*arguments)), f"a stale mask at {arguments}"
        counts.append(counter.frame_count)
    return counts


def attend(mask: Mask) -> torch.Tensor:
    return kp.attention(Q, K, V, mask) * 2


SERIES: dict[str, list[Mask]] = {
    "windows": [window(5), window(9), window(11, 3), window(0)],
    "sinks": [causal() & (window(9) | sinks(n)) for n in (3, 5, 0, 96)],
    "prefixes": [causal() | prefix(n) for n in (3, 50, 0)],
    "lengths": [documents([50, 46], causal()), documents([1, 95], causal()), documents([96, 0], causal())],
    "more-documents": [documents(lengths) for lengths in ([96], [50, 46], [10, 20, 66], [1] * 96, [96])],
    "tables": [blocks(table(seed), 16) for seed in range(4)],
    "denser-tables": [causal() & blocks(table(0, share), 16) for share in (0.0, 0.2, 0.9)],
    "other-expressions": [causal(), full(), causal() & window(9), window(3) | sinks(2), documents([40, 56])],
}


@pytest.mark.parametrize("name", SERIES)
def test_another_mask_is_no_other_graph(name: str) -> None:
    """Windows, lengths, the number of documents, tables, the whole expression: data, from the first call on."""
    assert compilations(attend, [(mask,) for mask in SERIES[name]]) == [1] * len(SERIES[name])


@pytest.mark.parametrize("name", ["windows", "more-documents", "denser-tables"])
def test_another_mask_in_a_module_or_a_closure_is_no_other_graph(name: str) -> None:
    class Layer(torch.nn.Module):
        mask: Mask

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return kp.attention(q, K, V, self.mask)

    layer, closed = Layer(), full()
    counters = [CompileCounterWithBackend("aot_eager") for _ in range(2)]
    in_module = torch.compile(layer, fullgraph=True, backend=counters[0])
    in_closure = torch.compile(lambda q: kp.attention(q, K, V, closed), fullgraph=True, backend=counters[1])
    for mask in SERIES[name]:
        layer.mask = closed = mask
        expected = kp.attention(Q, K, V, mask)
        assert torch.equal(in_module(Q), expected)
        assert torch.equal(in_closure(Q), expected)
    assert [counter.frame_count for counter in counters] == [1, 1]


def test_masks_composed_inside() -> None:
    def composed(left: Mask, right: Mask) -> torch.Tensor:
        return kp.attention(Q, K, V, causal() & (left | right))

    calls = [
        (window(5), sinks(2)),
        (window(7), sinks(3)),
        (documents([50, 46]), sinks(1)),
        (full(), blocks(table(1), 16)),
    ]
    assert compilations(composed, calls) == [1, 1, 1, 1]


def test_masks_built_from_numbers_in_a_graph() -> None:
    """torch.compile takes a number for a constant until it changes; then it is a variable: one recompile."""

    def inside(left: int, sink: int) -> torch.Tensor:
        return kp.attention(Q, K, V, causal() & (window(left) | sinks(sink)))

    assert compilations(inside, [(5, 2), (7, 3), (9, 4), (11, 7), (60, 2)]) == [1, 2, 2, 2, 2]


def test_lengths_that_become_documents_inside() -> None:
    def packed(lengths: torch.Tensor) -> torch.Tensor:
        return kp.attention(Q, K, V, documents(lengths, causal()))

    same = [torch.tensor(lengths) for lengths in ([50, 46], [40, 56], [0, 96])]
    assert compilations(packed, [(lengths,) for lengths in same]) == [1, 1, 1]
    torch._dynamo.reset()
    # A tensor of another length is dynamic after the first recompile, unless it is marked before.
    other = [torch.tensor(lengths) for lengths in ([50, 46], [40, 6, 50], [10, 20, 30, 36])]
    assert compilations(packed, [(lengths,) for lengths in other]) == [1, 2, 2]
    torch._dynamo.reset()
    for lengths in other:
        torch._dynamo.mark_dynamic(lengths, 0)
    assert compilations(packed, [(lengths,) for lengths in other]) == [1, 1, 1]


def test_lengths_of_each_batch_entry_inside() -> None:
    q, k, v = (x.expand(2, -1, -1, -1) for x in (Q, K, V))

    def packed(lengths: Any) -> torch.Tensor:
        return kp.attention(q, k, v, documents(lengths, window(20)))

    assert compilations(packed, [(torch.tensor(n),) for n in ([[50, 46], [1, 95]], [[0, 96], [3, 93]])]) == [1, 1]
    assert compilations(packed, [([[50, 46], [90, 5, 1]],)]) == [1]


def test_bad_masks_inside_a_graph() -> None:
    def packed(lengths: torch.Tensor, inner: Mask) -> torch.Tensor:
        return kp.attention(Q, K, V, documents(lengths, inner))

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    compiled(torch.tensor([50, 46]), causal())
    for lengths, inner, message in (
        ([50, 45], causal(), "lengths sum to 95: there are 96 keys"),
        ([-1, 97], causal(), "lengths=-1: use 0 or more"),
        ([50, 46], documents([96]), "inner=documents.* have no local positions"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled(torch.tensor(lengths), inner)
    with pytest.raises(Exception, match="left=-1: use 0 or more"):
        torch.compile(lambda n: attend(window(n)), fullgraph=True, backend="aot_eager")(-1)
    with pytest.raises(Exception, match="make it outside and pass the mask in"):
        torch.compile(lambda t: attend(blocks(t, 16)), fullgraph=True, backend="aot_eager")(table(0))


def test_other_lengths_of_the_sequence() -> None:
    def any_length(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        return kp.attention(q, k, v, mask)

    mask = causal() & (window(7) | sinks(1))
    calls = [(Q[:, :, :n], K[:, :, :m], V[:, :, :m], mask) for n, m in ((96, 96), (80, 80), (33, 96), (20, 50))]
    assert compilations(any_length, calls)[-1] <= 3  # full length, as many queries as keys, any


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_equal_eager_ones(backend: str) -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        out, lse = kp.attention(q, k, v, mask, return_lse=True, kernel="tiled")
        return out * 2 + lse.unsqueeze(-1)

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for mask in (causal() & window(9), documents([40, 56], causal()), blocks(table(3), 16) | sinks(1)):
        results = []
        for function in (loss, compiled):
            leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
            out = function(*leaves, mask)
            results.append((out, *torch.autograd.grad(out, leaves, Q)))
        for ours, expected in zip(*results, strict=True):
            assert (
                torch.equal(ours, expected) if backend == "aot_eager" else torch.allclose(ours, expected, atol=1e-5)
            )


def test_the_log_sum_exp_of_a_fast_kernel_is_differentiable_under_compile() -> None:
    """The forward cannot tell that a gradient will be asked for; the backward finds a kernel that has it."""

    def both(q: torch.Tensor) -> torch.Tensor:
        out, lse = kp.attention(q, K, V, causal(), return_lse=True)
        return out.sum() + (lse * lse).sum()

    results = []
    for function in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        leaf = Q.clone().requires_grad_()
        results.append(torch.autograd.grad(function(leaf), leaf)[0])
    torch.testing.assert_close(*results)


# Export.


class WithArgument(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        return kp.attention(q * 2, k, v, mask) + 1


class WithAttribute(torch.nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kp.attention(q * 2, k, v, self.mask) + 1


class BuiltInside(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kp.attention(q * 2, k, v, causal() & (window(7) | sinks(2)) & documents([50, 46])) + 1


def keeps_the_op(program: torch.export.ExportedProgram) -> bool:
    targets = [node.target for node in program.graph.nodes]
    attention = [target for target in targets if "attention" in str(target) or "softmax" in str(target)]
    return attention == [OP]


def through_a_file(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("mask", [causal() & window(9), documents([40, 56]), blocks(table(5), 16)], ids=str)
def test_export_with_a_mask_as_attribute(mask: Mask, strict: bool) -> None:
    module = WithAttribute(mask)
    program = torch.export.export(module, (Q, K, V), strict=strict)
    assert keeps_the_op(program)
    for exported in (program, through_a_file(program)):
        assert torch.equal(exported.module()(Q, K, V), module(Q, K, V))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_mask_built_inside(strict: bool) -> None:
    program = torch.export.export(BuiltInside(), (Q, K, V), strict=strict)
    assert keeps_the_op(program)
    assert torch.equal(program.module()(Q, K, V), BuiltInside()(Q, K, V))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_mask_as_argument(strict: bool) -> None:
    """The mask is an input of the program: another one of the same form gives another result."""
    program = torch.export.export(WithArgument(), (Q, K, V, causal() & window(9)), strict=strict)
    assert keeps_the_op(program)
    for exported in (program, through_a_file(program)):
        for mask in (causal() & window(9), causal() & window(30), causal() & window(2, 1)):
            assert torch.equal(exported.module()(Q, K, V, mask), WithArgument()(Q, K, V, mask))


def test_export_with_any_mask_as_argument() -> None:
    size = torch.export.Dim("numbers", min=2)
    shapes = {"q": None, "k": None, "v": None, "mask": [{0: size}]}
    example = (Q, K, V, causal() & window(9))
    program = torch.export.export(WithArgument(), example, dynamic_shapes=shapes)
    for mask in (causal(), documents([1, 5, 90], causal()), blocks(table(6), 16)):
        assert torch.equal(program.module()(Q, K, V, mask), WithArgument()(Q, K, V, mask))


# Fake tensors and tracing.


def test_fake_tensors() -> None:
    made_before = causal() & window(9)
    with FakeTensorMode():
        leaves = [torch.empty(1, 4, 96, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        made_inside = causal() & window(1234567)
        for mask in (made_before, made_inside, None):
            out, lse = kp.attention(*leaves, mask, return_lse=True)
            assert isinstance(out, FakeTensor)
            assert (out.shape, out.dtype) == ((1, 4, 96, 32), torch.bfloat16)
            assert (lse.shape, lse.dtype) == ((1, 4, 96), torch.float32)
            gradients = torch.autograd.grad((out.sum(), lse.sum()), leaves)
            assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in leaves]
    outside = kp.attention(*leaves, made_before)
    assert isinstance(outside, FakeTensor)
    # Masks are kept for later: one made among fake tensors must be as real as any.
    for mask in (causal() & window(1234567), made_before):
        assert not isinstance(mask.code, FakeTensor)
        assert torch.equal(torch.compile(attend, backend="aot_eager", fullgraph=True)(mask), attend(mask))


def test_an_eager_forward_has_a_backward_among_modes() -> None:
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        seen: list[object] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    leaf = Q.clone().requires_grad_()
    expected = torch.autograd.grad(kp.attention(leaf, K, V, window(9)).sum(), leaf)[0]
    out = kp.attention(leaf, K, V, window(9))
    with Watch() as watch:
        kp.attention(Q, K, V, window(9))
        found = torch.autograd.grad(out.sum(), leaf)[0]
    assert torch.equal(found, expected)
    assert [func for func in watch.seen if "kernel_pytorch" in str(func)] == [OP, BACKWARD]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_op(mode: str) -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(kp.attention(q, k, v, causal() & window(9)).sum(), q)[0]

    graph = make_fx(step, tracing_mode=mode)(Q.clone().requires_grad_(), K, V)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert (targets.count(OP), targets.count(BACKWARD)) == (1, 1)
    assert torch.equal(graph(Q, K, V), step(Q.clone().requires_grad_(), K, V))
