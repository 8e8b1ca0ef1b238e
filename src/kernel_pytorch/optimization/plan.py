"""Plans: the candidates to apply to each module with their measurements, as JSON without executable content."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from kernel_pytorch.evidence import versions
from kernel_pytorch.hardware_abstraction.registry import device as find_device

__all__ = [
    "Fingerprint",
    "Plan",
    "PlanError",
    "Step",
    "device_name",
    "fingerprint",
    "library_versions",
    "read_plan",
    "source_digest",
]

_VERSION = 1
_DEPENDS_ON = ("kernel_pytorch", "torch", "triton")
LIBRARIES = (
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "kernels",
    "liger-kernel",
    "quack-kernels",
    "torchao",
    "transformers",
)
"""Distributions whose kernels or models are used if they are installed."""


class PlanError(ValueError):
    """Raised if a plan cannot be read, or does not match the model, the device or the versions."""


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The structure of a model, which a plan depends on, without the values of its weights."""

    model: str
    """The class of the model."""
    parameters: int
    modules: str
    """Digest of the names and classes of all modules."""
    tensors: str
    """Digest of the names, shapes, dtypes and ``requires_grad`` of all parameters and buffers, ties included."""
    config: str
    """Digest of the model's configuration, if it has one."""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One candidate at some modules, in the order of application."""

    candidate: str
    sites: list[str]
    """Names of modules; ``""`` is the model itself."""
    kind: str
    speedup: float
    """Speed-up over the plan without it when it was added, the minimum over all inputs."""
    error: float | None
    """Largest error relative to its float64 budget, of the plan with it; None from the first approximate step on."""
    snr_db: float | None
    """The lowest signal-to-noise ratio of the plan with it; None if nothing differs from float64."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="plan", tag_field="kind"):
    """The result of ``kp.optimize`` for one model on one device.

    Example:
        >>> import torch, kernel_pytorch as kp
        >>> from kernel_pytorch.optimization import Plan
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> plan = kp.optimize(model, (torch.ones(2, 8),), exclude=("compile",), budget=1).plan
        >>> isinstance(plan, Plan), plan.goal
        (True, 'latency')
    """

    goal: str
    fingerprint: Fingerprint
    device: str
    versions: dict[str, str]
    """Versions of this library, torch, triton, and the libraries that the steps call."""
    steps: list[Step]
    inputs: list[str]
    """Names, shapes and dtypes of each input that the plan was verified and timed on."""
    budget_db: float | None
    """Minimum signal-to-noise ratio of approximate steps; None if only exact ones were allowed."""
    noise: float
    speedup_over_eager: list[float]
    """Speed-up over eager for each input."""
    speedup_over_compile: list[float | None]
    """Speed-up over torch.compile for each input; None if it was excluded or failed."""
    created: str
    version: int = _VERSION

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        Path(path).write_bytes(text + b"\n")

    def differences(self, model: nn.Module, device: torch.device) -> list[str]:
        """Return the differences of a model, its device and the versions from those of the plan."""
        found, now = [], fingerprint(model)
        for name, was, has in (
            ("class", self.fingerprint.model, now.model),
            ("number of parameters", self.fingerprint.parameters, now.parameters),
            ("names or classes of modules", self.fingerprint.modules, now.modules),
            (
                "names, shapes, dtypes, requires_grad or ties of parameters and buffers",
                self.fingerprint.tensors,
                now.tensors,
            ),
            ("configuration", self.fingerprint.config, now.config),
        ):
            if was != has:
                found.append(f"the model's {name}: {has} instead of {was}")
        here = device_name(device)
        if self.device != here:
            found.append(f"the device: {here} instead of {self.device}")
        current = {**versions(), **library_versions(self.versions.keys() & set(LIBRARIES))}
        found += [
            f"{name}: {current.get(name)} instead of {self.versions.get(name)}"
            for name in (*_DEPENDS_ON, *LIBRARIES)
            if self.versions.get(name) != current.get(name)
        ]
        return found


def read_plan(source: Plan | str | os.PathLike[str]) -> Plan:
    """Read a plan from a file; return a ``Plan`` unchanged."""
    if isinstance(source, Plan):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"plan={source!r}: use a plan of kp.optimize, or the file that it was saved in")
    try:
        plan: Plan = msgspec.json.decode(Path(source).read_bytes(), type=Plan)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise PlanError(f"plan={os.fspath(source)!r} is not a plan that can be read: {error}") from error
    if plan.version != _VERSION:
        raise PlanError(f"plan={os.fspath(source)!r} has version {plan.version}; this release reads {_VERSION}")
    return plan


def fingerprint(model: nn.Module) -> Fingerprint:
    """Return the structural fingerprint of a model.

    Example:
        >>> import torch
        >>> one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> fingerprint(one) == fingerprint(two), fingerprint(one) == fingerprint(torch.nn.Linear(2, 3))
        (True, False)
    """
    modules = [f"{name}={_class(module)}" for name, module in model.named_modules()]
    order: dict[int, int] = {}
    tensors = []
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        tied = order.setdefault(id(tensor), len(order))
        tensors.append(f"{name}={tied}:{tensor.dtype}{list(tensor.shape)}{tensor.requires_grad}")
    config = getattr(model, "config", None)
    return Fingerprint(
        model=_class(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        modules=_digest(modules),
        tensors=_digest(tensors),
        config=_digest(_configuration(config)) if config is not None else "",
    )


def source_digest(model: nn.Module) -> str:
    """Return a digest of the source of all module classes whose source is available."""
    sources = []
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        with contextlib.suppress(OSError, TypeError):  # typed in a shell, or written in C++
            sources.append(inspect.getsource(kind))
    return _digest(sources)


def library_versions(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Return the versions of those of the distributions that are installed."""
    found = {}
    for name in sorted(names):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def device_name(device: torch.device) -> str:
    """Return the name of a device for plans; for a CPU, with the instruction sets that bf16 and int8 depend on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    here = find_device(device)
    return " ".join(dict.fromkeys(("cpu", platform.machine(), here.arch, *sorted(here.features))))


def _class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _configuration(config: Any) -> list[str]:
    """Return a configuration's plain values, without file names and versions that Hugging Face adds."""
    values = config.to_dict() if hasattr(config, "to_dict") else vars(config) if hasattr(config, "__dict__") else {}
    passing = ("_name_or_path", "transformers_version", "_attn_implementation", "_attn_implementation_internal")
    return [f"{name}={value!r}" for name, value in sorted(values.items()) if name not in passing]


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
