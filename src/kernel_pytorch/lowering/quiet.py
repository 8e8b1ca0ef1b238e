"""Keep other libraries' warnings and progress bars off the terminal while a model is lowered."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["quiet_libraries"]

_LOUD: ContextVar[bool] = ContextVar("kernel_pytorch_loud", default=False)
_LOGGERS = ("torch", "torchao", "executorch", "transformers", "root")


@contextlib.contextmanager
def quiet_libraries(quiet: bool = True) -> Iterator[None]:
    """Silence Python warnings, log records below ERROR and progress bars of the libraries underneath.

    Inside ``quiet_libraries(False)`` nothing is silenced, by ``kp.lower`` neither.

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
    loggers = [logging.getLogger(None if name == "root" else name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    bars = sys.modules.get("transformers.utils.logging")
    shown = bars is not None and bars.is_progress_bar_enabled()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        if bars is not None:
            bars.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars is not None and shown:
            bars.enable_progress_bar()
