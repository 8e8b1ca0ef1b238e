"""Fuzz whole ``.pte`` files through ``kp.load``: a damaged file is refused, or loads and computes the same as before.

Each case damages a file in one way, and loads and runs it in a forked process, so that a crash is an outcome and not
the end. ``python tests/lowering/fuzz_pte.py --cases 100000 --seed 0`` prints the outcomes as JSON and ends with
status 1 where a process crashed, hung, or computed something else.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import random
import signal
import sys
from collections.abc import Callable

import torch

import kernel_pytorch as kp
from kernel_pytorch.lowering.runtime import registered

GOOD = ("refused", "same")
_SECONDS = 60


class Small(torch.nn.Module):
    """Delegated to us and to XNNPACK, with portable operators and a dynamic shape: every table of a program."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(11, 8), torch.nn.RMSNorm(8)
        self.conv, self.out = torch.nn.Conv1d(8, 8, 3, padding=1), torch.nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.table(tokens))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.out(x), tokens.cumsum(1)


def program() -> bytes:
    torch.manual_seed(0)
    dynamic = ({1: torch.export.Dim("length", min=2, max=16)},)
    return kp.lower(Small().eval(), (torch.ones(1, 5, dtype=torch.int64),), dynamic_shapes=dynamic).buffer


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Damage a file once: flip bits, overwrite bytes or an integer, delete, copy or insert a range, cut the end."""
    kind = chance.randrange(7)
    made, size = bytearray(data), len(data)
    at = chance.randrange(size)
    if kind == 0:
        for _ in range(chance.choice((1, 1, 1, 2, 8))):
            made[chance.randrange(size)] ^= 1 << chance.randrange(8)
    elif kind == 1:
        many = chance.randrange(1, 65)
        made[at : at + many] = chance.randbytes(len(made[at : at + many]))
    elif kind == 2:
        at = min(at & ~3, size - 4)
        value = chance.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, chance.getrandbits(32)))
        made[at : at + 4] = value.to_bytes(4, "little")
    elif kind == 3:
        del made[at : at + chance.randrange(1, 257)]
    elif kind == 4:
        del made[at:]
    elif kind == 5:
        other, many = chance.randrange(size), chance.randrange(1, 257)
        made[at : at + many] = data[other : other + len(made[at : at + many])]
    else:
        made[at:at] = chance.randbytes(chance.randrange(1, 65))
    return bytes(made)


def outcome(data: bytes, inputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> tuple[str, str]:
    """What became of one file, in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(_SECONDS)
        try:
            found = kp.load(data)(*inputs)
            said = "same" if all(map(torch.equal, found, wanted)) else "different"
        except ValueError as error:
            said = f"refused {error}"
        except BaseException as error:
            said = f"raised {type(error).__name__}: {error}"
        os.write(writer, said.encode()[:2000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return ("hung" if name == "SIGALRM" else "crashed"), name
    kind, _, reason = said.partition(" ")
    return kind or "crashed", reason


def fuzz(data: bytes, cases: int, seed: int, tell: Callable[[str], None]) -> dict[str, dict[str, int]]:
    """Outcomes by kind and reason."""
    registered()
    inputs = [torch.arange(5)[None]]
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:  # threads of a runtime that has run do not survive a fork: run it elsewhere
        held = io.BytesIO()
        torch.save(kp.load(data)(*inputs), held)
        os.write(writer, held.getvalue())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        wanted = list(torch.load(io.BytesIO(pipe.read())))
    os.waitpid(child, 0)
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in range(cases):
        chance = random.Random(f"{seed}:{case}")
        kind, reason = outcome(damaged(data, chance), inputs, wanted)
        found[kind][reason[:100]] += 1
        if kind not in GOOD:
            tell(f"case {seed}:{case}: {kind} {reason}")
    return {kind: dict(reasons.most_common(20)) | {"": sum(reasons.values())} for kind, reasons in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    found = fuzz(program(), chosen.cases, chosen.seed, tell=lambda text: print(text, file=sys.stderr))
    print(json.dumps(found, indent=2))
    return 0 if set(found) <= set(GOOD) else 1


if __name__ == "__main__":
    sys.exit(main())
