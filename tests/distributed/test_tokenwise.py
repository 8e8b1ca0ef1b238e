"""Token-local work in chunks, and whole layers: the same as at once, and what would be wrong is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kernel_pytorch as kp
from kernel_pytorch.distributed import tokenwise as module

tokenwise, chunked_layer = kp.context_parallel.tokenwise, kp.context_parallel.chunked_layer
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("chunk", [1, 7, 50, 64])
def test_chunks_are_the_whole(chunk: int) -> None:
    torch.manual_seed(0)
    linear, gain = nn.Linear(8, 12), nn.Parameter(torch.randn(12))

    def function(first: int, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.arange(first, first + x.shape[-2]).unsqueeze(-1)
        return linear(x).tanh() * place, y * gain.sum()

    x, y = torch.randn(2, 50, 8, requires_grad=True), torch.randn(2, 50, 3, requires_grad=True)
    parameters = [*linear.parameters(), gain]
    whole = function(0, x, y)
    weights = [torch.randn_like(one) for one in whole]
    expected = torch.autograd.grad(whole, [x, y, *parameters], weights)
    found = tokenwise(function, x, y, chunk=chunk, parameters=parameters)
    torch.testing.assert_close(found, whole)
    torch.autograd.backward(found, weights)
    for leaf, gradient in zip([x, y, *parameters], expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-4)


def test_integers_unused_inputs_and_outputs_without_a_gradient() -> None:
    table = nn.Parameter(torch.randn(10, 4))
    tokens, unused = torch.randint(10, (9, 1)), torch.randn(9, 2, requires_grad=True)

    def function(_: int, t: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return table[t[:, 0]], t * 2

    rows, doubled = tokenwise(function, tokens, unused, chunk=4, parameters=[table])
    assert torch.equal(doubled, tokens * 2)
    rows.sum().backward()
    assert torch.equal(table.grad, torch.bincount(tokens[:, 0], minlength=10).float()[:, None].expand(10, 4))
    assert torch.equal(unused.grad, torch.zeros(9, 2))


def test_the_backward_computes_under_the_forwards_autocast() -> None:
    linear, seen = nn.Linear(4, 4), []

    def function(_: int, x: torch.Tensor) -> torch.Tensor:
        out = linear(x)
        seen.append(out.dtype)
        return out.float()

    x = torch.randn(6, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tokenwise(function, x, chunk=3, parameters=linear.parameters())
    out.sum().backward()
    assert seen == [torch.bfloat16] * 4


def mixes_tokens(_: int, x: torch.Tensor) -> torch.Tensor:
    return x.sum(dim=-2, keepdim=True)


def drops(_: int, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize(
    ("function", "inputs", "options", "error"),
    [
        (drops, [(6, 4)], {"chunk": 3}, "draws random numbers"),
        (mixes_tokens, [(6, 4)], {"chunk": 3}, "it treats each token alone"),
        (drops, [(6, 4), (5, 4)], {"chunk": 3}, r"\[6, 5\] tokens"),
        (drops, [(6,)], {"chunk": 3}, r"shapes \[\(6,\)\]"),
        (drops, [], {"chunk": 3}, r"shapes \[\]"),
        (drops, [(6, 4)], {"chunk": 0}, "chunk=0"),
        (drops, [(6, 4)], {"chunk": 1.5}, r"chunk=1\.5"),
    ],
)
def test_what_would_be_wrong_is_refused(
    function: Any, inputs: list[tuple[int, ...]], options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        tokenwise(function, *(torch.randn(shape) for shape in inputs), **options)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def project(self, _: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = self.kv(x).chunk(2, dim=-1)
        return tuple(y.unflatten(-1, (-1, 8)).transpose(0, 1)[None] for y in (self.q(x), k, v))

    def finish(self, _: int, x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        return x + self.out(heads[0].transpose(0, 1).flatten(1)).relu()


MASK = kp.masks.causal() & (kp.masks.window(9) | kp.masks.sinks(2))


def test_a_layer_in_chunks_is_the_layer() -> None:
    torch.manual_seed(0)
    first, second, x = Layer(), Layer(), torch.randn(40, 32, requires_grad=True)

    def plain(y: torch.Tensor) -> torch.Tensor:
        for layer in (first, second):
            y = layer.finish(0, y, kp.attention(*layer.project(0, y), MASK))
        return y

    leaves = [x, *first.parameters(), *second.parameters()]
    expected = torch.autograd.grad(plain(x).square().sum(), leaves)
    y = x
    for layer in (first, second):
        y = chunked_layer(y, MASK, layer.project, layer.finish, chunk=16, parameters=list(layer.parameters()))
    torch.testing.assert_close(y, plain(x))
    y.square().sum().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-4)


def test_a_fault_in_the_backward_leaves_the_next_forward_right() -> None:
    """The last step is left out while a layer is run again, and only then."""
    layer, x = Layer(), torch.randn(20, 32, requires_grad=True)
    calls = 0

    def project(first: int, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return layer.project(first, part)

    out = chunked_layer(x, MASK, project, layer.finish, chunk=10)
    with pytest.raises(RuntimeError, match="out of memory"):
        out.sum().backward()
    assert not module._THREAD.recomputing
    again = chunked_layer(x, MASK, layer.project, layer.finish, chunk=10)
    torch.testing.assert_close(again, out)
