"""Inline our operators in an exported graph: replace each by its kernel's Triton launches and torch operators.

A kernel's own ``forward`` is traced with fake tensors of the call's shapes, so the package launches the same kernels
as an eager call. Tensors derived from a mask, such as the tiles to visit, become constants of the graph. The first
kernel that can be traced is used, in the order of an eager call. If none can be traced, attention becomes PyTorch's
own with the mask as a tensor, and any other op its definition in torch operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from kernel_pytorch._compat.packages import (
    caught_launches,
    example_sizes,
    launched_kernel,
    symbolic_copies,
    traced,
)
from kernel_pytorch._compat.structures import disable_modes
from kernel_pytorch.hardware_abstraction.device import Device
from kernel_pytorch.hardware_abstraction.dispatch import function_of
from kernel_pytorch.hardware_abstraction.op import Kernel, Op, registered_ops
from kernel_pytorch.hardware_abstraction.records import nearest_run, ordered, recorded_runs
from kernel_pytorch.hardware_abstraction.registry import backend
from kernel_pytorch.hardware_abstraction.selection import Policy, fitting
from kernel_pytorch.masks import Mask
from kernel_pytorch.masks.layout import Layout, Walk
from kernel_pytorch.masks.relative import relative_intervals
from kernel_pytorch.ops.attention.definition import lse_dtype, result_dtype

__all__ = ["PackagedCall", "definition_of", "inline_kernels"]

_MOST_NODES = 2000
"""Maximum nodes per call: a kernel in torch operators that unrolls many tiles would take minutes to compile."""
_STAGES = {"nvidia": 3, "amd": 2, "intel": 2}  # Triton's defaults, for launches without explicit options
_TORCHS_OWN = ("cudnn", "flash")  # native kernels that are operators of torch; other libraries' need Python


@dataclass(frozen=True)
class PackagedCall:
    """The replacement of one call of our operators."""

    op: str
    kernel: str
    """The kernel's name, ``"scaled_dot_product_attention"`` for PyTorch's own, or ``"definition"`` for the op's."""
    launches: tuple[str, ...]
    """Names of the launched Triton functions."""
    passed_over: tuple[tuple[str, str], ...] = ()
    """Kernels that an eager call would prefer, each with the reason for not using it."""

    def __str__(self) -> str:
        launched = f" (Triton: {', '.join(self.launches)})" if self.launches else ""
        instead = "".join(f"; not {kernel}: {reason}" for kernel, reason in self.passed_over)
        return f"{self.op}: {self.kernel}{launched}{instead}"


class _RefusedError(Exception):
    """Raised if a kernel cannot be packaged, with the reason."""


class _FixedLayout(Layout):
    """A layout whose tensors are built outside of tracing and not cached: fake tensors must not reach other calls."""

    def intervals(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        with disable_modes():
            first, last = super().intervals()
        return first.to(device), last.to(device)

    def walk(self, queries: int, keys: int, *, by_key: bool = False, device: torch.device | str = "cpu") -> Walk:
        with disable_modes():
            found = super().walk(queries, keys, by_key=by_key)
        return found if str(device) == "cpu" else Walk(*(tensor.to(device) for tensor in found.tensors()))

    def keep(self, key: Hashable, make: Callable[[Layout], Any]) -> Any:
        with disable_modes():
            return make(self)


class _FixedMask(Mask):
    """A mask for tracing: builds tensors on a device; with dynamic lengths, reports what holds for all of them."""

    _device: torch.device

    def simplified(self, q_len: int, kv_len: int) -> Mask:
        if _numbers(q_len, kv_len):
            return super().simplified(q_len, kv_len)
        if not (self.is_full or self.is_causal):
            raise _RefusedError("which mask it serves depends on the lengths, which are dynamic")
        return self

    def layout(self, q_len: int, kv_len: int) -> Layout:
        if not _numbers(q_len, kv_len):
            raise _RefusedError("works out tiles for fixed lengths, and the lengths are dynamic")
        with disable_modes():
            known = super().layout(q_len, kv_len)
            return _FixedLayout(known.node, q_len, kv_len, known.first, known.last, known.slots, known.tables)

    def dense(self, q_len: int, kv_len: int) -> torch.Tensor:
        if _numbers(q_len, kv_len):
            with disable_modes():
                return Mask.dense(self, q_len, kv_len)
        intervals = relative_intervals(self.node)
        if intervals is None:
            raise ValueError(
                f"the mask {self} is for fixed lengths, and those of this call are dynamic: lower without "
                "dynamic_shapes, or compose it of causal, windows and sinks"
            )
        position = torch.arange(q_len, device=self._device)[:, None] + (kv_len - q_len)
        key = torch.arange(kv_len, device=self._device)[None, :]
        allowed = torch.zeros((q_len, kv_len), dtype=torch.bool, device=self._device)
        for one in intervals:
            from_first = (key >= one.first) & (key >= position + one.first_offset)
            allowed = allowed | (from_first & (key < one.last) & (key < position + one.last_offset))
        return allowed[None, None]


def _numbers(*lengths: object) -> bool:
    return all(isinstance(length, int) for length in lengths)


def inline_kernels(module: GraphModule, device: Device) -> tuple[PackagedCall, ...]:
    """Replace every call of our operators in an exported graph in place, and return the replacements."""
    ours = {getattr(torch.ops.kernel_pytorch, op.name).default: op for op in registered_ops()}
    calls = [
        _inlined(module, node, ours[node.target], device)
        for node in list(module.graph.nodes)
        if node.op == "call_function" and node.target in ours
    ]
    # A Triton launch mutates its arguments, which torch does not treat as a side effect.
    module.graph.eliminate_dead_code(lambda node: node.is_impure() or launched_kernel(node) is not None)
    module.graph.lint()
    module.recompile()
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    left = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"}
    left = {name for name in left if name.startswith("kernel_pytorch")}
    if left:
        raise ValueError(
            f"{', '.join(sorted(left))} runs in Python alone, or inside torch.autocast, and cannot be packaged: "
            "leave caches out of the model and cast it with .to(dtype), or lower it with runtime='executorch'"
        )
    return tuple(calls)


def _inlined(module: GraphModule, node: Node, op: Op, device: Device) -> PackagedCall:
    *given, policy = node.args
    arguments = [_value(module, op, name, value) for name, value in zip(op.argument_names, given, strict=True)]
    used = {user.args[1] for user in node.users if user.users} if len(op.outputs) > 1 else {0}
    if used <= {0}:
        without = op.without_gradients
        arguments = [without.get(name, value) for name, value in zip(op.argument_names, arguments, strict=True)]
    tensors = [place for place, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
    mode = arguments[tensors[0]].fake_mode
    ways = [
        (kernel.name, _forward_of(kernel, device)) for kernel in _candidates(op, arguments, device, str(policy))
    ]
    if op.name == "attention" and used <= {0}:
        ways.append(("scaled_dot_product_attention", _dense_attention))
    passed_over: list[tuple[str, str]] = []
    for name, run in (*ways, ("definition", definition_of(op))):
        try:
            graph = _trace(run, arguments, tensors, mode)
        except Exception as error:  # a kernel that does not support tracing may raise anything
            passed_over.append((name, _reason(error)))
            continue
        break
    else:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in passed_over)
        raise ValueError(f"{op.name} cannot be packaged for {device.name}:\n{reasons}")
    if device.present:
        _move_constants(graph)
    kernels_launched = filter(None, map(launched_kernel, graph.graph.nodes))
    launches = tuple(dict.fromkeys(kernel.fn.__name__ for kernel in kernels_launched))
    _splice(module, node, graph, [given[place] for place in tensors], single=len(op.outputs) == 1)
    return PackagedCall(op.name, name, launches, tuple(passed_over))


def _value(module: GraphModule, op: Op, name: str, value: Any) -> Any:
    """Return an argument in the form that kernels take: a fake tensor, a number, or the mask of a constant code."""
    if name not in op.codecs:
        return value.meta["val"] if isinstance(value, Node) else value
    code = _constant(module, value)
    if code is None:
        raise ValueError(
            f"{op.name}: the {name} is an input of the model, and a package needs to know it: make it in forward"
        )
    decoded = op.codecs[name].decode(code)
    mask = _FixedMask(decoded.code, decoded.node)
    mask._device = next(
        found.device
        for found in (node.meta.get("val") for node in module.graph.nodes)
        if isinstance(found, torch.Tensor)
    )
    return mask


def _constant(module: GraphModule, node: Any) -> torch.Tensor | None:
    """Return the value of a node that depends on no input; None for other nodes."""
    if not isinstance(node, Node):
        return node if isinstance(node, torch.Tensor) else None
    if node.op == "get_attr":
        found = operator.attrgetter(str(node.target))(module)
        return found if isinstance(found, torch.Tensor) else None
    if node.op != "call_function":
        return None
    known = {source: _constant(module, source) for source in node.all_input_nodes}
    if not known or any(value is None for value in known.values()):
        return None
    found = node.target(*map_arg(node.args, known.get), **map_arg(node.kwargs, known.get))  # type: ignore[operator]
    return found if isinstance(found, torch.Tensor) else None


def _candidates(op: Op, arguments: list[Any], device: Device, policy: str) -> tuple[Kernel, ...]:
    """Return the kernels that support the call, in the order of an eager call."""
    sizes: dict[str, int] = {}
    plain = [
        torch.empty_strided(
            example_sizes(value.shape, sizes),
            example_sizes(value.stride(), sizes),
            dtype=value.dtype,
            device="meta",
        )
        if isinstance(value, torch.Tensor)
        else value
        for value in arguments
    ]
    call = function_of(op).call("forward", tuple(plain))
    fits, _ = fitting(call, device, Policy.decode(policy))
    return ordered(fits, nearest_run(recorded_runs(backend(device.backend).evidence), call, device, fits))


def _forward_of(kernel: Kernel, device: Device) -> Callable[..., Any]:
    def forward(*arguments: Any) -> Any:
        if kernel.language == "native" and kernel.name not in _TORCHS_OWN:
            raise _RefusedError("runs outside of torch, through Python")
        if kernel.language != "triton":
            return kernel.function("forward")(device, *arguments)
        with caught_launches(_STAGES[device.backend]):
            return kernel.function("forward")(device, *arguments)

    return forward


def _dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float, wanted: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute PyTorch's attention with a dense mask; raise an error if a query may attend to no key."""
    dense = mask.dense(q.shape[2], k.shape[2])
    if _numbers(q.shape[2], k.shape[2]):
        with disable_modes():
            met = bool(dense.any(dim=-1).all())
    else:  # every query attends to itself if queries and keys are the same tokens
        own = [one for one in relative_intervals(mask.node) or () if one.first_offset <= 0 < one.last_offset]
        met = q.shape[2] == k.shape[2] and any(one.first == 0 and one.last >= 1 << 30 for one in own)
    if not met:
        raise _RefusedError("gives NaN for queries that attend to nothing, which the mask has or may have")
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, dense.to(q.device), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.to(result_dtype(q.dtype, wanted)).contiguous(), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


def definition_of(op: Op) -> Callable[..., Any]:
    """Return the op's definition in torch operators; it computes 16-bit tensors in float32, as all kernels do."""

    def written_out(*arguments: Any) -> Any:
        outputs = op.reference(*(_float32(value) for value in arguments))
        wanted = op.fake(*arguments)
        return tuple(output.to(like.dtype) for output, like in zip(outputs, wanted, strict=True))

    return written_out


def _float32(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


def _trace(function: Callable[..., Any], arguments: list[Any], tensors: list[int], mode: Any) -> GraphModule:
    def run(*given: torch.Tensor) -> Any:
        filled = list(arguments)
        for place, tensor in zip(tensors, given, strict=True):
            filled[place] = tensor
        return tuple(function(*filled))

    inputs = [arguments[place] for place in tensors]
    if not all(_numbers(*tensor.shape) for tensor in inputs):
        copies, trial, decisions = symbolic_copies(inputs)
        traced(run, copies, trial)
        if decisions():
            raise _RefusedError(f"is right for the example's sizes alone ({decisions()[0]}), and sizes are dynamic")
    graph = traced(run, inputs, mode)
    size = len(graph.graph.nodes)
    if size > _MOST_NODES:
        raise _RefusedError(f"is {size} torch operators at these lengths, more than {_MOST_NODES}")
    return graph


def _reason(error: Exception) -> str:
    if isinstance(error, _RefusedError):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"cannot be traced ({type(error).__name__}: {first})"


def _move_constants(graph: GraphModule) -> None:
    """Replace copies of constants to the device by buffers, so that they are not repeated in every call."""
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten._to_copy.default and node.args[0].op == "get_attr":
            value = getattr(graph, node.args[0].target)
            name = f"{node.args[0].target}_{node.name}"
            graph.register_buffer(name, node.target(value, **node.kwargs), persistent=False)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(name), propagate_meta=True)
            graph.graph.erase_node(node)


def _constant_name(module: GraphModule, value: torch.Tensor) -> str:
    """Return the name of the buffer of a constant; equal constants, as of layers with one mask, share a buffer."""
    held = {name: own for name, own in module.named_buffers() if name.startswith("kernel_constant_")}
    for name, own in held.items():
        like = (own.shape, own.dtype, own.device) == (value.shape, value.dtype, value.device)
        if like and torch.equal(own, value):
            return name
    name = f"kernel_constant_{len(held)}"
    module.register_buffer(name, value, persistent=False)
    return name


def _splice(module: GraphModule, node: Node, graph: GraphModule, sources: list[Any], *, single: bool) -> None:
    """Put a traced graph in the place of a node."""
    there: dict[Node, Any] = {}
    results: Any = ()
    waiting = iter(sources)
    with module.graph.inserting_before(node):
        for inner in graph.graph.nodes:
            if inner.op == "placeholder":
                there[inner] = next(waiting)
            elif inner.op == "output":
                results = [there[result] for result in inner.args[0]]
            elif inner.op == "get_attr":
                there[inner] = module.graph.get_attr(_constant_name(module, getattr(graph, inner.target)))
                there[inner].meta = dict(inner.meta)
            else:
                there[inner] = module.graph.node_copy(inner, there.__getitem__)
    if single:
        node.replace_all_uses_with(results[0])
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)
