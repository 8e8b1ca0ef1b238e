"""Small models, one per operator, from which the table of supported operators is generated.

Support is not declared here: ``kernel_pytorch.documentation.op_support`` lowers and runs each model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

__all__ = ["PROBES", "Probe", "probe"]


@dataclass(frozen=True)
class Probe:
    """A model around one operator.

    Example:
        >>> probe("aten::gelu", torch.nn.functional.gelu, (4, 8)).variant
        ''
    """

    operator: str
    """The operator's name in ``torch.export``; probing fails if the exported model does not contain it."""
    make: Callable[[], torch.nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    variant: str = ""
    """The unusual condition, such as "a mask tensor"; a refusal is reported as "not with ..."."""
    positive: bool = False
    """Use positive inputs only."""
    dynamic: bool = True
    """Make the first dimension of every input dynamic."""
    whole_numbers: bool = False
    """Use integers below 8 for the first input."""

    def inputs(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return random inputs from a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        made = [torch.rand(shape, generator=generator) * 4 for shape in self.shapes]
        given = [(x + 0.25 if self.positive else x - 2).to(dtype) for x in made]
        if self.whole_numbers:
            given[0] = torch.randint(0, 8, self.shapes[0], generator=generator)
        return tuple(given)


class _Calls(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def probe(operator: str, function: Callable[..., Any], *shapes: tuple[int, ...], **facts: Any) -> Probe:
    """Return a probe of a function that has no parameters or buffers."""
    return Probe(operator, lambda: _Calls(function), shapes, **facts)


def _attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    import kernel_pytorch as kp

    return kp.attention(q, k, v, kp.masks.causal() & (kp.masks.window(4) | kp.masks.sinks(1)))


def _norm(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    import kernel_pytorch as kp

    return kp.rms_norm(q, k)


_ROWS = (4, 32)
_IMAGE = (2, 8, 12, 12)
_HEADS = (2, 4, 16, 8)
_sdpa = F.scaled_dot_product_attention

PROBES: tuple[Probe, ...] = (
    # Attention
    probe("aten::scaled_dot_product_attention", _sdpa, _HEADS, _HEADS, _HEADS),
    probe(
        "aten::scaled_dot_product_attention",
        lambda q, k, v: _sdpa(q, k, v, is_causal=True, scale=0.5),
        *(_HEADS, _HEADS, _HEADS),
        variant="a causal mask",
    ),
    probe(
        "aten::scaled_dot_product_attention",
        lambda q, k, v: _sdpa(q, k, v, enable_gqa=True),
        *(_HEADS, (2, 2, 16, 8), (2, 2, 16, 8)),
        variant="grouped heads",
    ),
    probe(
        "aten::scaled_dot_product_attention",
        lambda q, k, v, bias: _sdpa(q, k, v, attn_mask=bias),
        *(_HEADS, _HEADS, _HEADS, (2, 1, 16, 16)),
        variant="a mask tensor",
    ),
    probe("kernel_pytorch::attention", _attends, _HEADS, _HEADS, _HEADS),
    # Linears and convolutions
    Probe("aten::linear", lambda: torch.nn.Linear(128, 24), ((4, 128),)),  # whole groups of every recipe
    Probe("aten::linear", lambda: torch.nn.Linear(128, 24, bias=False), ((4, 128),), variant="no bias"),
    probe("aten::linear", F.linear, _ROWS, (24, 32), variant="weights that are an input", dynamic=False),
    probe("aten::matmul", torch.matmul, _ROWS, (32, 24), dynamic=False),
    probe("aten::bmm", torch.bmm, (2, 4, 8), (2, 8, 4)),
    Probe("aten::conv1d", lambda: torch.nn.Conv1d(8, 8, 3), ((2, 8, 12),)),
    Probe("aten::conv2d", lambda: torch.nn.Conv2d(8, 8, 3, padding=1), (_IMAGE,)),
    Probe("aten::conv2d", lambda: torch.nn.Conv2d(8, 8, 3, groups=8), (_IMAGE,), variant="a group a channel"),
    Probe("aten::conv_transpose2d.input", lambda: torch.nn.ConvTranspose2d(8, 8, 2, stride=2), (_IMAGE,)),
    probe("aten::max_pool2d", lambda x: F.max_pool2d(x, 2), _IMAGE),
    probe("aten::avg_pool2d", lambda x: F.avg_pool2d(x, 2), _IMAGE),
    probe("aten::adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1), _IMAGE),
    Probe("aten::embedding", lambda: torch.nn.Embedding(8, 32), ((4, 6),), whole_numbers=True),
    # Norms
    Probe("aten::rms_norm", lambda: torch.nn.RMSNorm(32, eps=1e-6), (_ROWS,)),
    probe("kernel_pytorch::rms_norm", _norm, _ROWS, (32,), dynamic=False),
    Probe("aten::layer_norm", lambda: torch.nn.LayerNorm(32), (_ROWS,)),
    Probe("aten::batch_norm", lambda: torch.nn.BatchNorm2d(8), (_IMAGE,)),
    Probe("aten::group_norm", lambda: torch.nn.GroupNorm(2, 8), (_IMAGE,)),
    # Activations
    probe("aten::gelu", F.gelu, _ROWS),
    probe("aten::gelu", lambda x: F.gelu(x, approximate="tanh"), _ROWS, variant="approximate='tanh'"),
    probe("aten::silu", F.silu, _ROWS),
    probe("aten::sigmoid", torch.sigmoid, _ROWS),
    probe("aten::tanh", torch.tanh, _ROWS),
    probe("aten::erf", torch.erf, _ROWS),
    probe("aten::relu", torch.relu, _ROWS),
    probe("aten::leaky_relu", F.leaky_relu, _ROWS),
    probe("aten::leaky_relu", lambda x: F.leaky_relu(x, 1.5), _ROWS, variant="a slope above 1"),
    probe("aten::elu", F.elu, _ROWS),
    Probe("aten::prelu", lambda: torch.nn.PReLU(8), (_IMAGE,)),
    probe("aten::hardtanh", F.hardtanh, _ROWS),
    probe("aten::hardsigmoid", F.hardsigmoid, _ROWS),
    probe("aten::hardswish", F.hardswish, _ROWS),
    probe("aten::softmax.int", lambda x: torch.softmax(x, -1), _ROWS),
    probe("aten::softmax.int", lambda x: torch.softmax(x, 1), (4, 8, 6), variant="an inner dimension"),
    probe("aten::log_softmax.int", lambda x: torch.log_softmax(x, -1), _ROWS),
    # Pointwise
    probe("aten::add.Tensor", torch.add, _ROWS, _ROWS),
    probe("aten::sub.Tensor", torch.sub, _ROWS, _ROWS),
    probe("aten::mul.Tensor", torch.mul, _ROWS, _ROWS),
    probe("aten::div.Tensor", torch.div, _ROWS, _ROWS, positive=True),
    probe(
        "aten::div.Tensor_mode",
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        *(_ROWS, _ROWS),
        positive=True,
    ),
    probe("aten::maximum", torch.maximum, _ROWS, _ROWS),
    probe("aten::minimum", torch.minimum, _ROWS, _ROWS),
    probe("aten::neg", torch.neg, _ROWS),
    probe("aten::abs", torch.abs, _ROWS),
    probe("aten::exp", torch.exp, _ROWS),
    probe("aten::log", torch.log, _ROWS, positive=True),
    probe("aten::log2", torch.log2, _ROWS, positive=True),
    probe("aten::log10", torch.log10, _ROWS, positive=True),
    probe("aten::sqrt", torch.sqrt, _ROWS, positive=True),
    probe("aten::rsqrt", torch.rsqrt, _ROWS, positive=True),
    probe("aten::reciprocal", torch.reciprocal, _ROWS, positive=True),
    probe("aten::pow.Tensor_Scalar", lambda x: x.pow(2), _ROWS),
    probe("aten::pow.Tensor_Scalar", lambda x: x.pow(1.5), _ROWS, variant="a power of 1.5", positive=True),
    probe("aten::sin", torch.sin, _ROWS),
    probe("aten::cos", torch.cos, _ROWS),
    probe("aten::clamp", lambda x: x.clamp(-1, 1), _ROWS),
    probe("aten::floor", torch.floor, _ROWS),
    probe("aten::ceil", torch.ceil, _ROWS),
    probe("aten::where.self", lambda x, y: torch.where(x > y, x, y), _ROWS, _ROWS),
    # Reductions
    probe("aten::mean.dim", lambda x: x.mean(-1), _ROWS),
    probe("aten::sum.dim_IntList", lambda x: x.sum(-1), _ROWS),
    probe("aten::amax", lambda x: x.amax(-1), _ROWS),
    probe("aten::argmax", lambda x: x.argmax(-1), _ROWS),
    # Shapes
    probe("aten::view", lambda x: x.view(x.shape[0], 4, 8), _ROWS),
    probe("aten::permute", lambda x: x.permute(0, 2, 1), (4, 8, 6)),
    probe("aten::transpose.int", lambda x: x.transpose(1, 2), (4, 8, 6)),
    probe("aten::unsqueeze", lambda x: x.unsqueeze(1), _ROWS),
    probe("aten::squeeze.dim", lambda x: x.squeeze(1), (4, 1, 8)),
    probe("aten::expand", lambda x: x.expand(x.shape[0], 6, 8), (4, 1, 8)),
    probe("aten::slice.Tensor", lambda x: x[:, 4:20], _ROWS),
    probe("aten::select.int", lambda x: x[:, 3], _ROWS),
    probe("aten::split.Tensor", lambda x: torch.split(x, 8, dim=1), _ROWS),
    probe("aten::cat", lambda x, y: torch.cat((x, y), 1), _ROWS, _ROWS),
    probe("aten::stack", lambda x, y: torch.stack((x, y), 1), _ROWS, _ROWS),
    probe("aten::pad", lambda x: F.pad(x, (1, 2)), _ROWS),
)
"""The probes of ``backend="cpu"``."""
