"""Compare a sharded model with the unsharded one on a short input, for ``parallelize(verify=True)``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kernel_pytorch._compat.structures import pytree
from kernel_pytorch.distributed.context import Context
from kernel_pytorch.distributed.hugging_face import Prepared
from kernel_pytorch.masks import Mask
from kernel_pytorch.ops.attention import attention

__all__ = ["Unsharded"]

_SHORT = 32  # tokens per rank
_LONGEST = 4096


class Unsharded:
    """The unsharded model, whose outputs on a short input are compared with the sharded one's."""

    def __init__(self, model: nn.Module, mask: Any, place_for: Mask, prepared: Prepared) -> None:
        self.model, self.mask, self.place_for, self.prepared = model, mask, place_for, prepared
        self.verified: set[frozenset[str]] = set()
        """The sets of arguments that were compared."""

    def short_length(self, length: int, ranks: int) -> int | None:
        """Return the number of tokens to compare: a few per rank, or all if the mask is valid for one length only."""
        short = min(length, _SHORT * ranks)
        try:
            self.place_for.layout(short, short)
        except ValueError:
            short = length
        if short > _LONGEST:
            warnings.warn(
                f"parallelize: mask={self.place_for} fits {length} tokens alone, too many to compare the sharded "
                "model with the unsharded one; try it once on a short sequence, or pass verify=False",
                stacklevel=2,
            )
            return None
        return short

    def cut(self, x: Any, length: int, short: int) -> Any:
        if isinstance(x, torch.Tensor) and x.ndim >= 2 and x.shape[1] == length:
            return x[:, :short]
        return x[:short] if isinstance(x, torch.Tensor) and x.ndim == 1 and len(x) == length else x

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Disable gradients and dropout inside the block."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True

    def outputs(self, run: Callable[[], Any]) -> Any:
        """Return the model's outputs over all tokens; None, with a warning, if it does not run on a short input."""
        try:
            with self.evaluating(), self.prepared.undone(attention=self._own_attention):
                return run()
        except Exception as error:
            warnings.warn(
                "parallelize: the unsharded model did not run on a short input, so that the sharded one could not be "
                f"compared with it ({type(error).__name__}: {error}); pass verify=False if that is expected",
                stacklevel=2,
            )
            return None

    @property
    def _own_attention(self) -> bool:
        """Return whether the model's own attention implies its mask, so that it can verify ``mask``."""
        return (
            bool(self.prepared.changed)
            and isinstance(self.mask, Mask)
            and (self.mask.is_causal or self.mask.is_full)
        )

    def attending(self, mask: Callable[[], Mask]) -> contextlib.AbstractContextManager[Any]:
        """Return a context for attention over all tokens: the model's own, or with ``mask`` if it differs."""
        return contextlib.nullcontext() if self._own_attention else _Whole(mask)

    def compare(self, found: Any, expected: Any, context: Context) -> None:
        """Raise an error on every rank if an output differs on any."""
        differs = _difference(found, expected)
        if context.check:
            context.agree({"refused": int(differs is not None)}, {})
        if differs is not None:
            raise ValueError(
                f"model: sharded over {context.ranks} ranks it returns another {differs} than without sharding, on "
                f"{context.length} tokens: something besides attention depends on other tokens than its own, or mask "
                "is not what the model attends to; compute the loss from the outputs with "
                "kp.context_parallel.token_mean, pass the positions that the model would use, or verify=False if "
                "the difference is right"
            )


class _Whole(TorchFunctionMode):
    """Runs scaled_dot_product_attention with a mask of ``kp.masks``, on this rank only."""

    def __init__(self, mask: Callable[[], Mask]) -> None:
        super().__init__()
        self.mask = mask

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self.attend(*args, **(kwargs or {}))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        scale: float | None = None,
        **__: Any,
    ) -> Any:
        q, k, v = (x.unsqueeze(1) if x.ndim == 3 else x for x in (query, key, value))
        out = attention(q, k, v, self.mask(), scale=scale)
        assert isinstance(out, torch.Tensor)
        return out.squeeze(1) if query.ndim == 3 else out


def _difference(found: Any, expected: Any) -> str | None:
    """Return the name of the first output that differs, or None."""
    named = [dict(pytree.tree_flatten_with_path(outputs)[0]) for outputs in (found, expected)]
    for path, known in named[1].items():
        own, name = named[0].get(path), pytree.keystr(path) or "output"
        if not isinstance(known, torch.Tensor):
            continue
        if not isinstance(own, torch.Tensor) or own.shape != known.shape:
            shape = list(own.shape) if isinstance(own, torch.Tensor) else own
            return f"output{name} (shape {shape} instead of {list(known.shape)})"
        if not known.is_floating_point() or not known.numel():
            continue
        error = float((own.double() - known.double()).abs().nan_to_num(nan=torch.inf).max())
        largest = float(known.double().abs().nan_to_num().max())
        # Half of the dtype's digits: ranks accumulate in another order, and layers amplify the difference.
        if error > torch.finfo(known.dtype).eps ** 0.5 * max(largest, 1e-30):
            return f"output{name} (by {error:.3g}, where its largest element is {largest:.3g})"
    return None
