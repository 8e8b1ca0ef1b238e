"""A worker process for ExecuTorch's OpenAI-compatible server, which generates text with a lowered model.

The server (``executorch.examples.llm_server.python.server`` of the wheel) starts a worker as
``WORKER --model_path model.pte --tokenizer_path tokenizer.json`` and exchanges one JSON object per line with it.
``kernel-pytorch-worker`` is such a worker. Each session has its own KV cache; all share the mapped weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from kernel_pytorch.lowering.sampling import Sampling
from kernel_pytorch.lowering.text_generator import TextGenerator

__all__ = ["MOST_SESSIONS", "Worker", "main"]

MOST_SESSIONS = 4
_SCRATCH = ""  # the session of requests without a session name


class _RefusedError(Exception):
    """Raised for a request that cannot be served; the server derives the HTTP status from ``code``."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class Worker:
    """Answers requests of the server, one at a time.

    Args:
        generator: provides the program and tokenizer of every session.
        out: receives one JSON object per line.
        most_sessions: maximum number of named sessions; each has a KV cache.

    Example:
        >>> import io, pathlib, tempfile
        >>> import kernel_pytorch as kp
        >>> from kernel_pytorch.testing.checkpoints import tiny_checkpoint
        >>> folder = tiny_checkpoint(pathlib.Path(tempfile.mkdtemp()))
        >>> out = io.StringIO()
        >>> Worker(kp.TextGenerator.from_pretrained(folder), out).answer({"prompt": "once upon", "max_new_tokens": 2})
        >>> json.loads(out.getvalue().splitlines()[-1])["completion_tokens"]
        2
    """

    def __init__(self, generator: TextGenerator, out: TextIO, most_sessions: int = MOST_SESSIONS) -> None:
        self._out, self._most = out, most_sessions
        self._sessions = {_SCRATCH: generator}

    def serve(self, lines: Iterator[str]) -> None:
        """Answer requests until the input ends."""
        self._say({"ready": True, "max_named_sessions": self._most, "supports_cancel": False})
        for line in lines:
            if line.strip():
                self.answer(json.loads(line))

    def answer(self, request: dict[str, Any]) -> None:
        """Answer one request; send an ``error`` message if it cannot be served."""
        try:
            if "op" in request:
                self._operate(request["op"], str(request["session_id"]))
            else:
                self._generate(request)
        except (_RefusedError, ValueError, KeyError) as error:
            code = getattr(error, "code", None)
            self._say({"error": str(error), **({"code": code} if code else {})})

    def _say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def _operate(self, operation: str, session: str) -> None:
        if operation == "open":
            self._session(session)
            self._say({"opened": True})
        elif operation == "close":
            self._sessions.pop(session, None)
            self._say({"closed": True})
        elif operation == "reset":
            if session in self._sessions:
                self._sessions[session].reset()
            self._say({"reset": True})
        else:
            raise _RefusedError(f"op={operation!r}: use open, close or reset")

    def _session(self, name: str) -> TextGenerator:
        if name not in self._sessions:
            if len(self._sessions) > self._most:
                raise _RefusedError(f"{self._most} sessions are open: close one first", "capacity_exhausted")
            self._sessions[name] = self._sessions[_SCRATCH].fork()
            self._sessions[name].reset()
        return self._sessions[name]

    def _prompt(self, request: dict[str, Any], tokenizer: Any) -> list[int]:
        """Return the token ids of a rendered prompt, or of its segments: texts, and previously generated ids."""
        segments = request.get("prompt_segments")
        parts = [{"text": request["prompt"]}] if segments is None else segments
        ids: list[int] = []
        for part in parts:
            # The chat template has already added the special tokens.
            text = part.get("text")
            ids += part["ids"] if text is None else tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise _RefusedError("the prompt has no tokens")
        return ids

    def _generate(self, request: dict[str, Any]) -> None:
        generator = self._session(str(request.get("session_id") or _SCRATCH))
        if request.get("top_k"):
            raise _RefusedError(f"top_k={request['top_k']}: sampling has temperature, top_p and seed")
        ids = self._prompt(request, generator.tokenizer)
        room = generator.context - len(ids)
        asked = int(request.get("max_new_tokens", -1))
        most = room if asked < 1 else asked
        how = Sampling(
            float(request.get("temperature", 0.0)), float(request.get("top_p", 1.0)), int(request.get("seed") or 0)
        )
        started = time.perf_counter()
        stopped_by_text = self._stream(
            generator, ids, most, how, [stop for stop in request.get("stop", ()) if stop]
        )
        last = generator.last
        assert last is not None
        total = time.perf_counter() - started
        fresh = last.prompt_tokens - last.reused_tokens
        self._say(
            {
                "done": True,
                "prompt_tokens": last.prompt_tokens,
                "completion_tokens": len(last.tokens),
                "finish_reason": "stop" if stopped_by_text or last.stopped == "end" else "length",
                "reused_prompt_tokens": last.reused_tokens,
                "prefilled_prompt_tokens": fresh,
                "session_reset_reason": "exact_prefix" if last.reused_tokens else "new",
                "prefill_ms": last.first_token_seconds * 1e3,
                "decode_ms": last.decode_seconds * 1e3,
                "total_ms": total * 1e3,
                "prefill_tok_s": fresh / last.first_token_seconds if last.first_token_seconds else 0.0,
                "decode_tok_s": last.tokens_per_second,
                "generated_token_ids": list(last.tokens[:-1] if last.stopped == "end" else last.tokens),
            }
        )

    def _stream(self, generator: TextGenerator, ids: list[int], most: int, how: Sampling, stops: list[str]) -> bool:
        """Send text while it is generated, up to a stop string; return whether one was found."""
        held = ""
        pieces = generator.stream_tokens(ids, max_tokens=most, sampling=how)
        for piece in pieces:
            held += piece
            found = min((held.find(stop) for stop in stops if stop in held), default=-1)
            if found >= 0:
                pieces.close()  # type: ignore[attr-defined]
                self._tell(held[:found])
                return True
            ready = len(held) - _partial(held, stops)
            self._tell(held[:ready])
            held = held[ready:]
        self._tell(held)
        return False

    def _tell(self, text: str) -> None:
        if text:
            self._say({"token": text})


def _partial(text: str, stops: list[str]) -> int:
    """Return the number of characters at the end of a text that may be the beginning of a stop string.

    Example:
        >>> _partial("one <e", ["<end>"]), _partial("one", ["<end>"])
        (2, 0)
    """
    sizes = (size for stop in stops for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size]))
    return max(sizes, default=0)


def main(arguments: list[str] | None = None) -> None:
    """Run ``kernel-pytorch-worker``: load a program, and answer requests until the standard input ends."""
    parser = argparse.ArgumentParser(description="Serve a .pte to ExecuTorch's OpenAI-compatible server.")
    parser.add_argument("--model_path", type=Path, required=True, help="a .pte that kernel-pytorch lower --hf made")
    parser.add_argument(
        "--tokenizer_path", type=Path, required=True, help="its tokenizer.json, or the folder of it"
    )
    parser.add_argument("--sessions", type=int, default=MOST_SESSIONS, help="named sessions at a time")
    given = parser.parse_args(arguments)
    # The server expects only JSON on stdout: redirect what libraries print to stderr.
    out, sys.stdout = sys.stdout, sys.stderr
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = given.tokenizer_path
    tokenizer: Any = (
        AutoTokenizer.from_pretrained(path, local_files_only=True)
        if path.is_dir()
        else PreTrainedTokenizerFast(tokenizer_file=str(path))
    )
    Worker(TextGenerator(given.model_path, tokenizer), out, given.sessions).serve(iter(sys.stdin))


if __name__ == "__main__":
    main()
