"""Emit the payload of a delegated graph: free views, fused pointwise chains, and memory planning of buffers.

``Emitter`` walks the nodes of one delegated graph. A node's result is a ``Strided`` view, or, if its only user can
fuse it, a ``Lazy`` chain of pointwise steps that is not materialised yet.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sympy
import torch
from executorch.exir._serialize._cord import FileBackedData
from torch.fx import Node

from kernel_pytorch._compat.symbolic import FloorDiv, Mod
from kernel_pytorch.lowering import payload as tables
from kernel_pytorch.lowering.constants import Constants
from kernel_pytorch.lowering.payload import BufferKind, OpCode, Parameter, Payload, Step, Symbol, Token
from kernel_pytorch.lowering.spool import Spool, content_name
from kernel_pytorch.lowering.strided import (
    Size,
    Storage,
    Strided,
    as_size,
    broadcast,
    contiguous_strides,
    equal,
    product,
    reshaped,
)

__all__ = ["Emitter", "Lazy", "Outside"]

T = TypeVar("T")

_MOST_LEAVES = 6  # operands of one pointwise op; the other registers hold intermediate results


@dataclass(frozen=True, eq=False)
class Lazy:
    """A pointwise expression: a step of two or fewer operands, each a Lazy, a Strided or a number."""

    step: Step
    operands: tuple[Lazy | Strided | float, ...]
    dims: tuple[Size, ...]
    dtype: torch.dtype

    def leaves(self) -> int:
        return sum(
            operand.leaves() if isinstance(operand, Lazy) else int(isinstance(operand, Strided))
            for operand in self.operands
        )

    def height(self) -> int:
        return 1 + max((operand.height() for operand in self.operands if isinstance(operand, Lazy)), default=0)


@dataclass(frozen=True)
class Outside:
    """Constants that are stored outside the payload, by name."""

    least: int
    """Constants below this size, in bytes, stay in the payload."""
    data: dict[str, bytes | FileBackedData] = field(default_factory=dict)


@dataclass(frozen=True)
class _Input:
    name: str
    dtype: torch.dtype
    dims: tuple[Size, ...]
    size: Size | None = None
    """For an integer input: its symbolic expression."""


@dataclass(frozen=True)
class _Emitted:
    code: OpCode
    inputs: tuple[Strided | None, ...]
    outputs: tuple[Strided, ...]
    ints: tuple[int, ...]
    floats: tuple[float, ...]


class Emitter:
    """Collects ops over strided views; ``finish`` plans the memory and builds the payload."""

    def __init__(self, constants: Constants, ranges: dict[Any, Any], outside: Outside | None = None) -> None:
        self.constants = constants
        self._outside = outside
        self._spool = Spool()
        self._ranges = ranges
        self._ops: list[_Emitted] = []
        self._inputs: list[_Input] = []
        self._results: dict[Node, Any] = {}
        self._payload = Payload()
        self._expressions: dict[Any, int] = {}
        self._symbols: dict[sympy.Symbol, list[tuple[Token, int]]] = {}
        self._constant_storage: dict[Any, tuple[Storage, torch.Tensor]] = {}
        self._made: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    # Nodes

    def add_input(self, node: Node) -> None:
        """Add a placeholder that is not a constant: a tensor, or a size that is computed outside the delegate."""
        value = node.meta["val"]
        index = len(self._inputs)
        if isinstance(value, torch.Tensor):
            dims = tuple(as_size(size) for size in value.shape)
            self._inputs.append(_Input(node.name, value.dtype, dims))
            storage = Storage(value.dtype, product(dims), input=index)
            self.set(node, Strided(storage, dims, contiguous_strides(dims)))
        else:
            self._inputs.append(_Input(node.name, torch.int64, (), as_size(value)))
            self.set(node, value)

    def set(self, node: Node, result: Any) -> None:
        self._results[node] = result

    def result(self, node: Any) -> Any:
        """Return a node's result: a view, a lazy expression, a tuple of these, or a constant's view."""
        if not isinstance(node, Node):
            return node
        if node in self._results:
            return self._results[node]
        known = self.constants.of(node)
        if isinstance(known, torch.Tensor):
            return self.constant(known)
        if known is not None:
            return known
        return node.meta["val"]  # a size that is computed from other sizes

    def view(self, node: Any) -> Strided:
        """Return a node's result as a view; materialise it if it is lazy."""
        found = self.result(node)
        if isinstance(found, Lazy):
            found = self.materialise(found, node)
            self._results[node] = found
        if not isinstance(found, Strided):
            raise TypeError(f"{node} is no tensor")
        return found

    def constant(self, tensor: torch.Tensor) -> Strided:
        dims = tuple(tensor.shape)
        key = _identity(tensor)
        if key not in self._constant_storage:
            own = tensor.detach().cpu().contiguous()
            # Keep the tensor alive: its address is in the key and must not be reused.
            self._constant_storage[key] = (Storage(own.dtype, own.numel(), constant=own), tensor)
        return Strided(self._constant_storage[key][0], dims, contiguous_strides(dims))

    def once(self, make: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function of constants and numbers, computed once per set of arguments."""
        key = (make, *(_identity(one) if isinstance(one, torch.Tensor) else one for one in arguments))
        if key not in self._made:
            # Keep the arguments alive: their addresses are in the key and must not be reused.
            made = make(*arguments)
            self._made[key] = (made if self._outside is None else self._spool.keep(made), arguments)
        return self._made[key][0]  # type: ignore[no-any-return]

    def cache(self, cache: tables.Cache) -> int:
        """Add a KV cache and return its index; each cache is used once."""
        self._payload.caches.append(cache)
        return len(self._payload.caches) - 1

    # Memory

    def new(self, dims: Sequence[Size], dtype: torch.dtype, node: Node | None = None) -> Strided:
        """Allocate memory for a result, with its dimensions in the order in which its user reads them."""
        order = _order_of_users(node, len(dims)) if node is not None else list(range(len(dims)))
        inner = [dims[axis] for axis in order]
        stored = Strided(Storage(dtype, product(dims)), tuple(inner), contiguous_strides(inner))
        return stored.permute([order.index(axis) for axis in range(len(dims))])

    def emit(
        self,
        code: OpCode,
        inputs: Sequence[Strided | None],
        outputs: Sequence[Strided],
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
    ) -> None:
        self._ops.append(_Emitted(code, tuple(inputs), tuple(outputs), tuple(ints), tuple(floats)))

    def cast(self, source: Strided, dtype: torch.dtype) -> Strided:
        """Return a contiguous copy in another dtype."""
        into = self.new(source.dims, dtype)
        self.copy(source, into)
        return into

    def contiguous(self, source: Strided) -> Strided:
        if source.contiguous:
            return source
        return self.cast(source, source.dtype)

    def reshape(self, source: Strided, dims: Sequence[Size]) -> Strided:
        found = reshaped(source, dims)
        if found is None:
            found = reshaped(self.contiguous(source), dims)
        assert found is not None
        return found

    def copy(self, source: Lazy | Strided, into: Strided) -> None:
        if isinstance(source, Strided):
            source = Lazy(Step.COPY, (source,), into.dims, into.dtype)
        self._emit_pointwise(source, into)

    def pointwise(self, node: Node, step: Step, *operands: Any) -> None:
        """Set a node's result to one pointwise step; it stays lazy if the node has only one user."""
        self._settle(node, self.lazy(node, step, *operands))

    def lazy(self, node: Node, step: Step, *operands: Any) -> Lazy:
        """Return a lazy step in the shape of a node; operands are nodes, numbers and other lazy steps."""
        value = node.meta["val"]
        dims = tuple(as_size(size) for size in value.shape)
        ready: list[Lazy | Strided | float] = []
        for operand in operands:
            found: Any = self._number(operand)
            if found is None:
                found = self.result(operand)
                if isinstance(found, Lazy) and not _same(found.dims, dims):
                    found = self.view(operand)
            if isinstance(found, Strided) and not _same(found.dims, dims):
                found = broadcast(found, dims)
            ready.append(found)
        return Lazy(step, tuple(ready), dims, value.dtype)

    def _settle(self, node: Node, lazy: Lazy) -> None:
        # Too many operands, or too deep for the registers: materialise the operands first.
        if lazy.leaves() > _MOST_LEAVES or lazy.height() > 6:
            operands = tuple(self.materialise(o) if isinstance(o, Lazy) else o for o in lazy.operands)
            lazy = Lazy(lazy.step, operands, lazy.dims, lazy.dtype)
        self._results[node] = lazy if len(node.users) == 1 else self.materialise(lazy, node)

    def _number(self, operand: Any) -> float | None:
        if isinstance(operand, (int, float)):
            return float(operand)
        known = self.constants.of(operand) if isinstance(operand, Node) else None
        if isinstance(known, torch.Tensor) and known.numel() == 1 and not known.is_complex():
            return float(known)
        return None

    def materialise(self, lazy: Lazy, node: Node | None = None) -> Strided:
        into = self.new(lazy.dims, lazy.dtype, node)
        self._emit_pointwise(lazy, into)
        return into

    def _emit_pointwise(self, lazy: Lazy, into: Strided) -> None:
        leaves: list[Strided] = []
        numbers: list[float] = []
        steps: list[tuple[int, int, int, int]] = []

        def collect(one: Lazy) -> None:
            for operand in one.operands:
                if isinstance(operand, Lazy):
                    collect(operand)
                elif isinstance(operand, Strided) and operand not in leaves:
                    leaves.append(operand)

        collect(lazy)
        free = list(range(tables.REGISTERS - 1, len(leaves) - 1, -1))

        def compute(one: Lazy) -> int:
            held: list[int] = []
            sources: list[int] = []
            for operand in one.operands:
                if isinstance(operand, Strided):
                    sources.append(leaves.index(operand))
                    continue
                if isinstance(operand, Lazy):
                    register = compute(operand)
                else:
                    register = free.pop()
                    if operand not in numbers:
                        numbers.append(operand)
                    steps.append((Step.IMMEDIATE, register, numbers.index(operand), 0))
                held.append(register)
                sources.append(register)
            free.extend(held)
            target = free.pop()
            steps.append((one.step, target, sources[0], sources[1] if len(sources) > 1 else sources[0]))
            return target

        register = compute(lazy)
        ints = [*(int(number) for step in steps for number in step), register]
        self.emit(OpCode.POINTWISE, [broadcast(leaf, into.dims) for leaf in leaves], [into], ints, numbers)

    # The payload

    def finish(self, outputs: Sequence[tuple[str, Strided]]) -> Payload:
        """Bind the outputs, plan the arena, and return the payload."""
        for index, (name, view) in enumerate(outputs):
            storage = view.storage
            whole = view.contiguous and equal(view.offset, 0) and equal(product(view.dims), storage.numel)
            if not (storage.is_arena and whole):
                copied = self.new(view.dims, view.dtype)
                self.copy(view, copied)
                storage = copied.storage
            storage.output = index
            self._payload.outputs.append(Parameter(name, view.dtype, self._sizes(view.dims)))
        for given in self._inputs:
            dims = self._sizes(given.dims)
            self._payload.inputs.append(Parameter(given.name, given.dtype, dims, integer=given.size is not None))
        places = self._plan()
        buffers: dict[int, int] = {}
        for op in self._ops:
            values = [None if v is None else self._value(v, places, buffers) for v in (*op.inputs, *op.outputs)]
            count = len(op.inputs)
            written = tuple(v for v in values[count:] if v is not None)
            self._payload.ops.append(tables.Op(op.code, tuple(values[:count]), written, op.ints, op.floats))
        return self._payload

    def _plan(self) -> dict[int, tuple[int, int]]:
        """Return offset and bytes of each arena buffer, at the lowest offset free during its lifetime."""
        alive: dict[int, tuple[int, int, Storage]] = {}
        for at, op in enumerate(self._ops):
            for view in (*op.inputs, *op.outputs):
                if view is not None and view.storage.is_arena:
                    first = alive.get(id(view.storage), (at, at, view.storage))[0]
                    alive[id(view.storage)] = (first, at, view.storage)
        placed: list[tuple[int, int, int, int]] = []  # first op, last op, offset, end
        places: dict[int, tuple[int, int]] = {}
        sizes = {key: self._most(storage.numel) * storage.dtype.itemsize for key, (_, _, storage) in alive.items()}
        for key in sorted(alive, key=lambda key: (-sizes[key], alive[key][0])):
            first, last, _ = alive[key]
            offset, size = 0, tables.aligned(max(sizes[key], 1))
            for _, _, begin, end in sorted(
                (p for p in placed if p[0] <= last and first <= p[1]), key=lambda p: p[2]
            ):
                if offset + size <= begin:
                    break
                offset = max(offset, end)
            placed.append((first, last, offset, offset + size))
            places[key] = (offset, sizes[key])
            self._payload.arena_bytes = max(self._payload.arena_bytes, offset + size)
        return places

    def _most(self, size: Size) -> int:
        if isinstance(size, int):
            return size
        highest = {symbol: self._bounds(symbol)[1] for symbol in size.free_symbols}
        return int(size.subs(highest))

    def _bounds(self, symbol: sympy.Symbol) -> tuple[int, int]:
        found = self._ranges.get(symbol)
        high = getattr(found, "upper", None)
        if found is None or high is None or not sympy.sympify(high).is_number or high > 1 << 31:
            raise ValueError(f"dimension {symbol} has no upper bound: give torch.export.Dim a max")
        return max(0, int(found.lower)), int(high)

    def _value(self, view: Strided, places: dict[int, tuple[int, int]], buffers: dict[int, int]) -> int:
        storage = view.storage
        if id(storage) not in buffers:
            buffers[id(storage)] = len(self._payload.buffers)
            self._payload.buffers.append(self._buffer(storage, places))
        value = tables.Value(
            buffers[id(storage)], self._sizes(view.dims), self._sizes(view.strides), self._size(view.offset)
        )
        self._payload.values.append(value)
        return len(self._payload.values) - 1

    def _buffer(self, storage: Storage, places: dict[int, tuple[int, int]]) -> tables.Buffer:
        if storage.input is not None:
            return tables.Buffer(BufferKind.INPUT, storage.dtype, index=storage.input)
        if storage.output is not None:
            return tables.Buffer(BufferKind.OUTPUT, storage.dtype, index=storage.output)
        if storage.constant is not None:
            if self._outside is not None and storage.constant.nbytes >= self._outside.least:
                return self._shared_buffer(storage.constant, self._outside)
            data = storage.constant.flatten().view(torch.uint8).numpy().tobytes()
            constants = self._payload.constants
            constants.extend(bytes(tables.aligned(len(constants)) - len(constants)))
            offset = len(constants)
            constants.extend(data)
            return tables.Buffer(BufferKind.CONSTANT, storage.dtype, offset=offset, size=len(data))
        offset, size = places[id(storage)]
        return tables.Buffer(BufferKind.ARENA, storage.dtype, offset=offset, size=size)

    def _shared_buffer(self, constant: torch.Tensor, outside: Outside) -> tables.Buffer:
        data: bytes | FileBackedData
        spooled = self._spool.found(constant)
        if spooled is not None:
            name, crc, data = spooled.name, spooled.crc, spooled.data
        else:
            data = constant.flatten().view(torch.uint8).numpy().tobytes()
            name, crc = content_name(hashlib.sha256(data).digest()), zlib.crc32(data)
        outside.data[name] = data
        self._payload.shared.append(tables.SharedConstant(name, crc, len(data)))
        index = len(self._payload.shared) - 1
        return tables.Buffer(BufferKind.SHARED, constant.dtype, index=index, size=len(data))

    def _sizes(self, sizes: Sequence[Size]) -> tuple[int, ...]:
        return tuple(self._size(size) for size in sizes)

    def _size(self, size: Size) -> int:
        expression = size if isinstance(size, int) else sympy.expand(size)
        if expression not in self._expressions:
            tokens = tuple(self._tokens(expression))
            self._expressions[expression] = len(self._payload.expressions)
            self._payload.expressions.append(tokens)
        return self._expressions[expression]

    def _tokens(self, size: Any) -> list[tuple[Token, int]]:
        if isinstance(size, int) or size.is_Integer:
            return [(Token.CONSTANT, int(size))]
        if isinstance(size, sympy.Symbol):
            return list(self._symbol(size))
        joins = {sympy.Add: Token.ADD, sympy.Mul: Token.MULTIPLY, FloorDiv: Token.FLOOR_DIVIDE, Mod: Token.MODULO}
        if isinstance(size, sympy.Pow) and size.exp.is_Integer and size.exp > 0:
            parts, join = [size.base] * int(size.exp), Token.MULTIPLY
        elif size.func in joins:
            parts, join = list(size.args), joins[size.func]
        else:
            raise ValueError(f"size {size} is no sum, product, quotient or remainder of dimensions")
        tokens = self._tokens(parts[0])
        for part in parts[1:]:
            tokens += [*self._tokens(part), (join, 0)]
        return tokens

    def _symbol(self, symbol: sympy.Symbol) -> list[tuple[Token, int]]:
        if symbol not in self._symbols:
            low, high = self._bounds(symbol)
            sizes = [
                (index, axis, size)
                for index, given in enumerate(self._inputs)
                for axis, size in [(tables.NONE, given.size), *enumerate(given.dims)]
                if size is not None
            ]
            for index, axis, size in sizes:
                if size == symbol:
                    self._symbols[symbol] = [self._read(Symbol(index, axis, low, high))]
                    break
            else:
                self._symbols[symbol] = self._solved(symbol, sizes)
        return self._symbols[symbol]

    def _solved(self, symbol: sympy.Symbol, sizes: Sequence[tuple[int, int, Size]]) -> list[tuple[Token, int]]:
        """Return the expression of a symbol that is not an input dimension, from one ``factor * symbol + rest``.

        Delegates of mixture-of-experts models need this: their rows are (token, expert) pairs.
        """
        low, high = self._bounds(symbol)
        for index, axis, size in sizes:
            if isinstance(size, int) or size.free_symbols != {symbol}:
                continue
            whole = sympy.expand(size)
            factor, rest = whole.coeff(symbol, 1), whole.coeff(symbol, 0)
            if factor.is_Integer and rest.is_Integer and factor > 0 and whole == factor * symbol + rest:
                lowest, highest = int(factor * low + rest), int(factor * high + rest)
                return [
                    self._read(Symbol(index, axis, lowest, highest)),
                    (Token.CONSTANT, -int(rest)),
                    (Token.ADD, 0),
                    (Token.CONSTANT, int(factor)),
                    (Token.FLOOR_DIVIDE, 0),
                ]
        raise ValueError(
            f"dimension {symbol} cannot be computed from the sizes of the delegate's inputs: "
            f"{', '.join(str(size) for *_, size in sizes)}; lower the model with fixed shapes, or leave operators to "
            "other backends with PartitionerOptions"
        )

    def _read(self, symbol: Symbol) -> tuple[Token, int]:
        self._payload.symbols.append(symbol)
        return Token.SYMBOL, len(self._payload.symbols) - 1


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return (*place, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _same(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def _order_of_users(node: Node, rank: int) -> list[int]:
    """Return the axes in the order of the permutations that follow a node, as long as each node has one user."""
    order = list(range(rank))
    while len(node.users) == 1:
        (user,) = node.users
        name = str(user.target)
        if "permute_copy" in name:
            order = [order[axis % rank] for axis in _args(user)[1]]
        elif "transpose_copy" in name:
            first, second = (axis % rank for axis in _args(user)[1:3])
            order[first], order[second] = order[second], order[first]
        elif "clone" not in name:
            break
        node = user
    return order
