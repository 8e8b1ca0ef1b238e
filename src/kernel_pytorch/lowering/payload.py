"""The payload: the binary format of a delegated program. This file is its specification and its writer; C++ reads it.

All numbers are little-endian. A payload is a header, a body and constants::

    header   8 bytes "KPTPLOAD" | u32 version | u32 crc | u64 bytes of the whole payload | u64 zero
    body     u32 target (1: CPU)
             u32 counts of symbols, expressions, inputs, outputs, shared constants, caches, buffers, values, ops
             u64 bytes of the arena | u64 offset and u64 bytes of the constants
             then the tables, one after the other, with the items that the classes below describe
    constants  aligned to 64 bytes, as every buffer in them and in the arena is

Constants that several methods of a program use are stored once, outside the payload, in the program's named data.
Caches are memory that persists between runs: payloads of one program share the caches of the same name.

The crc is zlib's CRC-32 of everything after itself. A payload contains neither machine code nor addresses. A reader
must refuse unknown versions, and every index, length, view or size that is out of bounds.

Sizes, strides and offsets are *expressions* of *symbols*, so that one payload works for every length that the model
was lowered for. A symbol is a dimension of an input, with its minimum and maximum.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "VERSION",
    "ArgumentKind",
    "BufferKind",
    "Cache",
    "OpCode",
    "Op",
    "Parameter",
    "Payload",
    "Reduction",
    "SharedConstant",
    "Step",
    "Symbol",
    "Token",
    "Value",
    "Buffer",
    "aligned",
    "with_constants",
]

# tests/lowering/test_payload_format.py compares these constants and enums with native/core/format.h.
MAGIC = b"KPTPLOAD"
VERSION = 2
TARGETS = {"cpu": 1}
NONE = 0xFFFFFFFF
ALIGNMENT = 64
HEADER_BYTES = 32
_COUNTS = struct.Struct("<10I")
"""The target, then the number of entries in each table."""
_PLACES = struct.Struct("<3Q")
"""Bytes of the arena; offset of the constants; bytes of the constants."""
MOST_DIMENSIONS = 8
REGISTERS = 16
PANEL = 32

DTYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.bool: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.int8: 6,
}


class Token(enum.IntEnum):
    """One token of a postfix expression: (u32 token, i64 value); only the first two kinds use the value."""

    CONSTANT = 0
    SYMBOL = 1
    ADD = 2
    MULTIPLY = 3
    FLOOR_DIVIDE = 4
    MODULO = 5


class ArgumentKind(enum.IntEnum):
    """Kind of an input or output of the payload."""

    TENSOR = 0
    INTEGER = 1


class BufferKind(enum.IntEnum):
    """Storage class of a buffer."""

    INPUT = 0
    OUTPUT = 1
    ARENA = 2
    CONSTANT = 3
    SHARED = 4


class OpCode(enum.IntEnum):
    """The operators with their operands; ``-`` marks optional operands."""

    ATTENTION = 1
    """(q, k, v, -bias) -> out, all (batch, heads, length, dim), and where a second output is there, the log-sum-exp
    of each row in float32, (batch, heads, length); ints: the mask's code; floats: scale."""
    RMS_NORM = 2
    """(x, -weight) -> y along the last dimension; floats: eps."""
    LAYER_NORM = 3
    """(x, -weight, -bias) -> y along the last dimension; floats: eps."""
    SOFTMAX = 4
    """x -> y along the last dimension."""
    POINTWISE = 5
    """Any operands of one shape; ints: steps of (Step, destination, a, b), then each output's register; floats:
    the immediates. Input n starts in register n; there are 16 registers."""
    REDUCE = 6
    """x -> y, whose last dimension is 1; ints: the Reduction."""
    LINEAR = 7
    """(x, weights, -bias, -scales) -> y in float32; weights (ceil(outputs / 32), inputs, 32): 32 outputs a panel,
    zeros after the last one; in float32, float16 or bfloat16, or in int8 with a scale for each output."""
    CACHE_WRITE = 8
    """(k, v, position) -> nothing: new rows, (batch, heads, tokens, dim), into a cache; position is an input of one
    int64 number; ints: the cache. Each cache is written by one op, before it is read."""
    CACHED_ATTENTION = 9
    """q -> out over a cache, (batch, heads, tokens, dim), for the tokens that were written last; ints: the cache;
    floats: scale."""
    QUANTIZED_LINEAR = 10
    """(x, weights, scales, sums, -bias) -> y in float32; ints: bits (4 or 8), inputs of a group. Each row of x is
    quantized to 8 bits, asymmetric, as torchao's dynamic per-token quantization does; weights are symmetric integers
    with a scale for each group of inputs. ``packing.py`` packs the weights."""
    ATTENTION_BACKWARD = 11
    """(q, k, v, out, lse, dout, -dlse) -> dq, dk, dv, as in ``ATTENTION``; dk and dv are contiguous, in float32, and
    (parts x batch, heads, keys, dim): the caller sums over parts, which run at the same time; ints: the mask's code;
    floats: scale."""


class Reduction(enum.IntEnum):
    SUM = 0
    MEAN = 1
    MAXIMUM = 2


class Step(enum.IntEnum):
    """One step of a pointwise op."""

    IMMEDIATE = 0
    COPY = 1
    ADD = 2
    SUBTRACT = 3
    MULTIPLY = 4
    DIVIDE = 5
    MAXIMUM = 6
    MINIMUM = 7
    POWER = 8
    NEGATE = 9
    ABSOLUTE = 10
    EXP = 11
    LOG = 12
    SQRT = 13
    RSQRT = 14
    RECIPROCAL = 15
    SIGMOID = 16
    TANH = 17
    ERF = 18
    SILU = 19
    GELU = 20
    GELU_TANH = 21
    RELU = 22
    SIN = 23
    COS = 24


Expression = tuple[tuple[Token, int], ...]


@dataclass(frozen=True)
class Symbol:
    """u32 input | u32 dimension (0xffffffff: the input is a number itself) | i64 least | i64 largest."""

    input: int
    dim: int
    low: int
    high: int


@dataclass(frozen=True)
class Parameter:
    """u8 ArgumentKind | u8 dtype | u16 rank | u32 bytes of the name | u32 dims... | name."""

    name: str
    dtype: torch.dtype
    dims: tuple[int, ...]
    integer: bool = False


@dataclass(frozen=True)
class SharedConstant:
    """u32 bytes of the name | u32 crc of the data | u64 bytes of the data | name."""

    name: str
    crc: int
    size: int


@dataclass(frozen=True)
class Cache:
    """u8 dtype | u8 and u16 zero | u32 bytes of the name | u64 batch, heads, dim, value_dim, ring, sinks, window |
    name.

    There are ``sinks + ring`` slots. ``kernel_pytorch/kv_cache.py`` defines the slot of a position and the positions
    that it attends to.
    """

    name: str
    dtype: torch.dtype
    batch: int
    heads: int
    dim: int
    value_dim: int
    ring: int
    sinks: int
    window: int

    @property
    def nbytes(self) -> int:
        slots = self.batch * self.heads * (self.ring + self.sinks)
        scales = 2 * torch.float32.itemsize if self.dtype == torch.int8 else 0
        return slots * ((self.dim + self.value_dim) * self.dtype.itemsize + scales)


@dataclass(frozen=True)
class Buffer:
    """u8 kind | u8 dtype | u16 zero | u32 index of the input, output or shared one | u64 offset | u64 bytes."""

    kind: BufferKind
    dtype: torch.dtype
    index: int = 0
    offset: int = 0
    size: int = 0


@dataclass(frozen=True)
class Value:
    """A strided view: u32 buffer | u32 rank | u32 offset | u32 dims... | u32 strides..., in elements."""

    buffer: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Op:
    """u32 code | u32 counts of inputs, outputs, ints, floats | u32 values... | i64 ints... | f64 floats..."""

    code: OpCode
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class Payload:
    """Everything in a payload, by table; ``to_bytes`` writes it."""

    target: str = "cpu"
    symbols: list[Symbol] = field(default_factory=list)
    expressions: list[Expression] = field(default_factory=list)
    inputs: list[Parameter] = field(default_factory=list)
    outputs: list[Parameter] = field(default_factory=list)
    shared: list[SharedConstant] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    arena_bytes: int = 0
    constants: bytearray = field(default_factory=bytearray)

    def to_bytes(self) -> bytes:
        """Return the payload as stored in a ``.pte``.

        Example:
            >>> len(Payload().to_bytes())
            96
        """
        tables = b"".join(
            [
                *(struct.pack("<IIqq", s.input, s.dim, s.low, s.high) for s in self.symbols),
                *(_expression(expression) for expression in self.expressions),
                *(_parameter(parameter) for parameter in (*self.inputs, *self.outputs)),
                *(_shared(constant) for constant in self.shared),
                *(_cache(cache) for cache in self.caches),
                *(
                    struct.pack("<BBHIQQ", b.kind, DTYPES[b.dtype], 0, b.index, b.offset, b.size)
                    for b in self.buffers
                ),
                *(_value(value) for value in self.values),
                *(_op(op) for op in self.ops),
            ]
        )
        counts = (
            *(self.symbols, self.expressions, self.inputs, self.outputs, self.shared, self.caches),
            *(self.buffers, self.values, self.ops),
        )
        head = _COUNTS.pack(TARGETS[self.target], *(len(table) for table in counts))
        constants_at = HEADER_BYTES + _COUNTS.size + _PLACES.size + len(tables)
        if self.constants:
            constants_at = aligned(constants_at)
        places = _PLACES.pack(self.arena_bytes, constants_at, len(self.constants))
        body = head + places + tables
        body += bytes(constants_at - HEADER_BYTES - len(body)) + bytes(self.constants)
        rest = struct.pack("<QQ", HEADER_BYTES + len(body), 0) + body
        return MAGIC + struct.pack("<II", VERSION, zlib.crc32(rest)) + rest


def with_constants(data: bytes, constants: Sequence[int]) -> bytes:
    """Return a payload without symbols with other values for its first expressions, which must be constants.

    Example:
        >>> made = [Payload(expressions=[((Token.CONSTANT, n),)]).to_bytes() for n in (1, 7)]
        >>> with_constants(made[0], [7]) == made[1]
        True
    """
    changed = bytearray(data)
    at = HEADER_BYTES + _COUNTS.size + _PLACES.size
    # Every second word of 64 bits: an expression is (u32 1, u32 Token.CONSTANT, i64 value).
    np.frombuffer(changed, "<i8", 2 * len(constants), at)[1::2] = constants
    struct.pack_into("<I", changed, len(MAGIC) + 4, zlib.crc32(memoryview(changed)[len(MAGIC) + 8 :]))
    return bytes(changed)


def _indices(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def _expression(expression: Expression) -> bytes:
    return struct.pack("<I", len(expression)) + b"".join(struct.pack("<Iq", *token) for token in expression)


def _parameter(parameter: Parameter) -> bytes:
    name = parameter.name.encode()
    kind = ArgumentKind.INTEGER if parameter.integer else ArgumentKind.TENSOR
    head = struct.pack("<BBHI", kind, DTYPES[parameter.dtype], len(parameter.dims), len(name))
    return head + _indices(parameter.dims) + name


def _shared(constant: SharedConstant) -> bytes:
    name = constant.name.encode()
    return struct.pack("<IIQ", len(name), constant.crc, constant.size) + name


def _cache(cache: Cache) -> bytes:
    name = cache.name.encode()
    sizes = (cache.batch, cache.heads, cache.dim, cache.value_dim, cache.ring, cache.sinks, cache.window)
    return struct.pack("<BBHI7Q", DTYPES[cache.dtype], 0, 0, len(name), *sizes) + name


def _value(value: Value) -> bytes:
    return struct.pack("<III", value.buffer, len(value.dims), value.offset) + _indices(value.dims + value.strides)


def _op(op: Op) -> bytes:
    values = [NONE if value is None else value for value in (*op.inputs, *op.outputs)]
    return b"".join(
        [
            struct.pack("<5I", op.code, len(op.inputs), len(op.outputs), len(op.ints), len(op.floats)),
            _indices(values),
            struct.pack(f"<{len(op.ints)}q", *op.ints),
            struct.pack(f"<{len(op.floats)}d", *op.floats),
        ]
    )
