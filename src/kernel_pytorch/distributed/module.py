"""Context parallelism for a whole model: ``parallelize``.

The model's forward is wrapped so that it shards its inputs, and a TorchFunctionMode replaces
``scaled_dot_product_attention`` inside it by ``kp.attention`` across ranks. Every module that could call attention is
wrapped as well, because activation checkpointing recomputes modules in the backward, outside the model's forward.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kernel_pytorch._compat.compiler import flex_attention_operator
from kernel_pytorch._compat.structures import pytree
from kernel_pytorch.distributed import hugging_face
from kernel_pytorch.distributed.bound_arguments import argument_of, named_of, set_argument, variable_of
from kernel_pytorch.distributed.context import Context, group_of
from kernel_pytorch.distributed.cost import Link
from kernel_pytorch.distributed.schedules import Schedule
from kernel_pytorch.distributed.token_mean import Scaled, token_mean_over
from kernel_pytorch.distributed.verification import Unsharded
from kernel_pytorch.masks import Mask
from kernel_pytorch.ops.attention import attention, spreading

__all__ = ["parallelize"]

_STORAGES = 4096  # entries before those of freed storages are first dropped
_SDPA = "use torch.nn.functional.scaled_dot_product_attention, which becomes kp.attention over all ranks"
_REFUSED: dict[Any, str] = {
    functional.multi_head_attention_forward: "nn.MultiheadAttention hides its attention: project q, k and v with "
    f"nn.Linear and {_SDPA}",
    flex_attention_operator(): f"flex_attention sees only this rank's tokens; {_SDPA}, and describe its mask with "
    "kp.masks",
    torch._native_multi_head_attention: f"nn.MultiheadAttention hides its attention: {_SDPA}",
}
for _name in dir(torch.ops.aten):
    if _name.startswith("_scaled_dot_product_") and "backward" not in _name:
        for _overload in getattr(torch.ops.aten, _name).overloads():
            _REFUSED[getattr(getattr(torch.ops.aten, _name), _overload)] = (
                f"{_name} sees only this rank's tokens: {_SDPA}"
            )
        _REFUSED[getattr(torch.ops.aten, _name)] = f"{_name} sees only this rank's tokens: {_SDPA}"


@dataclass(eq=False)
class _Pass:
    """The state of one forward of the model, also needed by modules that are recomputed in the backward."""

    context: Context
    masks: dict[str, Mask] = field(default_factory=dict)
    """Masks by module name, from the forward."""
    calls: int = 0


class _Local(threading.local):
    """Thread-local state, because autograd recomputes modules on a GPU in a separate thread."""

    current: _Pass | None = None
    inside: bool = False
    names: tuple[tuple[str, bool], ...] = ()
    """The enclosing modules, innermost last, and whether gradients were enabled when each started."""


class _Parallel:
    """State that the wrapped modules of one model share."""

    def __init__(
        self,
        mask: Mask | Callable[[str], Mask],
        make: Callable[[int], Context],
        gather_output: bool,
        positions: str | None,
        inputs: frozenset[str] | None,
        unsharded: Unsharded | None = None,
    ) -> None:
        self.mask, self.make = mask, make
        self.unsharded = unsharded
        """Compares the first calls with the unsharded model; None with verify=False."""
        self.gather_output, self.positions, self.inputs = gather_output, positions, inputs
        self.longest: int | None = None
        """The number of tokens beyond which the model's rotary embedding depends on the longest position."""
        self.contexts: dict[int, Context] = {}
        self.local = _Local()
        self.storages: dict[int, tuple[StorageWeakRef, _Pass | None]] = {}
        self.most_storages = _STORAGES

    def __deepcopy__(self, _: Any) -> _Parallel:
        return self  # a copied model is parallel over the same group, and a group cannot be copied

    def context(self, length: int) -> Context:
        if length not in self.contexts:
            self.contexts[length] = self.make(length)
        return self.contexts[length]

    def mask_of(self, found: _Pass, name: str) -> Mask:
        if isinstance(self.mask, Mask):
            return self.mask
        if name not in found.masks:
            mask = self.mask(name)
            if not isinstance(mask, Mask):
                raise TypeError(f"mask({name!r}) returned {mask!r}: return a mask of kp.masks for every module")
            found.masks[name] = mask
        return found.masks[name]

    # The pass of a recomputed module is identified by the storages of its inputs, which checkpointing keeps.

    def remember(self, found: _Pass, arguments: Any) -> None:
        for storage in _storages(arguments):
            key = storage._cdata
            known = self.storages.get(key)
            if known is None:
                if len(self.storages) >= self.most_storages:
                    self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
                    self.most_storages = max(_STORAGES, 2 * len(self.storages))
                self.storages[key] = StorageWeakRef(storage), found
            elif known[1] is not None and known[1] is not found:
                # A storage that several passes share identifies none.
                self.storages[key] = known[0], None

    def recall(self, arguments: Any) -> _Pass | None:
        known = [self.storages.get(storage._cdata) for storage in _storages(arguments)]
        passes = {one[1] for one in known if one is not None and one[1] is not None}
        if len(passes) == 1:
            return passes.pop()
        if passes:
            return None
        # The inputs were moved, for example to the host: use the pass if there is only one context.
        if len(self.contexts) == 1 and known:
            return _Pass(next(iter(self.contexts.values())))
        return None


def _storages(arguments: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter):
            with contextlib.suppress(NotImplementedError, RuntimeError):  # a subclass without storage
                yield leaf.untyped_storage()


class _Spread(TorchFunctionMode):
    """Replaces scaled_dot_product_attention by kp.attention across ranks; other attention raises an error."""

    def __init__(self, parallel: _Parallel, found: _Pass | None) -> None:
        super().__init__()
        self.parallel, self.found = parallel, found

    def __enter__(self) -> Any:
        spreading.append(self.attend_ours)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        spreading.pop()

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        if func in _REFUSED:
            raise NotImplementedError(f"{self.name()}: {_REFUSED[func]}")
        return func(*args, **(kwargs or {}))

    def name(self) -> str:
        return self.parallel.local.names[-1][0] or "the model"

    def pass_of(self, query: torch.Tensor, key: torch.Tensor) -> _Pass:
        """Return the forward that an attention call belongs to; raise an error if it cannot be sharded."""
        name, found = self.name(), self.found
        if found is None:
            raise RuntimeError(
                f"{name}: attention outside the forward of the parallelized model, with inputs that cannot be traced "
                "to one of its forwards; call the model itself, or use inputs of one length where a saved input is "
                "moved before the backward"
            )
        if self.parallel.local.names[-1][1] and not torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: attention without gradients in a module that has them: if it is a function that is "
                "checkpointed with use_reentrant=True, checkpoint the module or use use_reentrant=False; if it is "
                "torch.no_grad(), put it around the module"
            )
        tokens = found.context.tokens
        if query.ndim not in (3, 4) or query.shape[-2] != tokens or key.shape[-2] != tokens:
            raise ValueError(
                f"{name}: attention of query {list(query.shape)} to key {list(key.shape)}, where this rank holds "
                f"{tokens} tokens: only self-attention over the sequence is spread, without a cache "
                "(use_cache=False) and without cross-attention"
            )
        return found

    def ours(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None = None, **keywords: Any
    ) -> Any:
        """Serve a kp.attention call without a group, with its own mask."""
        found = self.pass_of(q, k)
        found.calls += 1
        return attention(q, k, v, mask, **{**keywords, "group": found.context})

    attend_ours = torch.compiler.disable(ours)

    def spread(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: ARG002  the mask of the whole sequence says so; see parallelize
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        name = self.name()
        if attn_mask is not None:
            raise ValueError(
                f"{name}: attn_mask of shape {list(attn_mask.shape)} is of this rank's tokens alone; describe it for "
                "the whole sequence as mask=kp.masks... of parallelize, and drop attention_mask from the call"
            )
        if dropout_p:
            raise ValueError(f"{name}: dropout_p={dropout_p}: kp.attention has no dropout; set the model's to 0")
        found = self.pass_of(query, key)
        if not enable_gqa and query.ndim == 4 and key.shape[1] not in (1, query.shape[1]):
            raise ValueError(f"{name}: {query.shape[1]} query and {key.shape[1]} key heads: pass enable_gqa=True")
        if torch.is_autocast_enabled(query.device.type):  # autocast casts the inputs of the replaced function too
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
        mask = self.parallel.mask_of(found, self.parallel.local.names[-1][0])
        window = hugging_face.window()
        if window is not None and window < found.context.length and mask.is_causal:
            raise ValueError(
                f"{name}: its model has sliding_window={window}, and mask={mask} attends beyond; pass "
                f"mask=kp.masks.causal() & kp.masks.window({window - 1}), or a function of the module's name where "
                "layers differ"
            )
        found.calls += 1
        sinks = hugging_face.sink_logits()
        if query.ndim == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            return _attend(query, key, value, mask, scale, sinks, found.context).squeeze(1)
        return _attend(query, key, value, mask, scale, sinks, found.context)

    # A graph break in compiled models: a graph must not capture the pass and its masks.
    attend = torch.compiler.disable(spread)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    scale: float | None,
    sink_logits: torch.Tensor | None,
    context: Context,
) -> torch.Tensor:
    out = attention(q, k, v, mask, scale=scale, sink_logits=sink_logits, group=context)
    assert isinstance(out, torch.Tensor)
    return out


def _eager(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function outside of torch.compile, including everything that it calls."""
    return torch.compiler.disable(function)(*args)


class _Forward:
    """The forward of a module in a parallelized model. An object, so that copying the model copies it."""

    def __init__(self, parallel: _Parallel, name: str, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original, updated=())
        self.parallel, self.name, self.original = parallel, name, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        local = self.parallel.local
        if not local.inside:
            # A graph break: torch.compile continues with the functions called from here.
            return torch.compiler.disable(self.enter, recursive=False)(args, kwargs)
        if local.current is not None and not torch.compiler.is_compiling():
            self.parallel.remember(local.current, (args, kwargs))
        outer = local.names
        local.names = (*outer, (self.name, torch.is_grad_enabled()))
        try:
            return self.original(*args, **kwargs)
        finally:
            local.names = outer

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module outside the model's forward: recomputed in a backward, or called directly."""
        found = _eager(self.recalled, args, kwargs)
        return torch.compiler.disable(self.run, recursive=False)(found, args, kwargs)

    def recalled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pass | None:
        found = self.parallel.recall((args, kwargs))
        if found is not None:
            self.parallel.remember(found, (args, kwargs))
        return found

    def run(self, found: _Pass | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local = self.parallel.local
        before = local.current, local.inside, local.names
        local.current, local.inside = found, True
        local.names = ((self.name, torch.is_grad_enabled()),)
        try:
            with _Spread(self.parallel, found):
                return self.original(*args, **kwargs)
        finally:
            local.current, local.inside, local.names = before


class _Root(_Forward):
    """The model's forward: full inputs in, full outputs out."""

    def __init__(self, parallel: _Parallel, original: Callable[..., Any]) -> None:
        super().__init__(parallel, "", original)
        self.signature = inspect.signature(original)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.parallel.unsharded is not None:
            _eager(self.verify, args, kwargs)
        return self.sharded(args, kwargs, self.parallel.gather_output)

    def verify(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the sharded and the unsharded model on the first tokens of a call, once per set of arguments."""
        unsharded = self.parallel.unsharded
        assert unsharded is not None
        bound = self.signature.bind_partial(*args, **kwargs)
        given = frozenset(name for name, value in named_of(bound) if value is not None)
        if given in unsharded.verified:
            return
        unsharded.verified.add(given)
        length = self.length(bound)
        context = self.parallel.context(length)  # raises errors about the call itself first
        self.defaults(self.signature.bind_partial(*args, **kwargs), context)
        if context.ranks == 1:
            return
        short = unsharded.short_length(length, context.ranks)
        if short is None:
            return
        args, kwargs = pytree.tree_map(lambda x: unsharded.cut(x, length, short), (args, kwargs))
        expected = unsharded.outputs(lambda: self.whole(args, kwargs))
        if expected is None:
            return
        with unsharded.evaluating():
            found = self.sharded(args, kwargs, True)
        unsharded.compare(found, expected, self.parallel.context(short))

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward over all tokens, on this rank only."""
        bound = self.signature.bind_partial(*args, **kwargs)
        self.without_masks(bound)
        local, parallel = self.parallel.local, self.parallel
        before = local.current, local.inside, local.names
        local.current, local.inside, local.names = None, True, (("", torch.is_grad_enabled()),)
        found = _Pass(parallel.contexts[next(iter(parallel.contexts))])
        try:
            with parallel.unsharded.attending(lambda: parallel.mask_of(found, local.names[-1][0])):  # type: ignore[union-attr]
                return self.original(*bound.args, **bound.kwargs)
        finally:
            local.current, local.inside, local.names = before

    def sharded(self, args: tuple[Any, ...], kwargs: dict[str, Any], gather: bool) -> Any:
        bound, labels, context = _eager(self.spread, args, kwargs)
        found = _Pass(context)
        with hugging_face.labels(labels, context):
            outputs = torch.compiler.disable(self.run, recursive=False)(found, bound.args, bound.kwargs)
        if found.calls == 0:
            raise RuntimeError(
                "model called neither scaled_dot_product_attention nor kp.attention: its attention saw only this "
                f"rank's tokens; {_SDPA} "
                '(Hugging Face models: attn_implementation="sdpa")'
            )
        return _eager(self.gather, outputs, context) if gather else outputs

    def spread(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[inspect.BoundArguments, torch.Tensor | None, Context]:
        """Return this rank's shard of the arguments, the labels of the full sequence, and the context."""
        bound = self.signature.bind_partial(*args, **kwargs)  # ``defaults`` may add positions
        context = self.parallel.context(self.length(bound))
        self.defaults(bound, context)
        labels = argument_of(bound, "labels")
        self.shard(bound, context)
        return bound, labels, context

    def length(self, bound: inspect.BoundArguments) -> int:
        """Return the length of the full sequence, from the first input with a second dimension."""
        for name, value in named_of(bound):
            if self.parallel.inputs is None or name in self.parallel.inputs:
                for leaf in pytree.tree_leaves(value):
                    if isinstance(leaf, torch.Tensor) and leaf.ndim >= 2:
                        return leaf.shape[1]
        raise ValueError("the model's inputs have no tensor of shape (batch, tokens, ...): pass the whole sequence")

    def defaults(self, bound: inspect.BoundArguments, context: Context) -> None:
        self.without_masks(bound)
        for name, value in named_of(bound):
            if name == "use_cache" and value:
                raise ValueError("use_cache=True: a cache would hold only this rank's tokens; pass use_cache=False")
            if name in ("logits_to_keep", "num_logits_to_keep") and (isinstance(value, torch.Tensor) or value):
                raise ValueError(
                    f"{name}={value}: a rank would keep the last of its own tokens; drop it, and slice the logits"
                )
            if name.startswith("encoder_") and value is not None:
                raise NotImplementedError(
                    f"{name}: cross-attention is not sharded; parallelize a model of self-attention, such as the "
                    "encoder alone"
                )
        if self.parallel.longest is not None and context.length > self.parallel.longest:
            raise NotImplementedError(
                f"{context.length} tokens: the model's rotary embedding changes beyond {self.parallel.longest} with "
                "the longest position, which one rank alone has; use a rope_type other than dynamic and longrope"
            )
        if "use_cache" in self.signature.parameters:
            bound.arguments["use_cache"] = False
        positions = self.parallel.positions
        if positions is None:
            return
        given = argument_of(bound, positions)
        if given is None:
            device = next(
                (x.device for x in pytree.tree_leaves(bound.arguments) if isinstance(x, torch.Tensor)), "cpu"
            )
            # Full positions, as if the caller had passed them: they are sharded with the other inputs.
            set_argument(self.signature, bound, positions, torch.arange(context.length, device=device).unsqueeze(0))
        elif given.ndim == 1 and len(given) == context.length:
            set_argument(self.signature, bound, positions, given.unsqueeze(0))

    def without_masks(self, bound: inspect.BoundArguments) -> None:
        """Drop masks of ones, which tokenizers return; raise an error for any other mask."""
        for name, value in named_of(bound):
            if not name.endswith("attention_mask") or value is None:
                continue
            if isinstance(value, torch.Tensor) and value.ndim == 2 and bool((value == 1).all()):
                set_argument(self.signature, bound, name, None)
                continue
            raise ValueError(
                f"{name}: a parallelized model takes its mask from parallelize; describe it there as "
                f"mask=kp.masks... (padding and packing: kp.masks.documents), and drop {name} from the call"
            )

    def shard(self, bound: inspect.BoundArguments, context: Context) -> None:
        names = self.parallel.inputs

        def own(x: Any) -> Any:
            if isinstance(x, torch.Tensor) and x.ndim >= 2 and x.shape[1] == context.length:
                return context.shard(x)
            return x

        for name, value in named_of(bound):
            if names is None or name in names or name == self.parallel.positions:
                set_argument(self.signature, bound, name, pytree.tree_map(own, value))

    def gather(self, outputs: Any, context: Context) -> Any:
        leaves, spec = pytree.tree_flatten(outputs)
        own = torch.tensor(
            [isinstance(x, torch.Tensor) and x.ndim >= 2 and x.shape[1] == context.tokens for x in leaves],
            dtype=torch.int64,
        )
        if len(set(context.placement.sizes)) > 1:
            # A dimension may by chance be as long as this rank's tokens, but not on every rank.
            others = [r for r in range(context.ranks) if r != context.rank]
            incoming = {r: torch.empty_like(own) for r in others}
            context.control.exchange("the outputs' shapes", dict.fromkeys(others, own), incoming, tag=5).wait()
            for flags in incoming.values():
                own = own * flags
        ranks = context.ranks

        def whole(x: torch.Tensor) -> torch.Tensor:
            if x.requires_grad:
                x = Scaled.apply(x, ranks)  # type: ignore[no-untyped-call]
            return context.unshard(x)

        gathered = [whole(x) if flag else x for x, flag in zip(leaves, own.tolist(), strict=True)]
        return pytree.tree_unflatten(gathered, spec)


def parallelize(
    model: nn.Module,
    group: Any,
    mask: Mask | Callable[[str], Mask],
    *,
    place_for: Mask | None = None,
    gather_output: bool = True,
    positions: str | None = "position_ids",
    inputs: Collection[str] | None = None,
    schedule: Schedule | str = "auto",
    timeout: float = 300.0,
    link: Link | str | None = None,
    check: bool = True,
    verify: bool = True,
) -> nn.Module:
    """Shard the sequences of a transformer across the ranks of a group. Changes the model in place.

    The forward then takes the same full inputs on every rank, shards them, and attends over the tokens of all ranks.
    Everything except attention must process each token on its own, as norms, projections and feed-forwards do.

    Gradients must be *averaged* over the group's ranks, which DDP and FSDP2 do. That holds whether every rank
    computes the loss from gathered outputs, each rank from its own tokens with ``token_mean``, or a Hugging Face
    model from ``labels``. Call it before ``fully_shard`` or DDP.

    Args:
        model: calls ``scaled_dot_product_attention`` for its attention; Hugging Face models with
            ``attn_implementation="sdpa"`` do. Its parameters keep their names, and checkpointing of modules
            (``gradient_checkpointing_enable``, ``torch.utils.checkpoint``) works. ``torch.compile`` works with a
            graph break at each attention.
        group: a process group, or one dimension of a DeviceMesh.
        mask: the mask of the full sequence, instead of the model's: ``is_causal`` of the replaced calls is ignored.
            If layers differ, a function from the name of the attending module to its mask.
        place_for: the mask to place tokens for; required if ``mask`` is a function.
        gather_output: gather outputs of shape (batch, this rank's tokens, ...) on every rank; False to return this
            rank's tokens only.
        positions: the forward's argument for the positions of tokens, of shape (1, tokens); added if a call does not
            pass it. None for a model without positions.
        inputs: the forward's arguments with the sequence in dimension 1. None for all tensors whose dimension 1 is as
            long as the first one's.
        schedule, timeout, link, check: as in ``Context``; one is made for each length.
        verify: on the first call with a set of arguments, compare the sharded model with the unsharded one on the
            first tokens of the input, without gradients, and raise an error that names the first output that differs.
            It finds losses and positions that a model computes from its own rank's tokens only.

    Example:
        >>> import torch, torch.distributed as dist, kernel_pytorch as kp
        >>> class Attention(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.qkv = torch.nn.Linear(32, 96)
        ...
        ...     def forward(self, x):
        ...         q, k, v = self.qkv(x).unflatten(-1, (6, 16)).transpose(1, 2).chunk(3, dim=1)
        ...         out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        ...         return out.transpose(1, 2).flatten(2)
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> causal = kp.masks.causal()
        >>> model = kp.context_parallel.parallelize(Attention(), dist.group.WORLD, causal, positions=None)
        >>> model(torch.randn(1, 100, 32)).shape
        torch.Size([1, 100, 32])
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: expected a torch.nn.Module")
    if isinstance(mask, Mask):
        place_for = mask if place_for is None else place_for
    elif not callable(mask):
        raise TypeError(f"mask={mask!r}: expected a mask of kp.masks, or a function of a module's name")
    elif place_for is None:
        raise ValueError("place_for: needed where mask is a function; pass the mask of most of the layers")
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get("forward"), _Forward):
            raise ValueError(f"model: {name or 'it'} is parallelized already; make a new one")
    signature = inspect.signature(model.forward)
    open_ended = variable_of(signature) is not None
    for name in [*([positions] if positions else []), *(inputs or ())]:
        if name not in signature.parameters and not open_ended:
            argument = "positions" if name == positions else "inputs"
            remedy = (
                "name the one that takes the positions of tokens; None if the model needs none"
                if name == positions
                else f"use some of {', '.join(signature.parameters)}"
            )
            raise ValueError(f"{argument}={name!r}: the model's forward has no such argument; {remedy}")
    process_group, placed = group_of(group), place_for

    def make(length: int) -> Context:
        return Context(process_group, length, placed, schedule=schedule, timeout=timeout, link=link, check=check)

    chosen = None if inputs is None else frozenset(inputs)
    prepared = hugging_face.prepare(model, lambda values, count: token_mean_over(values, process_group, count))
    unsharded = Unsharded(model, mask, placed, prepared) if verify else None
    parallel = _Parallel(mask, make, gather_output, positions, chosen, unsharded)
    parallel.longest = prepared.longest
    for name, module in model.named_modules():
        if module is model:
            module.forward = _Root(parallel, module.forward)
        elif not type(module).__module__.startswith("torch.nn.modules."):
            module.forward = _Forward(parallel, name, module.forward)
    return model
