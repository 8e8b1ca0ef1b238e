"""kp.context_parallel.parallelize and token_mean: models over Gloo ranks, against the same in one process.

Every rank also runs the model by itself, in float32 and in float64. What float32 is off by in one process is the
measure of what it may be off by when spread: sums are taken in another order, no more.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import kernel_pytorch as kp
from kernel_pytorch.masks import Mask
from ranks import Ranks, started

VOCAB, HIDDEN, HEADS, KV_HEADS = 61, 32, 4, 2
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(8) as found:
        yield found


# A plain transformer


def rotated(x_BHND: torch.Tensor, positions_BN: torch.Tensor) -> torch.Tensor:
    half = x_BHND.shape[-1] // 2
    rate = 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (positions_BN.unsqueeze(-1) * rate).unsqueeze(1)
    cos, sin = angle.cos().to(x_BHND.dtype), angle.sin().to(x_BHND.dtype)
    a, b = x_BHND.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, HIDDEN * (HEADS + 2 * KV_HEADS) // HEADS)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.dropout = 0.0
        self.bias: torch.Tensor | None = None

    def forward(self, x_BNE: torch.Tensor, positions_BN: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x_BNE).unflatten(-1, (HEADS + 2 * KV_HEADS, HIDDEN // HEADS)).transpose(1, 2)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k = rotated(q, positions_BN), rotated(k, positions_BN)
        out = functional.scaled_dot_product_attention(
            q, k, v, self.bias, dropout_p=self.dropout, is_causal=True, enable_gqa=True, scale=0.3
        )
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.ffn = nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN)
        )

    def forward(self, x_BNE: torch.Tensor, positions_BN: torch.Tensor) -> torch.Tensor:
        x_BNE = x_BNE + self.attention(self.attention_norm(x_BNE), positions_BN)
        return x_BNE + self.ffn(x_BNE)


class Transformer(nn.Module):
    def __init__(self, recompute: str | None = None, layers: int = 2) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).unsqueeze(0)
        x_BNE = self.embedding(input_ids)
        for block in self.blocks:
            if self.recompute == "module":
                x_BNE = checkpoint(block, x_BNE, position_ids, use_reentrant=False)
            elif self.recompute == "reentrant":
                x_BNE = checkpoint(block, x_BNE, position_ids, use_reentrant=True)
            elif self.recompute is not None:  # a function inside the module, which no module's forward is around
                run = partial(functional.scaled_dot_product_attention, is_causal=True)
                q = x_BNE.unsqueeze(1)
                x_BNE = checkpoint(run, q, q, q, use_reentrant=self.recompute == "function, reentrant").squeeze(1)
            else:
                x_BNE = block(x_BNE, position_ids)
        return self.head(x_BNE)


def transformer(recompute: str | None = None, layers: int = 2) -> Transformer:
    torch.manual_seed(0)
    return Transformer(recompute, layers)


def text(length: int, seed: int = 0, batch: int = 2) -> torch.Tensor:
    """Learnable tokens: most are the previous one plus a step that is constant in a sequence."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 4, (batch, 1), generator=generator)
    noise = torch.randint(0, 2, (batch, length), generator=generator)
    return (steps * torch.arange(length) + noise.cumsum(1)) % VOCAB


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def averaged(model: nn.Module, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Gradients averaged over ranks, as DDP does."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)
    return [p.grad for p in model.parameters() if p.grad is not None]


def excess(spread: list[torch.Tensor], single: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Return the largest error of the sharded tensors relative to its bound.

    The bound is four times the error of one process, and at least eight ulps of the tensor's amax.
    """
    worst = 0.0
    for a, b, c in zip(spread, single, exact, strict=True):
        assert a.shape == c.shape
        allowed = 4 * (b.double() - c).abs().max() + 8 * EPS * c.abs().max()
        worst = max(worst, float((a.double() - c).abs().max() / allowed))
    return worst


def alone(
    make: Callable[[], nn.Module], step: Callable[[nn.Module], Any], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output, loss and gradients of one process."""
    model = make().to(dtype)
    output, loss = step(model)
    loss.backward()
    return [output.detach(), loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


# The same as one process


def plain_step(tokens: torch.Tensor, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(tokens)
    return logits, next_token_loss(logits, tokens)


def run_plain(group: dist.ProcessGroup, length: int, recompute: str | None, gather: bool) -> float:
    tokens = text(length)
    mask = kp.masks.causal()
    model = kp.context_parallel.parallelize(transformer(recompute), group, mask, gather_output=gather)
    if gather:
        logits, loss = plain_step(tokens, model)
    else:
        cp = kp.context_parallel.Context(group, length, mask)
        local = model(tokens)
        targets = cp.shard(functional.pad(tokens[:, 1:], (0, 1), value=-100))
        losses = functional.cross_entropy(local.flatten(0, 1), targets.flatten(), reduction="none")
        loss = kp.context_parallel.token_mean(losses[targets.flatten() != -100], cp)
        logits = cp.unshard(local.detach())
    loss.backward()
    found = [logits.detach(), loss.detach(), *averaged(model, group)]
    step = partial(plain_step, tokens)
    return excess(found, alone(transformer, step, torch.float32), alone(transformer, step, torch.float64))


@pytest.mark.parametrize(
    ("size", "length", "recompute", "gather"),
    [
        (1, 37, None, True),
        (2, 37, None, True),
        (4, 64, None, False),
        (4, 61, None, False),
        (4, 37, "module", True),
        (2, 45, "module", False),
        (4, 37, "reentrant", True),
        (4, 5, "module", False),
    ],
)
def test_a_plain_transformer_is_the_same(
    ranks: Ranks, size: int, length: int, recompute: str | None, gather: bool
) -> None:
    assert max(ranks.run(run_plain, size, length, recompute, gather)) <= 1


def own_forward(self: Attention, x_BNE: torch.Tensor, positions_BN: torch.Tensor) -> torch.Tensor:
    """The same attention by kp.attention without a group."""
    qkv = self.qkv(x_BNE).unflatten(-1, (HEADS + 2 * KV_HEADS, HIDDEN // HEADS)).transpose(1, 2)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    q, k = rotated(q, positions_BN), rotated(k, positions_BN)
    out = kp.attention(q, k, v, kp.masks.causal() & kp.masks.window(9), scale=0.3)
    assert isinstance(out, torch.Tensor)
    return self.out(out.transpose(1, 2).flatten(2))


def ours() -> Transformer:
    model = transformer("module")
    for block in model.blocks:
        block.attention.forward = MethodType(own_forward, block.attention)
    return model


def run_ours(group: dist.ProcessGroup, length: int, compiled: bool) -> float:
    tokens = text(length)
    model = kp.context_parallel.parallelize(ours(), group, kp.masks.causal())
    run = torch.compile(model, backend="aot_eager") if compiled else model
    logits, loss = plain_step(tokens, run)
    loss.backward()
    found = [logits.detach(), loss.detach(), *averaged(model, group)]
    step = partial(plain_step, tokens)
    return excess(found, alone(ours, step, torch.float32), alone(ours, step, torch.float64))


@pytest.mark.parametrize("compiled", [False, True])
def test_kp_attention_is_sharded_too(ranks: Ranks, compiled: bool) -> None:
    """Inside a parallelized model, kp.attention with its own mask attends across ranks too."""
    assert max(ranks.run(run_ours, 2 if compiled else 4, 37, compiled)) <= 1


def run_two_lengths(group: dist.ProcessGroup, lengths: tuple[int, int]) -> float:
    """Two forwards before one backward: each recomputation must use the context of its forward."""
    batches = [text(length, seed) for seed, length in enumerate(lengths)]

    def step(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        results = [plain_step(tokens, model) for tokens in batches]
        return results[0][0], results[0][1] + results[1][1]

    model = kp.context_parallel.parallelize(transformer("module"), group, kp.masks.causal())
    logits, loss = step(model)
    loss.backward()
    found = [logits.detach(), loss.detach(), *averaged(model, group)]
    return excess(found, alone(transformer, step, torch.float32), alone(transformer, step, torch.float64))


@pytest.mark.parametrize("lengths", [(40, 24), (40, 41)])
def test_recomputation_finds_the_context_of_its_forward(ranks: Ranks, lengths: tuple[int, int]) -> None:
    """Also if a rank has the same number of tokens in both."""
    assert max(ranks.run(run_two_lengths, 4, lengths)) <= 1


def layer_masks(name: str) -> Mask:
    return kp.masks.causal() & kp.masks.window(5) if name.startswith("blocks.0") else kp.masks.causal()


class Masked(Transformer):
    """The reference of a model whose layers have different masks: dense ones, by SDPA itself."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        length = input_ids.shape[1]
        for index, block in enumerate(self.blocks):
            dense = layer_masks(f"blocks.{index}.attention").dense(length, length)[0, 0]
            block.attention.forward = partial(dense_forward, block.attention, dense)
        return super().forward(input_ids, position_ids)


def dense_forward(self: Attention, dense: torch.Tensor, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    qkv = self.qkv(x).unflatten(-1, (HEADS + 2 * KV_HEADS, HIDDEN // HEADS)).transpose(1, 2)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    q, k = rotated(q, positions), rotated(k, positions)
    out = functional.scaled_dot_product_attention(q, k, v, dense, enable_gqa=True, scale=0.3)
    return self.out(out.transpose(1, 2).flatten(2))


def masked() -> Masked:
    torch.manual_seed(0)
    return Masked()


def run_masks(group: dist.ProcessGroup) -> float:
    tokens = text(50)
    model = kp.context_parallel.parallelize(
        transformer("module"), group, layer_masks, place_for=kp.masks.causal(), schedule="ring"
    )
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():  # a copy that still ran the first model would notice
            parameter.zero_()
    logits, loss = plain_step(tokens, copied)
    loss.backward()
    found = [logits.detach(), loss.detach(), *averaged(copied, group)]
    step = partial(plain_step, tokens)
    return excess(found, alone(masked, step, torch.float32), alone(masked, step, torch.float64))


def test_layers_may_differ_in_their_masks_and_a_copied_model_is_its_own(ranks: Ranks) -> None:
    assert max(ranks.run(run_masks, 4)) <= 1


def run_autocast(group: dist.ProcessGroup) -> tuple[str, float]:
    tokens = text(40)
    model = kp.context_parallel.parallelize(transformer(), group, kp.masks.causal())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    exact = transformer()(tokens).detach()
    return str(logits.dtype), float((logits.float() - exact).abs().max() / exact.abs().max())


def test_autocast_rounds_what_goes_into_attention(ranks: Ranks) -> None:
    for dtype, error in ranks.run(run_autocast, 2):
        assert dtype == "torch.bfloat16"
        assert error < 0.05


# Hugging Face


def llama(**changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {"attn_implementation": "sdpa", **changes}
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        **options,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def llama_step(tokens: torch.Tensor, labels: torch.Tensor, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    output = model(input_ids=tokens, labels=labels)
    return output.logits, output.loss


def run_llama(group: dist.ProcessGroup, length: int, recompute: bool) -> float:
    tokens = text(length)
    labels = tokens.masked_fill(torch.arange(length) < length // 5, -100)  # a prompt: ranks have different counts
    model: Any = llama().train()
    if recompute:
        model.gradient_checkpointing_enable()
    kp.context_parallel.parallelize(model, group, kp.masks.causal())
    logits, loss = llama_step(tokens, labels, model)
    assert logits.shape[1] == length
    loss.backward()
    found = [logits.detach(), loss.detach(), *averaged(model, group)]
    step = partial(llama_step, tokens, labels)
    return excess(found, alone(llama, step, torch.float32), alone(llama, step, torch.float64))


@pytest.mark.parametrize(
    ("size", "length", "recompute"), [(2, 37, False), (4, 37, True), (4, 64, False), (2, 41, True)]
)
def test_llama_is_the_same(ranks: Ranks, size: int, length: int, recompute: bool) -> None:
    pytest.importorskip("transformers")
    assert max(ranks.run(run_llama, size, length, recompute)) <= 1


# Training


STEPS, RATE = 50, 0.3


def train_alone(dtype: torch.dtype) -> list[float]:
    model = transformer(layers=1).to(dtype)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    losses = []
    for step in range(STEPS):
        tokens = text(33, seed=step % 4, batch=4)
        loss = next_token_loss(model(tokens), tokens)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def run_training(group: dist.ProcessGroup) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Parameters sharded over the two data-parallel ranks, and replicated over the four that share a sequence.
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("cp", "dp"))
    cp_mesh, dp_rank = mesh["cp"], mesh.get_local_rank("dp")
    mask = kp.masks.causal()
    model = transformer("module", layers=1)
    kp.context_parallel.parallelize(model, cp_mesh, mask, gather_output=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    cp = kp.context_parallel.Context(cp_mesh, 33, mask)
    losses = []
    for step in range(STEPS):
        tokens = text(33, seed=step % 4, batch=4).chunk(2)[dp_rank]
        local = model(tokens)
        targets = cp.shard(functional.pad(tokens[:, 1:], (0, 1), value=-100)).flatten()
        each = functional.cross_entropy(local.flatten(0, 1), targets, reduction="none")
        loss = kp.context_parallel.token_mean(each[targets != -100], cp)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown, group=mesh.get_group("dp"))
        losses.append(shown.item() / 2)
    return losses


def test_training_with_context_and_fsdp_follows_one_process(ranks: Ranks) -> None:
    curves = ranks.run(run_training, 8)
    single, exact = train_alone(torch.float32), train_alone(torch.float64)
    assert exact[-1] < 0.7 * exact[0]
    for spread in curves:
        assert spread == curves[0]
    # Rounding differs from the first step on, and training carries it along: one process in float32 drifts from
    # float64 in the same way, and its largest drift so far, doubled twice, is what the spread model may have.
    drift = 0.0
    for a, b, c in zip(curves[0], single, exact, strict=True):
        drift = max(drift, abs(b - c))
        assert abs(a - c) <= 4 * drift + 8 * EPS * c


# The loss


def run_token_mean(group: dist.ProcessGroup) -> tuple[float, list[float]]:
    """Rank r has r values: its own rank, r times."""
    rank = dist.get_rank(group)
    weight = torch.tensor(2.0, requires_grad=True)
    loss = kp.context_parallel.token_mean(weight * torch.full((rank,), float(rank)), group)
    loss.backward()
    assert weight.grad is not None
    dist.all_reduce(weight.grad, group=group)
    return loss.item(), [weight.grad.item() / dist.get_world_size(group)]


def test_token_mean_of_different_numbers_of_tokens(ranks: Ranks) -> None:
    mean = (1 + 4 + 9) / 6
    for value, (gradient,) in ranks.run(run_token_mean, 4):
        assert value == pytest.approx(2 * mean, rel=4 * EPS)
        assert gradient == pytest.approx(mean, rel=4 * EPS)


# What is refused


def refused(group: dist.ProcessGroup, what: str) -> str:
    causal = kp.masks.causal()
    model: Any = transformer()
    tokens, options = text(24), {}
    if what == "attn_mask":
        model.blocks[1].attention.bias = torch.zeros(12, 12)
    elif what == "dropout":
        model.blocks[1].attention.dropout = 0.1
    elif what == "no attention":
        model.blocks = nn.ModuleList()
    elif what == "function, reentrant":
        model = transformer("function, reentrant")
    elif what == "function":
        model = transformer("function")
    elif what == "multi-head":
        model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        tokens, options = torch.randn(2, 24, 16), {"positions": None}
    elif what == "flex":
        model, tokens, options = Flex(), torch.randn(1, 2, 24, 16), {"positions": None}
    elif what == "cross":
        model, tokens, options = Cross(), torch.randn(2, 24, 16), {"positions": None}
    elif what == "use_cache" or what == "attention_mask":
        model = llama()
    elif what == "sliding":
        transformers = pytest.importorskip("transformers")
        config = transformers.MistralConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1, sliding_window=8,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, attn_implementation="sdpa",
        )  # fmt: skip
        model = transformers.MistralForCausalLM(config)
    kp.context_parallel.parallelize(model, group, causal, **options)
    arguments = {"attention_mask": torch.ones_like(tokens).tril()} if what == "attention_mask" else {}
    arguments |= {"use_cache": True} if what == "use_cache" else {}
    try:
        with redirect_stderr(io.StringIO()):
            result = model(tokens, **arguments)
            result.sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


class Flex(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        q = q.transpose(1, 2)
        return flex_attention(q, q, q)  # type: ignore[return-value]


class Cross(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, other = x.unsqueeze(1), torch.randn(2, 1, 7, 16)
        return functional.scaled_dot_product_attention(q, other, other)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("attn_mask", r"ValueError: blocks.1.attention: attn_mask of shape \[12, 12\].*mask=kp.masks"),
        ("dropout", "ValueError: blocks.1.attention: dropout_p=0.1"),
        (
            "no attention",
            'RuntimeError: model called neither scaled_dot_product_attention.*attn_implementation="sdpa"',
        ),
        ("function, reentrant", "RuntimeError: the model: attention without gradients.*use_reentrant=False"),
        ("function", "CheckpointError: .*different"),
        ("multi-head", "NotImplementedError: .*nn.MultiheadAttention hides its attention: project"),
        ("flex", "flex_attention sees only this rank's tokens"),
        ("cross", r"ValueError: .*key \[2, 1, 7, 16\].*without cross-attention"),
        ("attention_mask", "ValueError: attention_mask: a parallelized model.*drop attention_mask from the call"),
        ("use_cache", "ValueError: use_cache=True"),
        ("sliding", r"ValueError: .*sliding_window=8.*kp.masks.window\(7\)"),
    ],
)
def test_calls_that_would_be_wrong_are_refused(ranks: Ranks, what: str, message: str) -> None:
    if what in ("attention_mask", "use_cache", "sliding"):
        pytest.importorskip("transformers")
    for said in ranks.run(refused, 2, what):
        assert re.search(message, said, re.DOTALL), said


def refused_model(group: dist.ProcessGroup, what: str) -> str:
    causal = kp.masks.causal()
    model: Any = transformer()
    mask: Any = causal
    options: dict[str, Any] = {}
    if what == "twice":
        kp.context_parallel.parallelize(model, group, causal)
    elif what == "positions":
        model, options = nn.Linear(4, 4), {}
    elif what == "place_for":
        mask = layer_masks
    elif what == "inputs":
        options = {"inputs": ["tokens"]}
    elif what == "mask":
        mask = "causal"
    elif what == "eager":
        model = llama(attn_implementation="eager")
    elif what == "pooled":
        import transformers

        model = transformers.LlamaForSequenceClassification(llama().config)
    try:
        kp.context_parallel.parallelize(model, group, mask, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("twice", "ValueError: model: it is parallelized already"),
        ("positions", "ValueError: positions='position_ids': the model's forward has no such argument; .*None"),
        ("place_for", "ValueError: place_for: needed"),
        ("inputs", "ValueError: inputs='tokens'.*use some of input_ids"),
        ("mask", "TypeError: mask='causal'"),
        ("eager", """ValueError: model: .*attn_implementation='eager'.*attn_implementation="sdpa\""""),
        ("pooled", "NotImplementedError: model: LlamaForSequenceClassification pools its tokens"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused(ranks: Ranks, what: str, message: str) -> None:
    if what in ("eager", "pooled"):
        pytest.importorskip("transformers")
    for said in ranks.run(refused_model, 1, what):
        assert re.search(message, said), said


# torch.compile


def run_compiled(group: dist.ProcessGroup, recompute: str | None, what: str) -> tuple[float, int]:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    model = kp.context_parallel.parallelize(transformer(recompute), group, kp.masks.causal())
    compiled: Any = model
    if what == "model":
        compiled = torch.compile(model, backend=graphs)
    else:
        for block in model.blocks:
            block.compile(backend=graphs)
    errors = []
    for length in (37, 44):  # the second one with what was compiled for the first, where that still holds
        model.zero_grad()
        tokens = text(length)
        logits, loss = plain_step(tokens, compiled)
        loss.backward()
        found = [logits.detach(), loss.detach(), *averaged(model, group)]
        step = partial(plain_step, tokens)
        errors.append(
            excess(found, alone(transformer, step, torch.float32), alone(transformer, step, torch.float64))
        )
    return max(errors), graphs.frame_count


@pytest.mark.parametrize(("recompute", "what"), [(None, "model"), (None, "blocks"), ("module", "blocks")])
def test_a_compiled_model_is_the_same(ranks: Ranks, recompute: str | None, what: str) -> None:
    """Each attention is a graph break; the code between is compiled, also in recomputations."""
    for error, graphs in ranks.run(run_compiled, 2, recompute, what):
        assert error <= 1
        assert graphs >= 2
