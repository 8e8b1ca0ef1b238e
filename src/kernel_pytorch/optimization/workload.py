"""The workload to verify and time: a forward pass for inference goals, a training step for the others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kernel_pytorch.optimization.edits import Edits
from kernel_pytorch.optimization.examples import Example, leaves, real

__all__ = ["Loss", "Observation", "Workload"]

Loss = Callable[[Any], torch.Tensor]
Observation = dict[str, torch.Tensor]
"""Tensors by name: ``output.*``, ``loss``, ``gradient.*``, ``buffer.*``, ``argument.*``, ``weight.*`` if changed."""

_RELATIVE_STEP = 1e-2  # an optimizer step changes the weights by this fraction of their norm


@dataclass(frozen=True)
class Workload:
    """A model with a way to run it; every run starts from the same weights, buffers and random state."""

    model: nn.Module
    training: bool
    loss: Loss | None = None
    originals: Mapping[torch.Tensor, torch.Tensor] = field(init=False, repr=False, compare=False)
    """A copy of every weight and buffer in host memory, to restore the model after any candidate."""
    changes_arguments: bool = field(init=False, default=False, compare=False)
    """Whether a call mutates its arguments, such as a KV cache; a timed run then gets copies of them."""

    def __post_init__(self) -> None:
        tensors = (*self.model.parameters(), *self.model.buffers())
        copies = {tensor: _on_host(tensor.detach()) for tensor in tensors}
        object.__setattr__(self, "originals", copies)

    def step(self, example: Example) -> object:
        """Run once, as for timing: a forward pass, or forward, loss and backward."""
        torch.compiler.cudagraph_mark_step_begin()
        if self.changes_arguments:
            example = example.own()  # otherwise a KV cache would grow with every call
        if not self.training:
            with torch.no_grad():
                return self.model(*example.args, **example.kwargs)
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self.loss_of(self.model(*example.args, **example.kwargs))
        loss.backward()
        return loss

    def check(self, example: Example) -> None:
        """Run the model once; raise an error that names the arguments if they are invalid."""
        own = example.own()
        try:
            with self.kept(), self.own_random_state(), torch.no_grad():
                self.model(*own.args, **own.kwargs)
        except Exception as error:
            raise ValueError(
                f"inputs: the model fails on input {example.label} with {type(error).__name__}: {error}; give "
                "arguments that model(...) takes, on the model's device and in its dtype"
            ) from error

    def loss_of(self, output: Any) -> torch.Tensor:
        """Return the loss of an output: the user's, the model's own, or the mean square of its tensors."""
        if self.loss is not None:
            found = self.loss(output)
            if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
                what = _described(found) if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
                raise ValueError(f"loss: returned {what}; return a tensor of one element that requires gradients")
            return found
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, torch.Tensor):
            return own
        tensors = [tensor for _, tensor in leaves(output) if tensor.is_floating_point() and tensor.requires_grad]
        if not tensors:
            if not any(parameter.requires_grad for parameter in self.model.parameters()):
                raise ValueError(
                    "model: no parameter requires gradients, so it cannot be trained; use goal='latency'"
                )
            raise ValueError("model: no output takes part in autograd; pass loss=, a function of the output")
        if len(tensors) == 1 and tensors[0].ndim == 0:
            return tensors[0]
        wide = [tensor.double() if tensor.dtype is torch.float64 else tensor.float() for tensor in tensors]
        return torch.stack([tensor.square().mean() for tensor in wide]).sum()

    def observe(
        self, example: Example, seed: int, steps: int = 0, rate: float = 0.0, *, to_host: bool = False
    ) -> Observation:
        """Run on copies of the arguments, and return everything that a candidate must preserve, as real tensors.

        ``steps`` SGD steps of this learning rate follow, and the loss before each is returned as well. The weights
        and buffers are restored. With ``to_host``, outputs and gradients are returned in host memory.
        """

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to("cpu" if to_host else tensor.device, copy=True)

        own = example.own()
        seen: Observation = {}
        versions = {name: parameter._version for name, parameter in self.model.named_parameters()}
        with self.kept(), self.own_random_state():
            torch.manual_seed(seed)
            torch.compiler.cudagraph_mark_step_begin()
            if not self.training:
                with torch.no_grad():
                    output = self.model(*own.args, **own.kwargs)
            else:
                output = self.model(*own.args, **own.kwargs)
                loss = self.loss_of(output)
                loss.backward()
                seen["loss"] = loss.detach().clone()
                for name, parameter in self.model.named_parameters():
                    if parameter.grad is not None:
                        copy = copied(parameter.grad)
                        seen[f"gradient.{name}"] = real(copy)
                        if not to_host:  # one by one, so that both never exist for all
                            parameter.grad = copy
            for name, tensor in leaves(output):
                seen[f"output.{name}"] = real(copied(tensor))
            del output
            for name, tensor in leaves((own.args, dict(own.kwargs))):
                seen[f"argument.{name}"] = real(tensor.detach())
            for name, parameter in self.model.named_parameters():
                if parameter._version != versions.get(name):
                    seen[f"weight.{name}, which the call changed,"] = real(parameter.detach().clone())
            for name, buffer in self.model.named_buffers():
                seen[f"buffer.{name}"] = real(buffer.detach().clone())
            for number in range(1, steps + 1):
                self._update(rate)
                loss = self.loss_of(self.model(*own.args, **own.kwargs))
                loss.backward()
                seen[f"loss after {number} steps"] = loss.detach().clone()
        return seen

    def watch_arguments(self, example: Example, observation: Observation) -> None:
        """Detect whether the call of an observation mutated its arguments."""
        given = dict(leaves((example.args, dict(example.kwargs))))
        found = {name.removeprefix("argument."): x for name, x in observation.items() if name[:9] == "argument."}
        same = given.keys() == found.keys() and all(_equal(real(x), found[name]) for name, x in given.items())
        object.__setattr__(self, "changes_arguments", self.changes_arguments or not same)

    def rate(self, observation: Observation) -> float:
        """Return the learning rate whose first step changes the weights by a hundredth of their norm."""
        weights = [_norm(p.detach()) for p in self.model.parameters() if p.requires_grad and p.is_floating_point()]
        gradients = [_norm(value) for name, value in observation.items() if name.startswith("gradient.")]
        if not weights or not gradients:
            return 0.0
        return _RELATIVE_STEP * math.hypot(*weights) / max(math.hypot(*gradients), 1e-30)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore weights, buffers and gradients at the end of the block."""
        versions = {parameter: parameter._version for parameter in self.model.parameters()}
        gradients = {parameter: parameter.grad for parameter in self.model.parameters()}
        for parameter in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            changed = [parameter for parameter in gradients if parameter._version != versions[parameter]]
            self.restore((*changed, *self.model.buffers()))  # batch norm does not bump their version
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def restore(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Restore the original values of weights and buffers, all of them or some."""
        with torch.no_grad():
            for tensor in self.originals if tensors is None else tensors:
                if tensor in self.originals:  # a candidate may have added the tensor
                    tensor.copy_(self.originals[tensor].to(tensor.device, non_blocking=True))

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        """Set every module to training or evaluation mode for the goal inside the block."""
        before = {module: module.training for module in self.model.modules()}
        self.model.train(self.training)
        try:
            yield
        finally:
            for module, training in before.items():
                module.training = training

    @property
    def _device(self) -> torch.device:
        return next((tensor.device for tensor in self.model.parameters()), torch.device("cpu"))

    def own_random_state(self) -> contextlib.AbstractContextManager[None]:
        """Restore the random state of the CPU and of the model's device at the end of the block."""
        device = self._device
        if device.type == "cpu":
            return torch.random.fork_rng(devices=[])
        return torch.random.fork_rng(devices=[device], device_type=device.type)

    def _update(self, rate: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)
                    parameter.grad = None


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, pinned for GPUs, because every verification of a training step reads it back."""
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.detach().nan_to_num(), other.nan_to_num())


def _described(tensor: torch.Tensor) -> str:
    gradients = "" if tensor.requires_grad else " without gradients"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{gradients}"


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def without_dropout(model: nn.Module) -> Edits:
    """Set every dropout probability of a model to zero: of modules, and attributes such as ``attention_dropout``."""
    edits = Edits()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            probability = name == "p" and "Dropout" in type(module).__name__
            if isinstance(value, float) and value > 0 and (probability or "drop" in name):
                edits.set(module, name, 0.0)
    return edits
