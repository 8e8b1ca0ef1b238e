"""kp.attention inside transforms of torch.func, as scaled_dot_product_attention works there."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, jacrev, vjp, vmap

import kernel_pytorch as kp
from kernel_pytorch.masks import causal

pytestmark = pytest.mark.filterwarnings("ignore:.*batching rule.*")
Q, K, V = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SINKS = torch.tensor([0.3, -0.2], dtype=torch.float64)


def sdpa(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(q, k, v):
    return kp.attention(q, k, v, causal())


TRANSFORMS = {
    "grad": lambda attend: grad(lambda *x: attend(*x).square().sum(), argnums=(0, 1, 2))(Q, K, V),
    "vjp": lambda attend: vjp(attend, Q, K, V)[1](V),
    "jacrev": lambda attend: jacrev(attend, argnums=1)(Q, K, V),
    "vmap": lambda attend: vmap(attend)(
        Q.expand(3, 1, 1, 2, 6, 8)[:, 0], K[None].expand(3, -1, -1, -1, -1), V[None].expand(3, -1, -1, -1, -1)
    ),
    "vmap of grad": lambda attend: vmap(grad(lambda k: attend(Q, k, V).square().sum()))(torch.stack([K, 2 * K])),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_as_sdpa(name):
    torch.testing.assert_close(TRANSFORMS[name](ours), TRANSFORMS[name](sdpa))


def test_terms_of_scores():
    def loss(q, bias, sinks):
        return kp.attention(q, K, V, causal(), bias=bias, sink_logits=sinks, softcap=2.0).square().sum()

    leaves = [x.clone().requires_grad_() for x in (Q, torch.zeros(1, 2, 6, 6, dtype=torch.float64), SINKS)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(grad(loss, argnums=(0, 1, 2))(*(x.detach() for x in leaves)), expected)


def test_a_second_derivative_is_an_error():
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        grad(lambda q: grad(lambda q: ours(q, K, V).square().sum())(q).sum())(Q)


def test_rms_norm():
    x, weight = torch.randn(4, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)

    def loss(norm):
        return grad(lambda x: norm(x).pow(3).sum())(x)

    expected = loss(lambda x: torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
    torch.testing.assert_close(loss(lambda x: kp.rms_norm(x, weight, 1e-6)), expected)
