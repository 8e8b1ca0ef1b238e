"""``kernel-pytorch generate``: text from a Hugging Face checkpoint folder, once or as a chat."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from kernel_pytorch.cli.output_file import check_writable

__all__ = ["generate"]

_HELP = (
    "/reset forgets the conversation, /rewind takes back the last answer, /quit or the end of input leaves; Ctrl-C "
    "stops an answer"
)


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _statistics(last: Any) -> str:
    reused = f" ({last.reused_tokens} reused)" if last.reused_tokens else ""
    return (
        f"{last.prompt_tokens} tokens of prompt{reused}, first token after {last.first_token_seconds:.2f} s, "
        f"{len(last.tokens)} tokens at {last.tokens_per_second:.1f} tokens/s, "
        f"{_peak() / 1e6:.0f} MB of memory at most"
    )


def generate(
    folder: Path,
    *,
    prompt: str | None,
    chat: bool,
    max_tokens: int,
    sampling: tuple[float, float, int],
    program: dict[str, Any],
    session: Path | None,
    debug: bool,
) -> None:
    """Lower or load the checkpoint, then answer a prompt or chat in the terminal."""
    if (prompt is None) != chat:
        raise ValueError("give --prompt TEXT or --chat, one of them")
    if session is not None:
        check_writable("session", session, "chat.session")
    notes = Console(stderr=True)
    started = time.perf_counter()
    # Keeps writing to the terminal while stderr goes through a filter.
    shown = Console(file=os.fdopen(os.dup(2), "w")) if notes.is_terminal else notes
    with shown.status("loading ExecuTorch") as status:
        from kernel_pytorch.lowering.quiet import quiet_libraries, quiet_native

        with quiet_libraries(not debug), quiet_native():
            from kernel_pytorch.lowering import Sampling, TextGenerator

            how = Sampling(*sampling)
            generator = TextGenerator.from_pretrained(folder, **program, tell=_steps(status.update))
    _note(notes, f"ready after {time.perf_counter() - started:.1f} s: {_sizes(generator)}")
    saved: Any = generator.chat() if chat else generator  # the object whose session is saved
    if session is not None and session.exists():
        saved.load_session(session)

    def answer(pieces: Iterator[str]) -> None:
        _show(pieces)
        _note(notes, _statistics(generator.last))

    if prompt is not None:
        answer(generator.stream(prompt, max_tokens=max_tokens, sampling=how))
    else:
        _note(notes, _HELP)
        _converse(
            saved,
            lambda said: answer(saved.stream(said, max_tokens=max_tokens, sampling=how)),
            lambda text: _note(notes, text),
        )
    if session is not None:
        saved.save_session(session)


def _converse(conversation: Any, answer: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Answer each line of input until it ends; an error or interrupt ends one answer, not the conversation."""
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if said == "/quit":
            return
        if said == "/reset":
            conversation.reset()
        elif said == "/rewind":
            conversation.rewind()
        elif said.startswith("/") and said[1:].isalpha():
            note(f"{said} is no command: {_HELP}")
        elif said:
            try:
                answer(said)
            except KeyboardInterrupt:
                note("\nstopped")
            except ValueError as error:  # such as a full context
                note(f"{error}; /rewind and /reset make room")


def _steps(update: Callable[[str], None]) -> Callable[[str], None]:
    """Show each step with the time since the first one, and the memory so far."""
    started = time.perf_counter()
    return lambda step: update(f"{step} ({time.perf_counter() - started:.0f} s, {_peak() / 1e6:.0f} MB of memory)")


def _note(notes: Console, text: str) -> None:
    notes.print(text, markup=False, highlight=False, soft_wrap=True)


def _sizes(generator: Any) -> str:
    return f"{generator.weight_bytes / 1e6:.0f} MB of weights, {generator.cache_bytes / 1e6:.0f} MB of caches"


def _show(pieces: Any) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
