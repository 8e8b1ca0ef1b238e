"""Ranks for tests: persistent processes with Gloo groups of several sizes that run functions of test modules."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SIZES = (1, 2, 4, 8)


class RankFailedError(AssertionError):
    """An exception of a rank, with its traceback."""


def _serve(rank: int, ranks: int, store: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    groups = {size: dist.new_group(list(range(size))) for size in SIZES if size <= ranks}
    pipe.send("ready")
    while True:
        message = pipe.recv()
        if message is None:
            return
        module, name, size, arguments = message
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send(("ok", function(groups[size], *arguments)))
        except BaseException as error:
            pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Ranks:
    """``ranks.run(function, size, *arguments)``: ``function(group, *arguments)`` on each rank, results by rank."""

    def __init__(self, ranks: int) -> None:
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, store, there), daemon=True)
            process.start()
            there.close()  # the rank's own is the last one then, and its end is seen here
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            assert pipe.recv() == "ready"

    def run(self, function: Any, size: int, *arguments: Any, timeout: float = 120.0) -> list[Any]:
        results = self.outcomes(function, size, *arguments, timeout=timeout)
        failed = [f"rank {rank}: {value}" for rank, (kind, value) in enumerate(results) if kind == "error"]
        if failed:
            raise RankFailedError("\n".join(failed))
        return [value for _, value in results]

    def outcomes(self, function: Any, size: int, *arguments: Any, timeout: float = 120.0) -> list[tuple[str, Any]]:
        """("ok", result), ("error", text) or ("died", exit code) of each rank."""
        for pipe in self.pipes[:size]:
            pipe.send((function.__module__, function.__name__, size, arguments))
        found = []
        for rank, pipe in enumerate(self.pipes[:size]):
            if not pipe.poll(timeout):
                self.close()
                raise RankFailedError(f"rank {rank} gave no result in {timeout} s")
            try:
                found.append(pipe.recv())
            except EOFError:
                self.processes[rank].join(5)
                found.append(("died", self.processes[rank].exitcode))
        return found

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                with suppress(OSError):
                    pipe.send(None)
        for process in self.processes:
            process.join(30)  # five seconds are too few on a busy machine
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


@contextmanager
def started(ranks: int) -> Iterator[Ranks]:
    found = Ranks(ranks)
    try:
        yield found
    finally:
        found.close()
