"""Payloads that are cut, changed, of another version or hostile give an error in words, never a crash."""

import struct
import subprocess
import zlib
from dataclasses import replace

import pytest
import torch

from fuzz_payload import fuzz, payloads
from kernel_pytorch.lowering.direct import DirectProgram, PayloadError
from kernel_pytorch.lowering.payload import (
    Buffer,
    BufferKind,
    Cache,
    Op,
    OpCode,
    Parameter,
    Payload,
    SharedConstant,
    Symbol,
    Token,
    Value,
)


def softmax_payload() -> Payload:
    """The smallest payload that does something: softmax of (4, 8)."""
    four, eight, one, zero = range(4)
    constant = [((Token.CONSTANT, n),) for n in (4, 8, 1, 0)]
    shape = {"dims": (four, eight), "strides": (eight, one), "offset": zero}
    return Payload(
        expressions=constant,
        inputs=[Parameter("x", torch.float32, (four, eight))],
        outputs=[Parameter("y", torch.float32, (four, eight))],
        buffers=[Buffer(BufferKind.INPUT, torch.float32), Buffer(BufferKind.OUTPUT, torch.float32)],
        values=[Value(0, **shape), Value(1, **shape)],
        ops=[Op(OpCode.SOFTMAX, (0,), (1,))],
    )


def mended(data: bytes) -> bytes:
    """The payload with a size and a checksum that fit it."""
    rest = struct.pack("<Q", len(data)) + data[24:]
    return data[:12] + struct.pack("<I", zlib.crc32(rest)) + rest


def test_the_good_payload_is_good() -> None:
    x, out = torch.randn(4, 8), torch.empty(4, 8)
    DirectProgram(softmax_payload())([x], [out])
    torch.testing.assert_close(out, x.softmax(-1))


def test_every_cut_is_refused() -> None:
    data = softmax_payload().to_bytes()
    for size in range(len(data)):
        with pytest.raises(PayloadError, match=r"\w"):
            DirectProgram(data[:size])
        if size >= 32:
            with pytest.raises(PayloadError, match=r"\w"):
                DirectProgram(mended(data[:size]))


def test_every_flipped_bit_is_noticed() -> None:
    data = softmax_payload().to_bytes()
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError, match=r"checksum|version|not a payload|cut short"):
            DirectProgram(bytes(changed))


def test_other_versions_and_targets_are_refused() -> None:
    data = softmax_payload().to_bytes()
    with pytest.raises(PayloadError, match="version 1 and this runtime reads 2: lower the model again"):
        DirectProgram(data[:8] + struct.pack("<I", 1) + data[12:])
    with pytest.raises(PayloadError, match="is for target 7"):
        DirectProgram(mended(data[:32] + struct.pack("<I", 7) + data[36:]))


def number(value: int) -> tuple[tuple[Token, int], ...]:
    return ((Token.CONSTANT, value),)


def cache(**changes: object) -> Cache:
    return replace(Cache("cache", torch.float32, 1, 1, 8, 8, ring=9, sinks=0, window=8), **changes)


HOSTILE = {
    "beyond its buffer": {"values": [Value(0, (0, 1), (1, 1), 3), Value(1, (0, 1), (1, 2), 3)]},
    "beyond its buffer, by offset": {"expressions": [number(4), number(8), number(1), number(1)]},
    "negative": {"expressions": [number(4), number(-8), number(1), number(0)]},
    "huge": {"expressions": [number(2**62), number(2**62), number(1), number(0)]},
    "stack too deep": {"expressions": [tuple([(Token.CONSTANT, 1)] * 40), number(8), number(1), number(0)]},
    "empty stack": {"expressions": [((Token.ADD, 0),), number(8), number(1), number(0)]},
    "unknown symbol": {"expressions": [((Token.SYMBOL, 3),), number(8), number(1), number(0)]},
    "divides by zero": {
        "expressions": [
            ((Token.CONSTANT, 4), (Token.CONSTANT, 0), (Token.FLOOR_DIVIDE, 0)),
            *map(number, (8, 1, 0)),
        ]
    },
    "symbol of no input": {"symbols": [Symbol(9, 0, 1, 4)]},
    "symbol of no dimension": {"symbols": [Symbol(0, 5, 1, 4)]},
    "symbol without a range": {"symbols": [Symbol(0, 0, 4, 1)]},
    "arena too large": {"arena_bytes": 2**63},
    "buffer outside the arena": {
        "buffers": [Buffer(BufferKind.INPUT, torch.float32), Buffer(BufferKind.ARENA, torch.float32, 0, 0, 128)]
    },
    "buffer outside the constants": {
        "buffers": [
            Buffer(BufferKind.CONSTANT, torch.float32, 0, 64, 128),
            Buffer(BufferKind.OUTPUT, torch.float32),
        ]
    },
    "writes to its input": {"ops": [Op(OpCode.SOFTMAX, (0,), (0,))]},
    "value that is not there": {"ops": [Op(OpCode.SOFTMAX, (7,), (1,))]},
    "operand left out": {"ops": [Op(OpCode.SOFTMAX, (None,), (1,))]},
    "too few operands": {"ops": [Op(OpCode.ATTENTION, (0, 0), (1,), floats=(1.0,))]},
    "attention of two dimensions": {"ops": [Op(OpCode.ATTENTION, (0, 0, 0, None), (1,), (0, 0), (1.0,))]},
    "attention without a mask": {"ops": [Op(OpCode.ATTENTION, (0, 0, 0, None), (1,), (), (1.0,))]},
    "scale is no number": {"ops": [Op(OpCode.ATTENTION, (0, 0, 0, None), (1,), (0, 0), (float("nan"),))]},
    "eps is negative": {"ops": [Op(OpCode.RMS_NORM, (0, None), (1,), floats=(-1.0,))]},
    "norm with wrong weights": {"ops": [Op(OpCode.RMS_NORM, (0, 0), (1,), floats=(1e-6,))]},
    "unknown reduction": {"ops": [Op(OpCode.REDUCE, (0,), (1,), (9,))]},
    "reduction of another shape": {"ops": [Op(OpCode.REDUCE, (0,), (1,), (0,))]},
    "unknown step": {"ops": [Op(OpCode.POINTWISE, (0,), (1,), (99, 1, 0, 0, 1))]},
    "register that is not there": {"ops": [Op(OpCode.POINTWISE, (0,), (1,), (1, 16, 0, 0, 1))]},
    "immediate that is not there": {"ops": [Op(OpCode.POINTWISE, (0,), (1,), (0, 1, 0, 0, 1))]},
    "output register that is not there": {"ops": [Op(OpCode.POINTWISE, (0,), (1,), (1, 1, 0, 0, -1))]},
    "cache of nothing": {"caches": [cache(ring=0)]},
    "cache shorter than its window": {"caches": [cache(window=9)]},
    "cache too large": {"caches": [cache(batch=1 << 29, heads=1 << 29)]},
    "cache of bfloat16": {"caches": [cache(dtype=torch.bfloat16)]},
    "cache that is not there": {"ops": [Op(OpCode.CACHE_WRITE, (0, 0, 0), (), (0,))]},
    "cache written with another shape": {"caches": [cache()], "ops": [Op(OpCode.CACHE_WRITE, (0, 0, 0), (), (0,))]},
    "attention over a cache of another shape": {
        "caches": [cache()],
        "ops": [Op(OpCode.CACHED_ATTENTION, (0,), (1,), (0,), (1.0,))],
    },
    "shared constant that is not there": {"shared": [SharedConstant("weights", 0, 4096)]},
    "buffer of no shared constant": {
        "buffers": [Buffer(BufferKind.SHARED, torch.float32, 3), Buffer(BufferKind.OUTPUT, torch.float32)]
    },
    "quantized linear of 5 bits": {"ops": [Op(OpCode.QUANTIZED_LINEAR, (0, 0, 0, 0, None), (1,), (5, 32))]},
    "quantized linear with an empty group": {
        "ops": [Op(OpCode.QUANTIZED_LINEAR, (0, 0, 0, 0, None), (1,), (4, 0))]
    },
    "quantized linear without packed weights": {
        "ops": [Op(OpCode.QUANTIZED_LINEAR, (0, 0, 0, 0, None), (1,), (4, 8))]
    },
    "linear without packed weights": {"ops": [Op(OpCode.LINEAR, (0, 0, None, None), (1,))]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_are_refused(name: str) -> None:
    with pytest.raises(PayloadError, match=r"\w+ \w+"):
        DirectProgram(replace(softmax_payload(), **HOSTILE[name]))


MASKS = {
    "cut short": (1,),
    "unknown node": (42, 0),
    "count beyond the code": (2, 9),
    "negative count": (2, -1),
    "operator without operands": (7, 0),
    "two expressions": (0, 0, 0, 0),
    "negative window": (-1, 0, 2, 2),
    "a part of another": (0, 0, 1, 2, 9, 2),
    "dilated by nothing": (0, 3, 0, 12, 3),
    "dilated without end": (2, 2**62, 0, 12, 3),
    "intervals beyond the code": (1, 2**62, 4, 0, 0, 10, 5),
    "intervals before the first key": (1, 1, 1, -1, 2, 10, 5),
    "intervals for other queries": (1, 1, 1, 0, 2, 10, 5),
    "padding for another count of entries": (3, 0, 1, 11, 3),
    "padding on no side": (1, 2, 1, 11, 3),
    "padding inside documents": (1, 0, 1, 11, 3, 1, 1, 4, 5, 3),
    "documents without lengths": (0, 0, 1, 5, 2),
    "documents beyond the code": (0, 0, 1, 2**62, 3, 5, 3),
    "blocks of nothing": (1, 1, 1, 1, 0, 6, 5),
    "blocks too many": (2**31, 2**31, 2**31, 1, 16, 6, 5),
    "blocks out of order": (1, 1, 1, 4, 16, 2, 3, 1, 6, 8),
    "nested too deep": (0, 0) + (0, 0, 7, 0) * 100,
}


@pytest.mark.parametrize("name", MASKS)
def test_hostile_masks_are_refused(name: str) -> None:
    shape = {"dims": (0, 0, 1, 1), "strides": (0, 0, 2, 0), "offset": 3}
    payload = replace(
        softmax_payload(),
        expressions=[number(1), number(4), number(4), number(0)],
        inputs=[Parameter("q", torch.float32, (0, 0, 1, 1))],
        outputs=[Parameter("y", torch.float32, (0, 0, 1, 1))],
        values=[Value(0, **shape), Value(1, **shape)],
        ops=[Op(OpCode.ATTENTION, (0, 0, 0, None), (1,), MASKS[name], (1.0,))],
    )
    with pytest.raises(PayloadError, match="mask"):
        DirectProgram(payload)


def test_wrong_tensors_are_refused_by_name() -> None:
    program = DirectProgram(softmax_payload())
    out = torch.empty(4, 8)
    for wrong, message in (
        (torch.randn(4, 9), "input 'x' has 9 in dimension 1; it must be 8"),
        (torch.randn(4), "input 'x' has 1 dimensions; it must have 2"),
        (torch.randn(4, 8).half(), "input 'x' is float16; it must be float32"),
    ):
        with pytest.raises(PayloadError, match=message):
            program([wrong], [out])
    with pytest.raises(PayloadError, match="output 0 has another shape"):
        program([torch.randn(4, 8)], [torch.empty(8, 4)])
    with pytest.raises(PayloadError, match="2 inputs and 1 outputs were given"):
        program([out, out], [out])
    program([torch.randn(4, 8)], [out])  # and it still works


def test_the_fuzzer_finds_nothing(tmp_path) -> None:
    """A short run; ``make fuzz`` does a million cases."""
    assert len(payloads()) == 4
    try:
        said = fuzz(tmp_path, cases=20_000, programs=2_000, seed=1)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    except subprocess.CalledProcessError as failed:
        pytest.fail(failed.stderr.decode())
    assert "20000 cases" in said
    assert "2000 programs" in said
