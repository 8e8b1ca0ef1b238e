"""What torch.compile must be told of functions that it puts into its graph as they are."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import _get_proxies

__all__ = ["kept_unchecked", "revision"]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def revision() -> str:
    """That of the code behind such functions, an argument of each.

    Graphs that were compiled by another process are taken from torch's cache by what is in Dynamo's graph. That is
    the name of such a function and its arguments, not its body: inside activation checkpointing, an operator of an
    earlier version would be called.
    """
    return _revision()


@cache
def _revision() -> str:
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def kept_unchecked(*memory: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What a function brings up to date, told to torch.compile: whoever needs it later takes it as it is then.

    It does the same for what a function that it looks into keeps on its context, as eager mode does, and takes
    everything else for what must not have changed.
    """
    for each in memory:
        for proxy in () if each is None else _get_proxies(each):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True
    return memory
