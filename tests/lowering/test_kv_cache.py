"""kp.KVCache: in eager mode, and as memory of the delegate, against attention over the whole history."""

import subprocess

import pytest
import torch
import transformers

import kernel_pytorch as kp
from kernel_pytorch.kv_cache import quantized_rows
from kernel_pytorch.lowering import CachedLanguageModel, PartitionerOptions
from kernel_pytorch.lowering.build import build

OURS = "KernelPyTorchBackend"
CACHED = "kernel_pytorch_lowering::cached_attention"
WINDOW, SINKS, LONGEST = 7, 3, 6
MASK = kp.masks.causal() & (kp.masks.window(WINDOW) | kp.masks.sinks(SINKS))
# Prefills and decodes, the first of them shorter and longer than the sinks, three times around the ring.
STEPS = (2, 1, 6, 1, 1, 5, 1, 6, 6, 1, 2, 1, 1, 4, 1, 1)
FORMATS = (torch.float32, torch.float16, torch.int8)


def as_held(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers as a cache of a format holds them, in float64."""
    if dtype != torch.int8:
        return x.to(dtype).double()
    rows, scales = quantized_rows(x)
    return rows.double() * scales.double()[..., None]


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition: attention over the whole history at once, in float64."""
    keep = MASK.dense(q.shape[2], k.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=keep, enable_gqa=True
    )


def tokens(length: int, heads: int = 4, kv_heads: int = 2, dim: int = 20) -> tuple[torch.Tensor, ...]:
    made = torch.randn(heads + 2 * kv_heads, length, dim).split((heads, kv_heads, kv_heads))
    return tuple(x[None] for x in made)


def cache_of(dtype: torch.dtype, **options) -> kp.KVCache:
    return kp.KVCache(2, 20, window=WINDOW, sinks=SINKS, longest=LONGEST, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("steps", [STEPS, (1,) * 40], ids=["parts", "one by one"])
def test_parts_are_the_whole_history_under_the_mask(dtype: torch.dtype, steps: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = tokens(sum(steps))
    cache, at, found = cache_of(dtype), 0, []
    before = cache.nbytes
    for step in steps:
        found.append(cache(*(x[:, :, at : at + step] for x in (q, k, v)), at))
        at += step
    wanted = whole(q, as_held(k, dtype), as_held(v, dtype))
    torch.testing.assert_close(torch.cat(found, dim=2).double(), wanted, rtol=1e-5, atol=1e-6)
    assert cache.nbytes == before


def test_int8_is_as_exact_as_its_step_allows() -> None:
    """Half a step on every key moves a score by at most ``e``, so every share by a factor within ``exp(2 e)``."""
    torch.manual_seed(0)
    q, k, v = tokens(40)
    held = whole(q, as_held(k, torch.int8), as_held(v, torch.int8))
    key_steps, value_steps = (x.abs().amax(dim=-1).amax() / 127 for x in (k, v))
    e = q.abs().sum(dim=-1, keepdim=True) * key_steps / 2 * q.shape[-1] ** -0.5
    budget = torch.expm1(2 * e) * v.abs().max() + value_steps / 2
    error = (held - whole(q, k, v)).abs()
    assert bool((error <= budget).all())
    assert error.max() > 1e-4  # it is quantized


def test_a_row_of_int8_keeps_zeros_and_what_is_not_finite() -> None:
    rows, scales = quantized_rows(torch.tensor([[0.0, 0.0], [torch.inf, 1.0], [torch.nan, 1.0], [-2.0, 1.0]]))
    assert rows.tolist() == [[0, 0], [0, 0], [0, 0], [-127, 64]]
    assert scales[0] == 0
    assert not bool(scales[1:3].isfinite().any())


def step_of(cache: kp.KVCache, at: int, count: int = 1, batch: int = 1) -> torch.Tensor:
    q, k, v = (x.expand(batch, -1, -1, -1) for x in tokens(count))
    return cache(q, k, v, at)


def test_a_chat_is_taken_back_and_started_anew() -> None:
    torch.manual_seed(0)
    q, k, v = tokens(60)
    cache = cache_of(torch.float32)
    for at in range(0, 30, 6):
        cache(*(x[:, :, at : at + 6] for x in (q, k, v)), at)
    # Other tokens from 24 on: LONGEST back, which is as far as the ring reaches.
    other = [torch.cat([x[:, :, :24], x[:, :, 50:55]], dim=2) for x in (q, k, v)]
    again = cache(*(x[:, :, 24:] for x in other), 24)
    torch.testing.assert_close(again.double(), whole(*other)[:, :, 24:], rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match="position=23: tokens from 16 on are needed, and those before 17 have been"
    ):
        step_of(cache, 23)
    first = cache(*(x[:, :, :5] for x in (q, k, v)), 0)
    torch.testing.assert_close(first.double(), whole(*(x[:, :, :5] for x in (q, k, v))), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="position=6: the cache has seen 5 tokens; pass 0 to 5"):
        step_of(cache, 6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: step_of(cache, 0, 7), r"7 new tokens at once: the cache was made with longest=6"),
        (lambda cache: step_of(cache, 0, 1, 2), "q has batch 2: the cache was made with batch=1"),
        (lambda cache: step_of(cache, -1), "position=-1: the cache has seen 0 tokens"),
        (lambda cache: cache(*tokens(1), torch.tensor([0, 1])), r"position is torch.int64 \[2\]: pass one int64"),
        (lambda cache: cache(*tokens(1), torch.tensor([0.0])), r"position is torch.float32 \[1\]"),
        (lambda cache: cache(*tokens(1, kv_heads=1), 0), "k has 1 heads of 20 numbers: the cache was made for 2"),
        (lambda cache: cache(*tokens(1, heads=3), 0), "q has 3 heads of 20 numbers: it needs a multiple of 2"),
        (lambda cache: cache(tokens(2)[0], *tokens(1)[1:], 0), "k has 1 tokens and q has 2"),
        (lambda cache: cache(*(x[0] for x in tokens(1)), 0), "q has 3 dimensions"),
        (lambda cache: cache(tokens(1)[0].half(), *tokens(1)[1:], 0), "k is torch.float32: q, k and v must be"),
        (lambda _: kp.KVCache(2, 8, window=-1), "window=-1: at least 0"),
        (lambda _: kp.KVCache(0, 8, window=4), "kv_heads=0: at least 1"),
        (lambda _: kp.KVCache(2, 8, window=4, dtype=torch.bfloat16), "dtype=torch.bfloat16: a cache holds one"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(cache_of(torch.float32))


# Inside the delegate


class Layer(torch.nn.Module):
    """Attention over a cache and linears around it: (x, position) -> y."""

    def __init__(self, dtype: torch.dtype, batch: int = 1, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = (
            torch.nn.Linear(96, heads * 20),
            torch.nn.Linear(96, 80),
            torch.nn.Linear(20, 20),
        )
        self.cache = cache_of(dtype, batch=batch)

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, length, _ = x.shape
        k, v = self.kv(x).view(batch, length, 2, 2, 20).permute(2, 0, 3, 1, 4)
        return self.q(x).view(batch, length, self.heads, 20).transpose(1, 2), k, v

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self.out(self.cache(*self.parts(x), position).transpose(1, 2))


def chat(model: torch.nn.Module, batch: int = 1, **options) -> kp.lowering.LoweredProgram:
    """A program with prefill, for any length, and decode."""
    length, start = torch.export.Dim("length", min=2, max=LONGEST), torch.tensor([0])
    inputs = {"prefill": (torch.randn(batch, 4, 96), start), "decode": (torch.randn(batch, 1, 96), start)}
    return kp.lower(model.eval(), inputs, dynamic_shapes={"prefill": ({1: length}, None)}, **options)


def method_of(step: int) -> str:
    return "decode" if step == 1 else "prefill"


class Layers(torch.nn.Module):
    """A layer of each format, with few heads to a cache's head and with many: other kernels serve them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(dtype, 2, heads) for dtype in FORMATS for heads in (2, 4, 12))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x, position) for layer in self.layers)


def test_the_delegate_is_the_whole_history_under_the_mask() -> None:
    torch.manual_seed(0)
    model = Layers()
    program = chat(model, batch=2)
    assert program.report.left == (), program.report
    assert program.report.count(OURS, CACHED) == 2 * len(model.layers)
    assert sum(cache.nbytes for cache in program.report.caches) == sum(one.cache.nbytes for one in model.layers)
    loaded = program.load()
    x = torch.randn(2, sum(STEPS), 96)
    at, found = 0, []
    for step in STEPS:
        found.append(loaded.run(method_of(step), (x[:, at : at + step], torch.tensor([at]))))
        at += step
    # A number between two that a cache can hold may fall to either side: linears here and there differ in a last bit.
    tolerances = {torch.float32: 1e-5, torch.float16: 2e-3, torch.int8: 1e-2}
    for layer, parts in zip(model.layers, zip(*found, strict=True), strict=True):
        dtype = layer.cache.keys.dtype
        with torch.no_grad():
            q, k, v = layer.parts(x)
            wanted = layer.out(whole(q, as_held(k, dtype), as_held(v, dtype)).float().transpose(1, 2))
        tolerance = tolerances[dtype]
        torch.testing.assert_close(torch.cat(parts, dim=1), wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def plain() -> tuple[Layer, kp.lowering.LoweredProgram]:
    torch.manual_seed(0)
    model = Layer(torch.float32)
    return model, chat(model)


def test_programs_have_chats_of_their_own_and_refusals_change_nothing(plain) -> None:
    first, second = (kp.load(plain[1].buffer) for _ in range(2))
    x, other = torch.randn(1, 5, 96), torch.randn(1, 5, 96)
    first.run("prefill", (x, torch.tensor([0])))
    second.run("prefill", (other, torch.tensor([0])))
    token, at = torch.randn(1, 1, 96), torch.tensor([5])
    found = first.run("decode", (token, at))
    for wrong, message in ((7, "position 7 was given, and 6 tokens have been seen"), (-1, "position -1")):
        with pytest.raises(ValueError, match=message):
            first.run("decode", (token, torch.tensor([wrong])))
    torch.testing.assert_close(first.run("decode", (token, at)), found, rtol=0, atol=0)  # taken back by one
    assert not torch.allclose(second.run("decode", (token, at)), found)
    with pytest.raises(ValueError, match="input 0 is"):
        first.run("prefill", (torch.randn(1, 7, 96), torch.tensor([0])))
    with pytest.raises(ValueError, match="input 0 is"):
        first.run("prefill", (torch.randn(2, 4, 96), torch.tensor([0])))


def test_a_chat_inside_the_delegate_is_taken_back_and_started_anew(plain) -> None:
    model, program = plain
    loaded = program.load()
    x = torch.randn(1, 31, 96)
    for at in range(0, 30, 6):
        loaded.run("prefill", (x[:, at : at + 6], torch.tensor([at])))
    with pytest.raises(ValueError, match="position 23 needs tokens from 16 on, and those before 17 have been over"):
        loaded.run("decode", (x[:, 30:], torch.tensor([23])))
    again = loaded.run("decode", (x[:, 30:], torch.tensor([24])))
    with torch.no_grad():
        mixed = torch.cat([x[:, :24], x[:, 30:]], dim=1)
        wanted = model.out(whole(*model.parts(mixed)).float().transpose(1, 2))[:, -1:]
    torch.testing.assert_close(again, wanted, rtol=1e-5, atol=1e-5)
    loaded.run("decode", (x[:, :1], torch.tensor([0])))
    with pytest.raises(ValueError, match="position 2 was given, and 1 tokens have been seen"):
        loaded.run("decode", (x[:, :1], torch.tensor([2])))


def test_methods_share_their_weights(plain) -> None:
    weights = sum(parameter.nbytes for parameter in plain[0].parameters() if parameter.nbytes > 4096)
    both = len(plain[1].buffer)
    assert weights < both < 1.6 * weights + 16384  # twice as many would be there if each method had its own
    at = plain[1].buffer.index(plain[0].kv.bias.detach().numpy().tobytes())  # small: inside a payload
    assert at > 0
    start = plain[1].buffer.rindex(plain[0].q.weight.detach()[:32, 0].contiguous().numpy().tobytes())
    broken = bytearray(plain[1].buffer)
    broken[start] ^= 1
    with pytest.raises(ValueError, match="is damaged: its checksum is wrong"):
        kp.load(bytes(broken))


def test_the_runner_holds_a_chat(plain, tmp_path) -> None:
    program = plain[1]
    program.save(tmp_path / "chat.pte")
    loaded, at = kp.load(program.buffer), 0
    command = [str(build().runner), "chat.pte"]
    for number, step in enumerate((5, 1, 6, 1, 1, 6)):
        x, position = torch.randn(1, step, 96), torch.tensor([at])
        wanted = loaded.run(method_of(step), (x, position))
        (tmp_path / f"x{number}").write_bytes(x.numpy().tobytes())
        (tmp_path / f"p{number}").write_bytes(position.numpy().tobytes())
        command += ["--method", method_of(step), "--input", f"x{number}", "--shape", f"1,{step},96"]
        command += ["--input", f"p{number}", "--output", "y"]
        at += step
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    found = torch.frombuffer(bytearray((tmp_path / "y").read_bytes()), dtype=torch.float32).view(wanted.shape)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    refused = subprocess.run([*command[:2], *command[-10:]], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "position 14 was given, and 0 tokens have been seen" in refused.stderr


def test_what_cannot_be_a_cache_of_the_delegate_is_refused_with_a_reason() -> None:
    class Fixed(torch.nn.Module):
        def __init__(self, twice: bool) -> None:
            super().__init__()
            self.cache, self.twice = cache_of(torch.float32), twice

        def forward(self, q, k, v, position):
            return self.cache(q, k, v, position) + (self.cache(q, k, v, position) if self.twice else 0)

    inputs = (*tokens(1), torch.tensor([0]))
    with pytest.raises(ValueError, match="its cache is used more than once in a method"):
        kp.lower(Fixed(twice=True).eval(), inputs)
    with pytest.raises(ValueError, match="the options leave out attention"):
        kp.lower(Fixed(twice=False).eval(), inputs, options=PartitionerOptions(attention=False))
    with pytest.raises(ValueError, match=r"inputs has the methods \['prefill'\], dynamic_shapes has \['decode'\]"):
        kp.lower(Fixed(twice=False).eval(), {"prefill": inputs}, dynamic_shapes={"decode": None})


def test_a_llama_chats_beyond_its_window() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = CachedLanguageModel(
        transformers.LlamaForCausalLM(config), window=WINDOW, sinks=SINKS, longest=LONGEST, dtype=torch.int8
    )
    length, start = torch.export.Dim("length", min=2, max=LONGEST), torch.tensor([0])
    inputs = {"prefill": (torch.ones(1, 4, dtype=torch.int64), start), "decode": (torch.ones(1, 1).long(), start)}
    shapes = {"prefill": ({1: length}, None)}
    program = kp.lower(model.eval(), inputs, dynamic_shapes=shapes, recipe="int8-weight")
    assert program.report.count(OURS, CACHED) == 4
    assert {refusal.operator for refusal in program.report.left}.isdisjoint({"aten::linear", "aten::_softmax"})
    at = 0
    for step in STEPS:
        given = (torch.randint(0, 128, (1, step)), torch.tensor([at]))
        (difference,) = program.compare(*given, method=method_of(step))
        assert difference.snr > 40, (at, difference)  # a key between two steps of int8 may fall to either side
        at += step
    with pytest.raises(ValueError, match="call the CachedLanguageModel around it"):
        model.model(torch.ones(1, 2, dtype=torch.int64))
