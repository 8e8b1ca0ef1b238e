"""Reversible in-place changes of a model: an undo log of attributes, forwards and tensor data.

A change never replaces a module or a parameter. Names, hooks, tied weights, optimizers and state dicts therefore
stay valid, and undoing the log restores the model exactly. The log survives ``copy.deepcopy`` and pickling.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Edits", "Forward", "own_forward"]


class _Missing:
    """Marks an attribute that the instance does not have. A class, so that copies and pickles are the same object."""


class Forward:
    """The replacement of one module's ``forward``, set on the instance.

    ``function`` is called with this object and the arguments of the call. It can read ``module`` and ``settings``,
    and call ``original`` for calls that it does not handle. Hooks still run, because they surround ``forward``.
    """

    def __init__(
        self, function: Callable[..., Any], module: nn.Module, inner: Callable[..., Any] | None, settings: Any
    ) -> None:
        self.function, self.module, self.inner, self.settings = function, module, inner, settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that this one replaced."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        # Hugging Face inspects the signature of forward.
        return inspect.signature(type(self.module).forward.__get__(self.module))


def own_forward(module: nn.Module) -> bool:
    """Return whether another library, such as accelerate or PEFT, has replaced the forward of this instance."""
    return "forward" in vars(module) and not isinstance(vars(module)["forward"], Forward)


class _Attribute:
    """One attribute with its value before or after the change, whichever is not set now."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.other = owner, name, value

    def swap(self) -> None:
        descriptor = isinstance(getattr(type(self.owner), self.name, None), property)
        now = getattr(self.owner, self.name) if descriptor else vars(self.owner).get(self.name, _Missing)
        if self.other is not _Missing:
            setattr(self.owner, self.name, self.other)
        elif now is not _Missing:
            delattr(self.owner, self.name)
        self.other = now


class _Data:
    """The data of a parameter or buffer; the tensor object stays the same."""

    def __init__(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        self.tensor, self.other = tensor, data

    def swap(self) -> None:
        self.tensor.data, self.other = self.other, self.tensor.data


class _Layout:
    """The memory format of a parameter; its current values are copied when the format is switched."""

    def __init__(self, tensor: torch.Tensor, memory_format: torch.memory_format) -> None:
        self.tensor = tensor
        self.other = torch.empty_like(tensor.detach(), memory_format=memory_format)

    def swap(self) -> None:
        now = self.tensor.data
        if (self.other.shape, self.other.dtype, self.other.device) != (now.shape, now.dtype, now.device):
            # The model was moved or cast since: only reuse the order of the dimensions in memory.
            self.other = torch.empty_strided(now.shape, self.other.stride(), dtype=now.dtype, device=now.device)
        self.other.copy_(now)
        self.tensor.data, self.other = self.other, now


class _Call:
    """A change with its own undo function, as libraries provide."""

    def __init__(self, do: Callable[..., Any], undo: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.do, self.undo, self.arguments = do, undo, arguments
        self.done = False

    def swap(self) -> None:
        (self.undo if self.done else self.do)(*self.arguments)
        self.done = not self.done


class Edits:
    """The changes made to one model, in order; ``undo`` and ``redo`` switch all of them.

    Example:
        >>> import torch
        >>> from kernel_pytorch.optimization.edits import Edits
        >>> layer, edits = torch.nn.Linear(2, 2), Edits()
        >>> edits.replace_forward(layer, lambda call, x: call.original(x) * call.settings, 2.0)
        >>> x = torch.ones(1, 2)
        >>> doubled = layer(x)
        >>> edits.undo()
        >>> torch.equal(doubled, layer(x) * 2)
        True
    """

    def __init__(self) -> None:
        self._changes: list[_Attribute | _Data | _Layout | _Call] = []
        self.active = True

    def __len__(self) -> int:
        """Return the number of changes."""
        return len(self._changes)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of any object."""
        self._add(_Attribute(owner, name, value))

    def set_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """Replace the data of a parameter or buffer, such as by rounded values; undo restores the previous data."""
        self._add(_Data(tensor, data))

    def set_layout(self, tensor: torch.Tensor, memory_format: torch.memory_format) -> None:
        """Change the memory format of a parameter or buffer; undo keeps its values, which may have changed."""
        self._add(_Layout(tensor, memory_format))

    def replace_forward(self, module: nn.Module, function: Callable[..., Any], settings: Any = None) -> None:
        """Set the forward of one module; ``function`` is called with a ``Forward`` and the call's arguments.

        Use a module-level function and picklable settings: pickling a whole model pickles the function by name.
        """
        inner = vars(module).get("forward")
        self._add(_Attribute(module, "forward", Forward(function, module, inner, settings)))

    def call(self, do: Callable[..., Any], undo: Callable[..., Any], *arguments: Any) -> None:
        """Call ``do(*arguments)`` now and on redo, and ``undo(*arguments)`` on undo."""
        self._add(_Call(do, undo, arguments))

    def undo(self) -> None:
        """Undo all changes, the last one first."""
        if self.active:
            for change in reversed(self._changes):
                change.swap()
            self.active = False

    def redo(self) -> None:
        """Apply all changes again."""
        if not self.active:
            for change in self._changes:
                change.swap()
            self.active = True

    def _add(self, change: _Attribute | _Data | _Layout | _Call) -> None:
        change.swap()
        self._changes.append(change)
