"""Generate text with a lowered language model: prompt in chunks, decode with the KV cache, stream the text."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch.lowering.checkpoint import TextProgram, cached_program, load_cached, tokenizer_of
from kernel_pytorch.lowering.checksum import add_checksum, content, damage, write_whole
from kernel_pytorch.lowering.runtime import LoadedProgram, load
from kernel_pytorch.lowering.sampling import Sampling, sample

__all__ = ["Conversation", "Generation", "TextGenerator"]

_SESSION = b"KernelPyTorch.session.1\n"


@dataclass(frozen=True)
class Generation:
    """Generated text with its timings."""

    text: str
    tokens: tuple[int, ...]
    """The generated ids, including the end-of-sequence id if the model generated it."""
    prompt_tokens: int
    reused_tokens: int
    """Number of prompt tokens that were in the cache from the previous call."""
    stopped: str
    """Why generation stopped: ``"end"`` of sequence, ``"max_tokens"``, ``"context"`` full, or ``"closed"`` stream."""
    first_token_seconds: float
    decode_seconds: float
    """Seconds from the first token to the last."""

    def __str__(self) -> str:
        return self.text

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first token."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0


class _Detokenizer:
    """Incremental detokenization: a character of several tokens is held back until it is complete."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._ids = tokenizer, list[int]()
        self._start = self._read = 0  # decode from the previous text on: spaces depend on the token before

    def _decoded(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True))

    def add(self, token: int) -> str:
        self._ids.append(token)
        return self._new(last=False)

    def finish(self) -> str:
        return self._new(last=True)

    def _new(self, *, last: bool) -> str:
        before, now = self._decoded(self._start, self._read), self._decoded(self._start, len(self._ids))
        if len(now) <= len(before) or (now.endswith("�") and not last):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]


class TextGenerator:
    """Generate text on ExecuTorch with our delegate; a checkpoint folder is lowered once and cached.

    The KV cache holds one sequence, and a prompt reuses the prefix that it shares with the previous sequence. Use a
    generator from one thread at a time; ``fork`` returns another one with its own cache and shared weights.

    Args:
        program: a ``.pte`` of ``lower --hf``, as a path or loaded.
        tokenizer: a transformers tokenizer.

    Example:
        >>> import pathlib, tempfile
        >>> import kernel_pytorch as kp
        >>> from kernel_pytorch.testing.checkpoints import tiny_checkpoint
        >>> folder = tiny_checkpoint(pathlib.Path(tempfile.mkdtemp()))
        >>> generator = kp.TextGenerator.from_pretrained(folder)
        >>> len(generator.generate("once upon", max_tokens=4).tokens)
        4
    """

    def __init__(self, program: LoadedProgram | str | Path, tokenizer: Any) -> None:
        self._program = program if isinstance(program, LoadedProgram) else load(program)
        needed = {"forward", "get_max_seq_len", "get_max_context_len", "get_eos_ids", "get_vocab_size"}
        missing = needed - set(self._program.methods)
        if missing:
            raise ValueError(
                f"program has no method {', '.join(sorted(missing))}: make it with kernel-pytorch lower --hf, or "
                "TextGenerator.from_pretrained"
            )
        self.tokenizer = tokenizer
        self.chunk = int(self._program.run("get_max_seq_len", ()))
        """Maximum number of tokens per call of the program."""
        self.context = int(self._program.run("get_max_context_len", ()))
        """Maximum number of tokens of a sequence; 2**30 with a sliding window, whose memory is constant."""
        known = "get_cache_bytes" in self._program.methods
        self.cache_bytes = int(self._program.run("get_cache_bytes", ())) if known else 0
        """Bytes of the KV cache; 0 if the program does not report it."""
        self.weight_bytes = self._program.nbytes
        """Bytes of the program, which is memory-mapped, not copied."""
        self._vocabulary = int(self._program.run("get_vocab_size", ()))
        ends = self._program.run("get_eos_ids", ())
        self._ends = {int(end) for end in (ends if isinstance(ends, tuple) else (ends,))}
        self._held: list[int] = []  # ids of the tokens whose keys and values are in the cache
        self._furthest = 0  # the maximum length of the cached sequence since it was started
        self.last: Generation | None = None
        """The latest generation, complete when its stream has ended."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        recipe: str | None = None,
        window: int | None = None,
        sinks: int = 0,
        cache_dtype: str = "float32",
        context: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> TextGenerator:
        """Lower a Hugging Face checkpoint folder, or load the cached program.

        Args:
            folder: a folder with ``config.json``, ``*.safetensors`` and the tokenizer's files.
            recipe: quantization recipe, such as ``"int4-weight"``; by default, float32.
            window: number of previous tokens to attend to, in constant memory; by default, the whole context.
            sinks: number of initial tokens that every token attends to, in addition to the window.
            cache_dtype: dtype of keys and values: ``"float32"``, ``"float16"`` or ``"int8"``.
            context: maximum number of tokens of a sequence without a window; by default, the smaller of 4,096 and
                the model's positions.
            tell: called with a line for each step.
        """
        folder = Path(folder)
        tokenizer = tokenizer_of(folder)
        how = TextProgram(recipe=recipe, window=window, sinks=sinks, cache_dtype=cache_dtype, context=context)
        program = load_cached(cached_program(folder, how, tell), tell)
        return cls(program, tokenizer)

    def generate(self, prompt: str, *, max_tokens: int = 256, sampling: Sampling | None = None) -> Generation:
        """Return the text that follows a prompt.

        Args:
            prompt: text; the tokenizer adds its special tokens.
            max_tokens: maximum number of tokens to generate.
            sampling: temperature, top-p and seed; by default, greedy.
        """
        for _ in self.stream(prompt, max_tokens=max_tokens, sampling=sampling):
            pass
        assert self.last is not None
        return self.last

    def stream(self, prompt: str, *, max_tokens: int = 256, sampling: Sampling | None = None) -> Iterator[str]:
        """Yield the text that follows a prompt while it is generated; ``last`` then has the complete generation."""
        if not isinstance(prompt, str):
            raise TypeError(f"prompt is a {type(prompt).__name__}: pass one text, or token ids to stream_tokens")
        ids = self.tokenizer(prompt)["input_ids"]
        if not ids:
            raise ValueError(f"prompt={prompt!r} has no tokens: pass some text")
        return self.stream_tokens(ids, max_tokens=max_tokens, sampling=sampling)

    def fork(self) -> TextGenerator:
        """Return a generator that continues from the current state: weights are shared, the KV cache is copied.

        Several sessions can thus share one prompt that is computed once.

        Example:
            >>> import pathlib, tempfile
            >>> import kernel_pytorch as kp
            >>> from kernel_pytorch.testing.checkpoints import tiny_checkpoint
            >>> first = kp.TextGenerator.from_pretrained(tiny_checkpoint(pathlib.Path(tempfile.mkdtemp())))
            >>> _ = first.generate("once upon a time", max_tokens=2)
            >>> first.fork().generate("once upon a time", max_tokens=2).reused_tokens > 0
            True
        """
        other = TextGenerator(self._program.again(), self.tokenizer)
        other._program.restore(self._program.history())
        other._held, other._furthest = list(self._held), self._furthest
        return other

    def reset(self) -> None:
        """Clear the cached sequence; the next prompt is computed from its first token."""
        self._held, self._furthest = [], 0

    def save_session(self, path: str | Path) -> None:
        """Save the tokens and the KV cache, for ``load_session`` in a later process."""
        self._save(Path(path), [])

    def _save(self, path: Path, messages: list[dict[str, str]]) -> None:
        facts = {
            "program": self._program.digest,
            "tokens": self._held,
            "furthest": self._furthest,
            "messages": messages,
        }
        header = json.dumps(facts).encode()
        data = _SESSION + struct.pack("<Q", len(header)) + header + self._program.history()
        write_whole(path, add_checksum(data))

    def load_session(self, path: str | Path) -> None:
        """Restore a saved session: a prompt that begins with its tokens does not compute them again.

        Raise an error without any change if the file is damaged or of another program.
        """
        self._load(Path(path))

    def _load(self, path: Path) -> list[dict[str, str]]:
        """Restore a session; return the messages of its conversation."""
        data = path.read_bytes()
        at = len(_SESSION) + 8
        fault = damage(data)
        if fault is None and not (data.startswith(_SESSION) and content(data) != data and len(data) > at):
            fault = "it is no session that save_session wrote"
        if fault is not None:
            raise ValueError(f"path={str(path)!r} cannot be loaded: {fault}")
        end = at + struct.unpack_from("<Q", data, len(_SESSION))[0]
        facts = json.loads(data[at:end])
        if facts["program"] != self._program.digest:
            raise ValueError(
                f"path={str(path)!r} is a session of another program: load it with the model, recipe and window that "
                "it was saved with"
            )
        self._program.restore(content(data)[end:])
        self._held, self._furthest = facts["tokens"], facts["furthest"]
        return list(facts["messages"])

    def chat(self) -> Conversation:
        """Start a conversation with the model's own chat template."""
        return Conversation(self)

    def stream_tokens(
        self, ids: Sequence[int], *, max_tokens: int = 256, sampling: Sampling | None = None
    ) -> Iterator[str]:
        """Yield the text that follows a prompt of token ids, like ``stream``."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: at least 1 is needed")
        vocabulary = self._vocabulary
        outside = [token for token in ids if not 0 <= token < vocabulary]
        if outside:
            raise ValueError(
                f"token {outside[0]} is not in the vocabulary of the model, 0 to {vocabulary - 1}: use the tokenizer "
                "that belongs to it"
            )
        if len(ids) >= self.context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the context {self.context}: shorten it, or give a window"
            )
        return self._stream(list(ids), max_tokens, sampling or Sampling())

    def _stream(self, ids: list[int], max_tokens: int, how: Sampling) -> Iterator[str]:
        generator = torch.Generator().manual_seed(how.seed)
        text, pieces = _Detokenizer(self.tokenizer), list[str]()
        tokens, stopped = list[int](), "closed"
        start = time.perf_counter()
        first = start
        reused = self._reusable(ids)
        try:
            logits = self._run(ids[reused:], reused)
            while True:
                token = sample(logits, how, generator)
                tokens.append(token)
                if len(tokens) == 1:
                    first = time.perf_counter()
                if token in self._ends:
                    stopped = "end"
                    break
                if piece := text.add(token):
                    pieces.append(piece)
                    yield piece
                if len(tokens) == max_tokens or len(self._held) >= self.context:
                    stopped = "max_tokens" if len(tokens) == max_tokens else "context"
                    break
                logits = self._run([token], len(self._held))
            if piece := text.finish():
                pieces.append(piece)
                yield piece
        finally:
            seconds = time.perf_counter() - first
            self.last = Generation(
                "".join(pieces), tuple(tokens), len(ids), reused, stopped, first - start, seconds
            )

    def _reusable(self, ids: Sequence[int]) -> int:
        """Return the number of cached prompt tokens to reuse; the last one is always computed, for its logits."""
        same = next(
            (n for n, pair in enumerate(zip(ids, self._held, strict=False)) if pair[0] != pair[1]),
            min(len(ids), len(self._held)),
        )
        same = min(same, len(ids) - 1)
        # A ring buffer that has wrapped around can be rewound by one chunk; without a window it never wraps.
        wrapped = self.context == 1 << 30
        return 0 if wrapped and self._furthest - same > self.chunk else same

    def _run(self, new: list[int], start: int) -> torch.Tensor:
        """Pass new tokens, the first at ``start``, to the program in chunks; return the logits of the last."""
        logits = torch.empty(0)
        if start == 0:
            self._furthest = 0
        del self._held[start:]  # correct even if a call below fails
        for at in range(0, len(new), self.chunk):
            part = new[at : at + self.chunk]
            logits = self._program(torch.tensor([part]), torch.tensor([start + at]))
            self._held += part
            self._furthest = max(self._furthest, len(self._held))
        return logits[0, -1]


class Conversation:
    """A conversation under the model's chat template; the KV cache is reused from turn to turn.

    Example:
        >>> import pathlib, tempfile
        >>> from kernel_pytorch.testing.checkpoints import tiny_checkpoint
        >>> chat = TextGenerator.from_pretrained(tiny_checkpoint(pathlib.Path(tempfile.mkdtemp()))).chat()
        >>> _ = "".join(chat.stream("hello", max_tokens=3))
        >>> [message["role"] for message in chat.messages]
        ['user', 'assistant']
        >>> chat.rewind()
        >>> chat.messages
        []
    """

    def __init__(self, generator: TextGenerator) -> None:
        if not getattr(generator.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template: use generate or stream with a prompt")
        self._generator = generator
        self.messages: list[dict[str, str]] = []

    def stream(self, message: str, *, max_tokens: int = 256, sampling: Sampling | None = None) -> Iterator[str]:
        """Send a message and yield the answer while it is generated; an interrupted answer is kept as it is."""
        asked = [*self.messages, {"role": "user", "content": message}]
        found = self._generator.tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        ids = found if isinstance(found, list) else found["input_ids"]
        pieces = []
        try:
            for piece in self._generator.stream_tokens(ids, max_tokens=max_tokens, sampling=sampling):
                pieces.append(piece)
                yield piece
        except (GeneratorExit, KeyboardInterrupt):
            if pieces:
                self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
            raise
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def save_session(self, path: str | Path) -> None:
        """Save the messages and the KV cache, for ``load_session`` in a later process."""
        self._generator._save(Path(path), self.messages)

    def load_session(self, path: str | Path) -> None:
        """Restore a saved conversation."""
        self.messages = self._generator._load(Path(path))

    def fork(self) -> Conversation:
        """Return a conversation that continues from here, with its own cache; see ``TextGenerator.fork``."""
        other = Conversation(self._generator.fork())
        other.messages = list(self.messages)
        return other

    def reset(self) -> None:
        """Delete all messages."""
        self.messages = []

    def rewind(self) -> None:
        """Delete the last message and its answer, if there is one."""
        self.messages = self.messages[:-2]
