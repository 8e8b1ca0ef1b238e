"""Silence other libraries' warnings and progress bars while a model is lowered."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["quiet_imports", "quiet_libraries", "quiet_native"]

# Messages that ExecuTorch's C++ code writes to stderr when a process first runs a program.
_NATIVE = re.compile(rb"\[cpuinfo_utils\.cpp:\d+\][^\n]*\n")
_START = b"[cpuinfo_utils.cpp:"
_LOUD: ContextVar[bool] = ContextVar("kernel_pytorch_loud", default=False)
_LOGGERS = ("torch", "torchao", "executorch", "transformers", "root")


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Silence Python warnings and log records below ERROR that dependencies emit on import."""
    if _LOUD.get():
        yield
        return
    loggers = [logging.getLogger(None if name == "root" else name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def quiet_libraries(quiet: bool = True) -> Iterator[None]:
    """Silence Python warnings, log records below ERROR and progress bars of dependencies.

    Inside ``quiet_libraries(False)`` nothing is silenced, not even by ``kp.lower``.

    Example:
        >>> with quiet_libraries():
        ...     import warnings
        ...     warnings.warn("from a library", stacklevel=1)
    """
    if not quiet or _LOUD.get():
        token = _LOUD.set(True)
        try:
            yield
        finally:
            _LOUD.reset(token)
        return
    with quiet_imports():
        # Import it here if installed: an import inside the block would switch its progress bars on.
        found = importlib.util.find_spec("transformers") is not None
        bars = importlib.import_module("transformers.utils.logging") if found else None
        shown = bars is not None and bars.is_progress_bar_enabled()
        try:
            if bars is not None:
                bars.disable_progress_bar()
            yield
        finally:
            if bars is not None and shown:
                bars.enable_progress_bar()


@contextlib.contextmanager
def quiet_native() -> Iterator[None]:
    """Filter known messages of C++ code from the process's stderr; everything else passes without delay.

    Inside the block, stderr is not a terminal.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    reading, writing = os.pipe()

    def pass_on() -> None:
        held = b""
        while data := os.read(reading, 65536):
            held = _NATIVE.sub(b"", held + data)
            # A partial line that may become a known message waits for its end.
            start = held.rfind(b"[", held.rfind(b"\n") + 1)
            maybe = start >= 0 and (_START.startswith(held[start:]) or held.startswith(_START, start))
            end = start if maybe else len(held)
            os.write(terminal, held[:end])
            held = held[end:]
        os.write(terminal, held)
        os.close(reading)
        os.close(terminal)

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    back = os.dup(2)
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(back, 2)  # closes the last write end, so that the thread ends
        os.close(back)
        thread.join(timeout=5)  # a child process that is still running keeps it open
