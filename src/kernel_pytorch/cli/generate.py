"""``kernel-pytorch generate``: text from a Hugging Face checkpoint folder, once or as a chat."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["generate"]

_HELP = "/reset forgets the conversation, /rewind takes back the last answer, /quit or the end of input leaves"


def _statistics(last: Any) -> str:
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    reused = f" ({last.reused_tokens} reused)" if last.reused_tokens else ""
    return (
        f"{last.prompt_tokens} tokens of prompt{reused}, first token after {last.first_token_seconds:.2f} s, "
        f"{len(last.tokens)} tokens at {last.tokens_per_second:.1f} tokens/s, {peak / 1e6:.0f} MB of memory at most"
    )


def generate(
    folder: Path,
    *,
    prompt: str | None,
    chat: bool,
    max_tokens: int,
    sampling: tuple[float, float, int],
    program: dict[str, Any],
    debug: bool,
) -> None:
    """Lower or load the checkpoint, then answer a prompt or chat in the terminal."""
    if (prompt is None) != chat:
        raise ValueError("give --prompt TEXT or --chat, one of them")
    notes = Console(stderr=True)
    # Keeps the terminal while the standard error goes through a filter.
    shown = Console(file=os.fdopen(os.dup(2), "w")) if notes.is_terminal else notes
    with shown.status("loading ExecuTorch") as status:
        from kernel_pytorch.lowering.quiet import quiet_libraries, quiet_native

        with quiet_libraries(not debug), quiet_native():
            from kernel_pytorch.lowering import Sampling, TextGenerator

            how = Sampling(*sampling)
            generator = TextGenerator.from_pretrained(folder, **program, tell=status.update)
    if prompt is not None:
        _show(generator.stream(prompt, max_tokens=max_tokens, sampling=how))
        notes.print(_statistics(generator.last), markup=False, highlight=False, soft_wrap=True)
        return
    conversation = generator.chat()
    notes.print(_HELP, markup=False, highlight=False, soft_wrap=True)
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if said == "/quit":
            return
        if said == "/reset":
            conversation.reset()
        elif said == "/rewind":
            conversation.rewind()
        elif said:
            _show(conversation.stream(said, max_tokens=max_tokens, sampling=how))
            notes.print(_statistics(generator.last), markup=False, highlight=False, soft_wrap=True)


def _show(pieces: Any) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
