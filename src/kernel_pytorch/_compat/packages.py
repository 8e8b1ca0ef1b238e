"""Tracing of functions with fake tensors, and AOTInductor's packages, which torch documents under private modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch._compat.private import private
from kernel_pytorch._compat.structures import FakeTensor

__all__ = [
    "caught_launches",
    "compile_package",
    "example_sizes",
    "launched_kernel",
    "load_package",
    "symbolic_copies",
    "traced",
]

_NEEDED = "install a version of torch that kernel-pytorch was checked with"


@cache
def _fake_tensor_mode() -> Any:
    return private("torch._subclasses.fake_tensor.FakeTensorMode", test=callable, without=_NEEDED)


def traced(function: Callable[..., Any], arguments: list[torch.Tensor], mode: Any) -> torch.fx.GraphModule:
    """Trace the operators that a function calls on fake tensors. Other tensors become constants of the graph."""
    make_fx = private("torch.fx.experimental.proxy_tensor.make_fx", test=callable, without=_NEEDED)
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode, torch.no_grad():
            found: torch.fx.GraphModule = make_fx(function, tracing_mode="real")(*arguments)
    finally:
        mode.allow_non_fake_inputs = allowed
    return found


def symbolic_copies(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any, Callable[[], list[str]]]:
    """Return fake copies with one symbol for each dynamic size, their mode, and a function that returns the guards.

    A function whose trace added a guard is correct only for sizes that satisfy it.
    """
    shape_env = private("torch.fx.experimental.symbolic_shapes.ShapeEnv", test=callable, without=_NEEDED)()
    context = private(
        "torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext", test=callable, without=_NEEDED
    )
    dynamic = private(
        "torch.fx.experimental.symbolic_shapes.DimDynamic", test=lambda kind: kind.DUCK, without=_NEEDED
    )
    mode, examples = _fake_tensor_mode()(shape_env=shape_env), {}  # type: ignore[var-annotated]
    copies = []
    for tensor in tensors:
        sizes = [dynamic.STATIC if isinstance(size, int) else dynamic.DUCK for size in tensor.shape]
        example = torch.empty_strided(
            example_sizes(tensor.shape, examples), example_sizes(tensor.stride(), examples), device="meta"
        )
        copy = mode.from_tensor(example, symbolic_context=context(dynamic_sizes=sizes))
        with mode:
            copies.append(torch.empty_strided(copy.shape, copy.stride(), dtype=tensor.dtype, device=tensor.device))
    return copies, mode, lambda: [str(guard.expr) for guard in shape_env.guards]


_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197)


def example_sizes(sizes: Any, known: dict[str, int]) -> list[int]:
    """Return sizes with a distinct prime in place of each symbol, so that no two dynamic sizes are equal by accident.

    ``known`` maps symbols to primes; it is updated.
    """
    found = []
    for size in sizes:
        if isinstance(size, int):
            found.append(size)
            continue
        expression = size.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            known.setdefault(str(symbol), _PRIMES[len(known) % len(_PRIMES)])
        found.append(int(expression.subs({symbol: known[str(symbol)] for symbol in expression.free_symbols})))
    return found


@contextlib.contextmanager
def caught_launches(stages: int) -> Iterator[None]:
    """Make launches of Triton kernels inside the block operators that torch traces and compiles.

    ``data_ptr()`` of a fake tensor is 0 inside the block, because launchers check the alignment. ``stages`` is
    Triton's default number of pipeline stages for the device; torch's default is always 3.
    """
    from torch.library import wrap_triton
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **keywords: Any) -> None:  # noqa: ARG001
        wrap_triton(self)[grid](*arguments, **{"num_stages": stages, **keywords})

    JITFunction.run = run
    FakeTensor.data_ptr = lambda _: 0  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        JITFunction.run = original
        del FakeTensor.data_ptr


def launched_kernel(node: torch.fx.Node) -> Any:
    """Return the Triton function that a node of a traced graph launches; None for any other node."""
    mutation = private(
        "torch._higher_order_ops.triton_kernel_wrap.triton_kernel_wrapper_mutation", test=callable, without=_NEEDED
    )
    if node.target is not mutation:
        return None
    table = private("torch._higher_order_ops.triton_kernel_wrap.kernel_side_table", test=bool, without=_NEEDED)
    kernel = table.get_kernel(node.kwargs["kernel_idx"])
    while hasattr(kernel, "configs"):  # the launch's own number of warps is in an autotuner of one configuration
        kernel = kernel.fn
    return kernel


def _float32_scalars() -> dict[str, bool]:
    """Pass Python floats to Triton kernels as float32, as Triton does.

    Inductor passes them as float64 (pytorch/pytorch#190340), and a kernel then computes in float64.
    """
    config = private("torch._inductor.config", test=lambda found: callable(found.patch), without=_NEEDED)
    name = "_use_fp64_for_unbacked_floats"
    return {name: False} if hasattr(config, name) else {}


def compile_package(
    module: torch.fx.GraphModule, inputs: tuple[Any, ...], path: Path, options: Mapping[str, Any]
) -> None:
    """Compile an exported graph with AOTInductor and write it as a ``.pt2``."""
    compile_files = private("torch._inductor.aot_compile", test=callable, without=_NEEDED)
    package = private("torch._inductor.package.package_aoti", test=callable, without=_NEEDED)
    options = {**_float32_scalars(), **options, "aot_inductor.package": True}
    with torch.no_grad():
        files = compile_files(module, inputs, {}, options=options)
    package(str(path), files)


def load_package(path: Path) -> Any:
    """Return the callable of a ``.pt2``, as ``torch._inductor.aoti_load_package`` does."""
    return private("torch._inductor.aoti_load_package", test=callable, without=_NEEDED)(str(path))
