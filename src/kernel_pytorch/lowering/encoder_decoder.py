"""Lower Hugging Face encoder-decoder models (T5, BART, Whisper, Moonshine) to one program with two methods.

``encode`` computes the keys and values of the decoder's cross-attention, once per input. ``decode`` takes one token,
its position and those keys and values, and returns the logits of the next token. The keys and values of the decoder's
self-attention are kept in buffers of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from kernel_pytorch.lowering.runtime import LoadedProgram

if TYPE_CHECKING:
    from kernel_pytorch.lowering.program import LoweredProgram

__all__ = ["Decoder", "Encoder", "decoded", "lower_encoder_decoder"]


class _Held(CacheLayerMixin):
    """Static cache of one layer: buffers to which a call writes keys and values at ``position``."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys, self._values, self._position = keys, values, position
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        places = self._position + torch.arange(key_states.shape[2])
        self._keys.index_copy_(2, places, key_states)
        self._values.index_copy_(2, places, value_states)
        return self._keys, self._values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._keys.shape[2], 0

    def get_seq_length(self) -> Any:
        return self._position

    def get_max_length(self) -> int:
        return self._keys.shape[2]

    get_max_cache_shape = get_max_length


def _outputs(states: torch.Tensor) -> BaseModelOutput:
    """Return an encoder's output object; its attention mask is None, because Moonshine's decoder reads one."""
    found: Any = BaseModelOutput(states)  # type: ignore[arg-type]
    found.attention_mask = None
    return found  # type: ignore[no-any-return]


class Encoder(torch.nn.Module):
    """The ``encode`` method: the decoder's cross-attention keys and values of an input, layer by layer.

    Args:
        model: such as ``T5ForConditionalGeneration`` or ``WhisperForConditionalGeneration``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = self.model.get_encoder()(x)[0]
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        # One decoder step fills the cache. The step's other results have no users and are eliminated.
        self.model(
            encoder_outputs=_outputs(states),
            decoder_input_ids=torch.zeros(x.shape[0], 1, dtype=torch.int64),
            past_key_values=cache,
            use_cache=True,
        )
        layers: Any = cache.cross_attention_cache.layers
        return tuple(tensor for layer in layers for tensor in (layer.keys, layer.values))


class Decoder(torch.nn.Module):
    """The ``decode`` method: map ``(token, position, *across)`` to the logits of the next token, (1, vocabulary).

    Args:
        model: the same model as the ``Encoder``'s.
        across: an example of the outputs of ``Encoder``.
        longest: maximum number of output tokens.
    """

    def __init__(self, model: Any, across: Sequence[torch.Tensor], longest: int) -> None:
        super().__init__()
        self.model, self.longest = model, longest
        for layer, (keys, values) in enumerate(_pairs(across)):
            for name, like in (("keys", keys), ("values", values)):
                zeros = like.new_zeros(*like.shape[:2], longest, like.shape[3])
                self.register_buffer(f"{name}_{layer}", zeros, persistent=False)

    def forward(self, token: torch.Tensor, position: torch.Tensor, *across: torch.Tensor) -> torch.Tensor:
        crossed: Any = DynamicCache()
        layers: list[Any] = []
        for layer, (keys, values) in enumerate(_pairs(across)):
            crossed.update(keys, values, layer)
            own = getattr(self, f"keys_{layer}"), getattr(self, f"values_{layer}")
            layers.append(_Held(*own, position[0]))
        cache = EncoderDecoderCache(Cache(layers=layers), crossed)
        cache.is_updated = dict.fromkeys(range(len(layers)), True)
        # Only the shape of the states is read, because the cache contains the keys and values computed from them.
        width = self.model.config.hidden_size
        states: Any = across[0].new_zeros(across[0].shape[0], across[0].shape[2], width)
        found = self.model(
            encoder_outputs=_outputs(states),
            decoder_input_ids=token,
            past_key_values=cache,
            use_cache=True,
        )
        return found.logits[:, -1]  # type: ignore[no-any-return]


def _pairs(across: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(across[::2], across[1::2], strict=True)


def _context(config: Any) -> int | None:
    found = (
        getattr(config, name, None) for name in ("max_target_positions", "max_position_embeddings", "n_positions")
    )
    return next((int(size) for size in found if size), None)


def lower_encoder_decoder(
    model: Any,
    example: torch.Tensor,
    *,
    length: torch.export.Dim | None = None,
    axis: int = 1,
    longest: int | None = None,
    recipe: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> LoweredProgram:
    """Lower an encoder-decoder to a program with the methods ``encode`` and ``decode``.

    Args:
        model: a transformers model in eval mode, such as ``T5ForConditionalGeneration``.
        example: an example of the encoder's input, with batch size 1: token ids or audio features.
        length: the range of the input's length; by default, fixed to the example's.
        axis: the dimension of the input to which ``length`` applies.
        longest: maximum number of output tokens; by default, the smaller of 512 and the model's positions.
        recipe: quantization recipe, as in ``kp.lower``.
        tell: called with a line for each step.

    Example:
        >>> import transformers
        >>> from kernel_pytorch.lowering import decoded, lower_encoder_decoder
        >>> sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        >>> config = transformers.T5Config(vocab_size=32, decoder_start_token_id=0, **sizes)
        >>> model = transformers.T5ForConditionalGeneration(config).eval()
        >>> program = lower_encoder_decoder(model, torch.tensor([[5, 6, 1]]), longest=8)
        >>> program.load().run("get_max_seq_len", ())
        8
    """
    from kernel_pytorch.lowering.program import lower

    if example.shape[0] != 1:
        raise ValueError(f"example has a batch of {example.shape[0]}: pass one input, of batch 1")
    config, generation = model.config, model.generation_config
    start = generation.decoder_start_token_id
    if start is None:
        raise ValueError("the model has no decoder_start_token_id: set it in model.generation_config")
    most = min(_context(config) or 512, 512) if longest is None else longest
    model.requires_grad_(False)
    encoder = Encoder(model).eval()
    with torch.no_grad():
        across = encoder(example)
    decoder = Decoder(model, across, most).eval()
    ends = generation.eos_token_id
    crossed = tuple(None if length is None else {2: length} for _ in across)
    return lower(
        {"encode": encoder, "decode": decoder},
        {"encode": (example,), "decode": (torch.tensor([[start]]), torch.tensor([0]), *across)},
        recipe=recipe,
        dynamic_shapes={
            "encode": (None if length is None else {axis: length},),
            "decode": {"token": None, "position": None, "across": crossed},
        },
        metadata={
            "get_max_seq_len": most,
            "get_vocab_size": config.vocab_size,
            "get_decoder_start_token_id": start,
            "get_eos_ids": [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends],
        },
        tell=tell,
    )


def decoded(
    program: LoadedProgram, x: torch.Tensor, *, max_tokens: int = 256, prompt: Sequence[int] | None = None
) -> Iterator[int]:
    """Yield the greedily decoded token ids for an input, including the end-of-sequence id.

    Args:
        program: a loaded program of ``lower_encoder_decoder``.
        x: the encoder's input.
        max_tokens: maximum number of tokens to yield.
        prompt: the decoder's first ids; by default, the model's start token.

    Example:
        >>> import transformers
        >>> from kernel_pytorch.lowering import decoded, lower_encoder_decoder
        >>> sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        >>> config = transformers.T5Config(vocab_size=32, decoder_start_token_id=0, eos_token_id=None, **sizes)
        >>> model = transformers.T5ForConditionalGeneration(config).eval()
        >>> x = torch.tensor([[5, 6, 1]])
        >>> len(list(decoded(lower_encoder_decoder(model, x, longest=8).load(), x, max_tokens=4)))
        4
    """
    longest = int(program.run("get_max_seq_len", ()))
    given = [int(program.run("get_decoder_start_token_id", ()))] if prompt is None else list(prompt)
    if not given or len(given) > longest:
        raise ValueError(f"prompt has {len(given)} tokens: the program takes 1 to {longest}")
    ends = program.run("get_eos_ids", ())
    stops = {int(end) for end in (ends if isinstance(ends, tuple) else (ends,))}
    across = program.run("encode", (x,))
    for position in range(min(longest, len(given) + max_tokens - 1)):
        step = torch.tensor([[given[position]]]), torch.tensor([position])
        logits = program.run("decode", (*step, *across))
        if position + 1 < len(given):
            continue
        given.append(int(logits.argmax()))
        yield given[-1]
        if given[-1] in stops:
            return
