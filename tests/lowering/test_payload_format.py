"""The constants and enums of ``payload.py`` and ``masks/code.py`` equal those of ``native/core/format.h``."""

import enum
import re
from pathlib import Path

import pytest

from kernel_pytorch.lowering import payload
from kernel_pytorch.lowering.build import SOURCES
from kernel_pytorch.masks import code as mask_code

OTHER_NAMES = {"MOST_DIMENSIONS": "MaxRank"}
CONSTANTS = {
    name: value for name, value in vars(payload).items() if name.isupper() and isinstance(value, (int, bytes))
}
ENUMS = {
    **{
        name: {member.name: member.value for member in found}
        for name, found in vars(payload).items()
        if isinstance(found, type) and issubclass(found, enum.IntEnum) and found.__module__ == payload.__name__
    },
    "DType": {str(dtype).removeprefix("torch."): value for dtype, value in payload.DTYPES.items()},
    "Target": payload.TARGETS,
    "MaskNode": {
        name: getattr(mask_code, name)
        for name in mask_code.__all__
        if name.isupper() and isinstance(getattr(mask_code, name), int)
    },
}


def plain(name: str) -> str:
    """A name without its language's spelling: ``GELU_TANH`` and ``kGeluTanh`` are both ``gelutanh``."""
    return re.sub(r"^k(?=[A-Z])", "", name).replace("_", "").lower()


def header_constants(header: str) -> dict[str, int | bytes]:
    found: dict[str, int | bytes] = {}
    for name, value in re.findall(r"^constexpr [\w ]+ (k\w+)(?:\[\])? = ([^;]+);", header, re.MULTILINE):
        found[plain(name)] = value[1:-1].encode() if value.startswith('"') else int(value, 0)
    return found


def header_enums(header: str) -> dict[str, dict[str, int]]:
    found = {}
    for name, body in re.findall(r"^enum class (\w+) : \w+ \{([^}]*)\}", header, re.MULTILINE):
        members, following = {}, 0
        for member, value in re.findall(r"(k\w+)(?: = (\w+))?", body):
            members[plain(member)] = int(value, 0) if value else following
            following = members[plain(member)] + 1
        found[name] = members
    return found


HEADER = (SOURCES / "core" / "format.h").read_text()


def test_constants_are_equal() -> None:
    ours = {plain(OTHER_NAMES.get(name, name)): value for name, value in CONSTANTS.items()}
    assert header_constants(HEADER) == ours


def test_the_same_enums_exist() -> None:
    assert set(header_enums(HEADER)) == set(ENUMS)
    assert {"OpCode", "Step", "Token", "BufferKind", "ArgumentKind", "Reduction"} <= set(ENUMS)


@pytest.mark.parametrize("name", ENUMS)
def test_enumerators_are_equal(name: str) -> None:
    theirs = header_enums(HEADER)[name]
    ours = {plain(member): value for member, value in ENUMS[name].items()}
    if "count" in theirs:
        assert theirs.pop("count") == len(ours)
    assert theirs == ours


def test_the_runtime_refuses_the_masks_that_it_does_not_read() -> None:
    source = (SOURCES / "core" / "mask.cpp").read_text()
    refused = re.findall(r"kind != MaskNode::(k\w+)", source)
    names = {value: name for name, value in ENUMS["MaskNode"].items()}
    assert sorted(map(plain, refused)) == sorted(plain(names[kind]) for kind in mask_code.NOT_IN_RUNTIME)


def test_every_op_code_is_registered_once() -> None:
    registry = (SOURCES / "operators" / "registry.cpp").read_text()
    registered = re.findall(r"\{OpCode::(k\w+), \"(\w+)\", make_(\w+)\}", registry)
    assert sorted(plain(code) for code, _, _ in registered) == sorted(plain(code.name) for code in payload.OpCode)
    for code, name, function in registered:
        assert plain(code) == plain(name)
        assert name == function
        assert Path(SOURCES / "operators" / f"{name}.cpp").exists(), "one file for each operator"


@pytest.mark.parametrize(
    ("before", "after"),
    [("kVersion = 2", "kVersion = 3"), ("kTanh,\n  kErf", "kErf,\n  kTanh"), ("kReduce = 6", "kReduce = 16")],
)
def test_a_difference_is_noticed(before: str, after: str) -> None:
    assert before in HEADER
    changed = HEADER.replace(before, after)
    assert (header_constants(changed), header_enums(changed)) != (header_constants(HEADER), header_enums(HEADER))
