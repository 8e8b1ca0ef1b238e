"""Fuzz whole ``.pte`` files through ``kp.load``: a damaged file is refused, or loads and computes the same as before.

Each case damages a file in one way, and loads and runs it in a forked process, so that a crash is an outcome and not
the end; a process takes cases until one ends it. ``python tests/lowering/fuzz_pte.py --cases 100000 --seed 0`` prints
the outcomes as JSON and ends with status 1 where a process crashed, hung, or computed something else.
"""

from __future__ import annotations

import argparse
import ast
import collections
import hashlib
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch

import kernel_pytorch as kp
from kernel_pytorch.lowering import checksum, runtime
from kernel_pytorch.lowering.build import SOURCES
from kernel_pytorch.lowering.runtime import registered

GOOD = ("refused", "same")
RECORD = Path(__file__).parents[2] / "benchmarks" / "evidence" / "fuzz_pte.txt"
_SECONDS = 60
_CASES_OF_A_PROCESS = 2000
_NAME, _NUMBER = re.compile(r"^case\.pte"), re.compile(r"\d[\d,]*")


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


def source_digest() -> str:
    """Of the code that verifies and loads a program: a record of other sources is out of date."""
    files = [Path(checksum.__file__), Path(runtime.__file__), *sorted(SOURCES.rglob("*.*"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


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


def _attempts(
    data: bytes, inputs: list[torch.Tensor], wanted: list[torch.Tensor], seed: int, cases: range, to: int
) -> None:
    """In a process of its own: one line for each case when it begins, and one with its outcome."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.pte"
        for case in cases:
            os.write(to, f"{case}\n".encode())
            signal.alarm(_SECONDS)
            made: bytes | Path = damaged(data, random.Random(f"{seed}:{case}"))
            if case % 2:  # files are mapped, and bytes are not
                file.write_bytes(made)
                made = file
            try:
                found = kp.load(made)(*inputs)
                said = "same" if all(map(torch.equal, found, wanted)) else "different"
            except ValueError as error:
                said = f"refused {error}"
            except BaseException as error:
                said = f"raised {type(error).__name__}: {error}"
            os.write(to, f"{case} {said[:200]!a}\n".encode())


def _run(
    data: bytes, inputs: list[torch.Tensor], wanted: list[torch.Tensor], seed: int, cases: range
) -> Iterator[tuple[int, str, str]]:
    """Yield the outcome of each case. A process that dies ends its case alone: the next ones go to a new process."""
    while cases:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _attempts(data, inputs, wanted, seed, cases[:_CASES_OF_A_PROCESS], writer)
            os._exit(0)
        os.close(writer)
        begun, done = cases.start, cases.start
        with os.fdopen(reader) as pipe:
            for line in pipe:
                number, _, said = line.strip().partition(" ")
                begun = int(number)
                if said:
                    kind, _, reason = ast.literal_eval(said).partition(" ")
                    done = begun + 1
                    yield begun, kind, reason
        _, status = os.waitpid(child, 0)
        if done == begun:  # it began and did not end
            name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status}"
            yield begun, "hung" if name == "SIGALRM" else "crashed", name
            done += 1
        cases = range(done, cases.stop)


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
    for case, kind, reason in _run(data, inputs, wanted, seed, range(cases)):
        found[kind][_NUMBER.sub("N", _NAME.sub("the program", reason))[:100]] += 1
        if kind not in GOOD:
            tell(f"case {seed}:{case}: {kind} {reason}")
    return {kind: dict(reasons.most_common(20)) | {"": sum(reasons.values())} for kind, reasons in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/evidence")
    chosen = parser.parse_args()
    found = fuzz(program(), chosen.cases, chosen.seed, tell=lambda text: print(text, file=sys.stderr))
    print(json.dumps(found, indent=2))
    if chosen.write:
        totals = ", ".join(f"{reasons['']} {kind}" for kind, reasons in sorted(found.items()))
        bad = sum(reasons[""] for kind, reasons in found.items() if kind not in GOOD)
        RECORD.write_text(
            f"{chosen.cases} damaged files through kp.load: {totals}; {bad} crashed, hung or computed otherwise\n"
            f"seed {chosen.seed}, ExecuTorch {version('executorch')}, sources {source_digest()}\n"
        )
    return 0 if set(found) <= set(GOOD) else 1


if __name__ == "__main__":
    sys.exit(main())
