"""``kp.lower``: lower a model to a program for ExecuTorch or for AOTInductor, PyTorch's ahead-of-time runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from kernel_pytorch.hardware_abstraction.registry import backend as find_backend

if TYPE_CHECKING:
    from kernel_pytorch.lowering.package import PackagedProgram
    from kernel_pytorch.lowering.program import LoweredProgram

__all__ = ["lower"]

_RUNTIMES = ("executorch", "aoti")


@overload
def lower(  # type: ignore[overload-overlap]
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    *,
    backend: Literal["nvidia", "amd", "intel"],
    runtime: Literal["aoti"] | None = None,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] | None = None,
) -> PackagedProgram: ...


@overload
def lower(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    *,
    backend: str = "cpu",
    runtime: Literal["aoti"],
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] | None = None,
) -> PackagedProgram: ...


@overload
def lower(
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    inputs: tuple[Any, ...] | Mapping[str, tuple[Any, ...]],
    *,
    backend: str = "cpu",
    runtime: Literal["executorch"] | None = None,
    recipe: str | None = None,
    dynamic_shapes: Any = None,
    options: Any = None,
    metadata: Mapping[str, Any] | None = None,
    measure: bool = False,
    tell: Callable[[str], None] | None = None,
) -> LoweredProgram: ...


def lower(
    model: Any,
    inputs: Any,
    *,
    backend: str = "cpu",
    runtime: str | None = None,
    recipe: str | None = None,
    dynamic_shapes: Any = None,
    options: Any = None,
    metadata: Mapping[str, Any] | None = None,
    measure: bool = False,
    tell: Callable[[str], None] | None = None,
) -> LoweredProgram | PackagedProgram:
    """Lower a model to a program that runs without this package: a ``.pte`` for ExecuTorch, a ``.pt2`` for libtorch.

    Args:
        model: a model in eval mode; or a mapping from method names to models.
        inputs: example inputs as a tuple; or a mapping from method names to such tuples, such as
            ``{"prefill": (tokens, position), "decode": (token, position)}``. Methods share weights and caches.
        backend: the target: ``"cpu"``, ``"nvidia"``, ``"amd"``, ``"intel"``, or a third-party backend that defines
            a lowering.
        runtime: ``"executorch"``, which also runs on phones and small devices, or ``"aoti"``, PyTorch's
            AOTInductor, for CPUs and GPUs with libtorch. None selects ExecuTorch if the backend supports it, and
            AOTInductor on GPUs. An AOTInductor package has one method and does not support ``recipe``, ``metadata``
            or ``measure``.
        recipe: the name of one of the backend's quantization recipes, such as ``"int8-dynamic"``; None for no
            quantization.
        dynamic_shapes: dynamic dimensions, as in ``torch.export.export``; for ExecuTorch each needs a ``max``. With
            several methods, a mapping from method names.
        options: for ExecuTorch the backend's partitioner options (``PartitionerOptions`` for ``"cpu"``); for
            AOTInductor a dict of Inductor options, such as ``{"max_autotune": True}``.
        metadata: constant values by method name, which the program returns from methods without inputs, as
            ExecuTorch's runners read them: ``{"get_max_seq_len": 128}``.
        measure: lower the model with our delegate, with our delegate for attention and norms only, and without it;
            time all of them on the example inputs, and keep the fastest. ``report.measured`` has the times.
        tell: called with a line for each step.

    Returns:
        A program with ``save``, ``report`` (what runs each node, with reasons) and ``compare`` (with eager PyTorch).

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> class Attends(torch.nn.Module):
        ...     def forward(self, q, k, v):
        ...         return kp.attention(q, k, v, kp.masks.causal() & kp.masks.window(16))
        >>> qkv = tuple(torch.randn(1, 2, 64, 8) for _ in range(3))
        >>> program = kp.lower(Attends().eval(), qkv)
        >>> program.report.count("KernelPyTorchBackend", "kernel_pytorch_lowering::attention")
        1
    """
    if runtime not in (None, *_RUNTIMES):
        raise ValueError(f"runtime={runtime!r}: use one of {', '.join(_RUNTIMES)}")
    from kernel_pytorch.lowering.package import TORCH_DEVICES

    if runtime is None:
        lowers = find_backend(backend).lowering is not None
        runtime = "executorch" if lowers or backend not in TORCH_DEVICES else "aoti"
    if runtime == "aoti":
        from kernel_pytorch.lowering.package import lower_package

        find_backend(backend)  # an error that lists the backends
        if backend not in TORCH_DEVICES:
            raise ValueError(f"backend={backend!r}: packages are made for {', '.join(TORCH_DEVICES)}")
        for name, value in (("recipe", recipe), ("metadata", metadata), ("measure", measure or None)):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r}: a package for AOTInductor takes none; quantize the model itself before, or "
                    "lower it with runtime='executorch'"
                )
        return lower_package(
            model, inputs, backend=backend, dynamic_shapes=dynamic_shapes, options=options, tell=tell or _silent
        )
    from kernel_pytorch.lowering import imported

    lower_program: Any = imported("program", "lower")  # imported here, because AOTInductor does not need ExecuTorch
    program: LoweredProgram = lower_program(
        model,
        inputs,
        backend=backend,
        recipe=recipe,
        dynamic_shapes=dynamic_shapes,
        options=options,
        metadata=metadata,
        measure=measure,
        tell=tell,
    )
    return program


def _silent(text: str) -> None:
    pass
