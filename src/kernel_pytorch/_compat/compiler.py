"""Private APIs of torch.compile: its counters, its limits, the platforms it supports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from kernel_pytorch._compat.private import private

__all__ = [
    "compile_counts",
    "compile_limits",
    "compile_supported",
    "constant_in_graph",
    "flex_attention_operator",
    "index_by_tensors",
    "proxies_of",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def compile_counts() -> tuple[int, int]:
    """Return the numbers of graphs and of graph breaks of torch.compile in this process."""
    counters = private(
        "torch._dynamo.utils.counters",
        test=lambda found: isinstance(found["stats"], dict),
        without="recompiles and graph breaks are not counted",
        otherwise={"stats": {}, "graph_break": {}},
    )
    return counters["stats"].get("unique_graphs", 0), sum(counters["graph_break"].values())


def compile_supported() -> bool:
    """Return whether torch.compile supports this Python and platform."""
    supported = private(
        "torch._dynamo.eval_frame.is_dynamo_supported",
        test=lambda f: f() in (True, False),
        without="torch.compile is tried where it may not be supported",
        otherwise=lambda: True,
    )
    return bool(supported())


def constant_in_graph(function: Function) -> Function:
    """``torch.compiler.assume_constant_result`` without importing ``torch._dynamo``.

    In a torch version that uses another attribute, torch.compile traces into the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compile_limits(**limits: int) -> contextlib.AbstractContextManager[Any]:
    """Set torch.compile's limits, such as ``recompile_limit``, inside a ``with`` block."""
    config = private(
        "torch._dynamo.config",
        test=lambda found: callable(found.patch),
        without="models with many shapes may fall back to eager mode",
        otherwise=None,
    )
    patched: contextlib.AbstractContextManager[Any] = config.patch(**limits)
    return patched


def flex_attention_operator() -> Any:
    """Return the operator that ``torch.nn.attention.flex_attention`` calls, as it appears in a graph."""
    return private(
        "torch._higher_order_ops.flex_attention.flex_attention",
        test=callable,
        without="models that use FlexAttention are not recognised",
        otherwise=object(),
    )


def index_by_tensors() -> contextlib.AbstractContextManager[Any]:
    """Make ``tensor[index]`` work inside vmap with a batched index, as in FlexAttention's masks."""
    mode = private(
        "torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex",
        test=callable,
        without="mask functions that index tensors fail inside vmap",
        otherwise=contextlib.nullcontext,
    )
    entered: contextlib.AbstractContextManager[Any] = mode()
    return entered


@cache
def _get_proxies() -> Any:
    return private(
        "torch.fx.experimental.proxy_tensor._get_proxies",
        test=callable,
        without="torch.compile refuses tensors that a backward and a later forward write to",
        otherwise=lambda _: (),
    )


def proxies_of(tensor: Any) -> list[Any]:
    """Return the nodes of a tensor in the graph that is being traced; none outside of tracing."""
    return list(_get_proxies()(tensor))
