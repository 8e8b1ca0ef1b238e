"""``.pt2`` packages for AOTInductor, PyTorch's ahead-of-time runtime, with our kernels compiled into them.

A package is loaded by ``kp.load``, by ``torch._inductor.aoti_load_package`` without this library, and by libtorch in
C++.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from kernel_pytorch._compat.packages import compile_package, load_package
from kernel_pytorch._compat.structures import pytree
from kernel_pytorch.fp8.monitor import layers_of
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.registry import device_of
from kernel_pytorch.lowering.build import BuildError
from kernel_pytorch.lowering.difference import Difference, differences
from kernel_pytorch.lowering.inlining import PackagedCall, inline_kernels

__all__ = ["LoadedPackage", "PackageReport", "PackagedProgram", "TORCH_DEVICES", "lower_package"]

TORCH_DEVICES = {"nvidia": "cuda", "amd": "cuda", "intel": "xpu", "cpu": "cpu"}
"""Backends that packages support, with torch's names of their devices."""
_METADATA = "kernel_pytorch"


@dataclass(frozen=True)
class PackageReport:
    """The replacement of each call of our operators in a model; print it for all details.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> class Norm(torch.nn.Module):
        ...     def forward(self, x):
        ...         return kp.rms_norm(x)
        >>> report = kp.lower(Norm().eval(), (torch.randn(4, 64),), runtime="aoti").report
        >>> [(call.op, call.kernel) for call in report.calls]
        [('rms_norm', 'torch')]
    """

    device: str
    arch: str
    calls: tuple[PackagedCall, ...]
    package_bytes: int

    def __str__(self) -> str:
        lines = [f"package of {self.package_bytes:,} bytes for {self.device} ({self.arch})"]
        counts: dict[str, int] = {}
        for call in self.calls:
            counts[str(call)] = counts.get(str(call), 0) + 1
        lines += [f"{text}" + (f" (x{count})" if count > 1 else "") for text, count in counts.items()]
        return "\n".join(lines if self.calls else [*lines, "no operator of ours: PyTorch compiled all of it"])


@dataclass(frozen=True)
class _Input:
    """Requirements on an input, which are checked here because the compiled code checks nothing."""

    dtype: str = ""
    device: str = ""
    shape: tuple[int | tuple[int, int | None], ...] = ()
    """Sizes as integers, or as (minimum, maximum)."""
    strides: tuple[int, ...] | None = None
    """Strides; None for a contiguous tensor."""
    constant: str = ""
    """``repr`` of an input that is not a tensor and therefore a constant of the package."""

    @staticmethod
    def of(value: Any, ranges: Mapping[Any, Any]) -> _Input:
        if not isinstance(value, torch.Tensor):
            return _Input(constant=repr(value))
        sizes: list[int | tuple[int, int | None]] = []
        shape: Sequence[Any] = value.shape  # torch.SymInt where dynamic
        for size in shape:
            if isinstance(size, int):
                sizes.append(size)
                continue
            allowed = ranges.get(size.node.expr)
            if allowed is None:
                sizes.append((0, None))
                continue
            bounded = allowed.upper.is_number and allowed.upper < 1 << 62
            sizes.append((int(allowed.lower), int(allowed.upper) if bounded else None))
        strides = None if value.is_contiguous() else value.stride()
        if strides is not None and not all(isinstance(size, int) for size in sizes):
            raise ValueError(f"an input of dynamic shape {sizes} is not contiguous: lower with one that is")
        return _Input(_format(value.dtype), value.device.type, tuple(sizes), strides)

    @staticmethod
    def read(facts: Mapping[str, Any]) -> _Input:
        """Return an input from its JSON object."""
        sizes = tuple(tuple(size) if isinstance(size, list) else size for size in facts["shape"])
        strides = None if facts["strides"] is None else tuple(facts["strides"])
        return _Input(facts["dtype"], facts["device"], sizes, strides, facts["constant"])

    def ready(self, value: Any) -> Any:
        """Return the value in the layout that the compiled code requires, or None if it does not fit."""
        if self.constant:
            return value if repr(value) == self.constant else None
        if (
            not isinstance(value, torch.Tensor)
            or (_format(value.dtype), value.device.type, value.ndim) != (self.dtype, self.device, len(self.shape))
            or not all(_fits(size, allowed) for size, allowed in zip(value.shape, self.shape, strict=True))
        ):
            return None
        if self.strides is None:
            value = value.detach().contiguous()
        else:
            laid_out = zip(value.shape, value.stride(), self.strides, strict=True)
            if any(size > 1 and own != wanted for size, own, wanted in laid_out):
                return None
        return value.clone() if value.data_ptr() % 16 else value  # vector loads need aligned memory

    def __str__(self) -> str:
        if self.constant:
            return self.constant
        sizes = (f"{size[0]}..{size[1] or ''}" if isinstance(size, tuple) else str(size) for size in self.shape)
        strides = "" if self.strides is None else f" with strides {self.strides}"
        return f"{self.dtype}[{', '.join(sizes)}] on {self.device}{strides}"


def _fits(size: int, allowed: int | tuple[int, int | None]) -> bool:
    if isinstance(allowed, int):
        return size == allowed
    return allowed[0] <= size and (allowed[1] is None or size <= allowed[1])


def _format(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(value: Any, wanted: _Input) -> str:
    if not isinstance(value, torch.Tensor):
        return (
            repr(value) if isinstance(value, (bool, int, float, str, type(None))) else f"a {type(value).__name__}"
        )
    strides = "" if wanted.strides is None else f" with strides {tuple(value.stride())}"
    return f"{_format(value.dtype)}{list(value.shape)} on {value.device.type}{strides}"


class LoadedPackage:
    """A loaded ``.pt2``; call it like the original model.

    Thread-safe: one call runs at a time.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> package = kp.lower(torch.nn.Softmax(-1).eval(), (torch.ones(2, 4),), runtime="aoti")
        >>> package.load()(torch.ones(2, 4))[0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    methods = ("forward",)

    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path.name} is no package that can be loaded: {error}") from error
        if damaged is not None:
            raise ValueError(f"{path.name} is no package that can be loaded: it is damaged, at {damaged}")
        try:
            self._call = load_package(path)
        except RuntimeError as error:
            raise ValueError(f"{path.name} is no package that can be loaded here: {error}") from error
        said = self._call.get_metadata().get(_METADATA)
        self.facts: dict[str, Any] = {} if said is None else json.loads(said)
        """Metadata of ``kp.lower``: the device and the inputs; empty for packages of other origin."""
        self._inputs = tuple(_Input.read(one) for one in self.facts.get("inputs", ()))
        self._check_device()

    def _check_device(self) -> None:
        made_for, kind = self.facts.get("arch"), TORCH_DEVICES.get(self.facts.get("backend", ""))
        if kind in (None, "cpu"):
            return
        if not torch.get_device_module(kind).is_available():
            raise ValueError(
                f"{self._name} was made for {self.facts['device']}, and torch sees no {kind} device here"
            )
        here = device_of(torch.device(kind))
        if here.arch != made_for:
            raise ValueError(
                f"{self._name} was made for {made_for}, and this is {here.arch}: lower the model again here"
            )

    def __call__(self, *inputs: Any) -> Any:
        if not self._inputs:
            return self._call(*inputs)
        leaves, tree = pytree.tree_flatten(inputs)
        if len(leaves) != len(self._inputs):
            raise ValueError(f"{self._name} takes {len(self._inputs)} inputs, and {len(leaves)} were given")
        ready = []
        for number, (value, wanted) in enumerate(zip(leaves, self._inputs, strict=True)):
            ready.append(wanted.ready(value))
            if ready[-1] is None and (value is not None or wanted.constant != "None"):
                raise ValueError(
                    f"{self._name}: input {number} is {_shown(value, wanted)}; it was lowered for {wanted}"
                )
        return self._call(*pytree.tree_unflatten(ready, tree))

    def ones(self, method: str = "forward") -> list[torch.Tensor]:
        """Return valid inputs filled with ones; dynamic dimensions have their minimum size."""
        return [
            torch.ones(
                [size if isinstance(size, int) else max(size[0], 1) for size in wanted.shape],
                dtype=getattr(torch, wanted.dtype),
                device=wanted.device,
            )
            for wanted in self._inputs
            if not wanted.constant
        ]

    def run(self, method: str, inputs: Sequence[Any]) -> Any:
        """Run ``forward``, the only method."""
        if method != "forward":
            raise ValueError(f"method={method!r}: {self._name} has forward")
        return self(*inputs)


@dataclass(frozen=True, eq=False)
class PackagedProgram:
    """A model lowered to a ``.pt2``.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).eval(), torch.randn(2, 8)
        >>> package = kp.lower(model, (x,), runtime="aoti")
        >>> package.compare()[0].snr > 60
        True
    """

    report: PackageReport
    eager: torch.nn.Module = field(repr=False)
    inputs: Mapping[str, tuple[Any, ...]] = field(repr=False)
    """The example inputs, by name of the only method."""
    folder: tempfile.TemporaryDirectory[str] = field(repr=False)
    """Temporary folder with the file, deleted with this object."""

    @property
    def path(self) -> Path:
        """Path of the temporary file; ``save`` copies it."""
        return Path(self.folder.name) / "model.pt2"

    def save(self, path: str | Path) -> None:
        """Write the ``.pt2`` atomically."""
        path = Path(path)
        if path.suffix != ".pt2":
            raise ValueError(f"path={str(path)!r}: torch loads packages whose name ends in .pt2")
        beside = path.with_name(f".{path.name}.{self.path.stat().st_ino:x}")
        try:
            shutil.copyfile(self.path, beside)
            beside.replace(path)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror or error}: {str(path)!r} was not written") from error
        finally:
            beside.unlink(missing_ok=True)

    def load(self) -> LoadedPackage:
        """Load the program into this process."""
        return self._loaded

    @cached_property
    def _loaded(self) -> LoadedPackage:
        return LoadedPackage(self.path)

    def __call__(self, *inputs: Any) -> Any:
        return self._loaded(*inputs)

    def compare(self, *inputs: Any, method: str = "forward") -> tuple[Difference, ...]:
        """Run the package and eager PyTorch on the same inputs (by default, those of ``lower``)."""
        given = inputs or self.inputs[method]
        found = self._loaded(*given)
        with torch.no_grad():
            return differences(found, self.eager(*given))


def _device_for(backend: str, model: torch.nn.Module, inputs: tuple[Any, ...]) -> Device:
    """Return the device that a package is compiled for: that of the model and the inputs."""
    kind = TORCH_DEVICES[backend]
    module = None if kind == "cpu" else torch.get_device_module(kind)
    if module is not None and not module.is_available():
        raise ValueError(
            f"backend={backend!r}: a package is compiled on the GPU that it is for, and torch sees no {kind} device "
            "here; lower on a machine with one"
        )
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)),
    ]
    places = {tensor.device for tensor in tensors}
    if any(place.type != kind for place in places) or len(places) > 1:
        raise ValueError(
            f"model and inputs are on {', '.join(sorted(map(str, places)))}: for backend={backend!r} move both to "
            f"one device, with .to({kind!r})"
        )
    found = device_of(next(iter(places), torch.device(kind)))
    if found.backend != backend:
        raise ValueError(f"backend={backend!r}: {next(iter(places))} is {found.name}, of backend {found.backend!r}")
    return found


def _check(model: Any, inputs: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model={model!r}: a package has one method, so expected one torch.nn.Module")
    if not isinstance(inputs, tuple):
        raise TypeError(f"inputs is a {type(inputs).__name__}: pass a tuple of the model's inputs, as (x,) for one")
    if model.training:
        raise ValueError("model is in training mode: call model.eval() first")
    for name, layer in layers_of(model).items():
        if not layer.fp8_auto:
            raise ValueError(
                f"model trains in FP8 (recipe {layer.fp8_recipe}, layer {name!r}): call kp.fp8.revert(model) first"
            )


def lower_package(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    *,
    backend: str,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> PackagedProgram:
    """Lower a model to a package for AOTInductor; ``kp.lower`` describes the arguments."""
    _check(model, inputs)
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options={options!r}: a package takes a dict of Inductor's options")
    device = _device_for(backend, model, inputs)
    tell("exporting the model")
    with torch.no_grad():
        exported = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes)
    tell("putting kernels into the graph")
    module = exported.module(check_guards=False)
    calls = inline_kernels(module, device)
    facts = {
        "backend": backend,
        "device": device.name,
        "arch": device.arch,
        "torch": torch.__version__,
        "inputs": [asdict(one) for one in _inputs(exported)],
        "calls": [asdict(call) for call in calls],
    }
    folder = tempfile.TemporaryDirectory(prefix="kernel-pytorch-")
    path = Path(folder.name) / "model.pt2"
    tell("compiling the package")
    try:
        said = {"aot_inductor.metadata": {_METADATA: json.dumps(facts)}}
        compile_package(module, inputs, path, {**(options or {}), **said})
    except Exception as error:
        folder.cleanup()
        raise _compile_error(error) from error
    report = PackageReport(device.name, device.arch, calls, path.stat().st_size)
    return PackagedProgram(report, model, {"forward": inputs}, folder)


def _inputs(exported: ExportedProgram) -> list[_Input]:
    """Return the inputs in the order of the pytree's leaves; non-tensors are constants of the package."""
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    specs = zip(placeholders, exported.graph_signature.input_specs, strict=True)
    ranges = exported.range_constraints
    return [_Input.of(node.meta.get("val"), ranges) for node, spec in specs if spec.kind is InputKind.USER_INPUT]


def _compile_error(error: Exception) -> Exception:
    """Return an error with a remedy if there is a known one, else the error itself."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OSError(error.errno, f"{error.strerror}: set TMPDIR and TORCHINDUCTOR_CACHE_DIR to a disk with room")
    if type(error).__name__ == "InvalidCxxCompiler" or "InvalidCxxCompiler" in str(error):
        return BuildError("no C++ compiler was found: install g++ or clang++, or name one in CXX")
    return error
