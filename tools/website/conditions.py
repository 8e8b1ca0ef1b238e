"""Compare what a sentence says about a measured number with the conditions of its measurement.

A true number in a sentence about another device, phase, sequence length, head dimension or kernel is a false claim.
``contradiction`` finds these. A condition that the sentence does not mention is not checked, and a sentence that
mentions several, such as forward and backward, has to include the measured one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kernel_pytorch.evidence import Benchmark, Measurement
from kernel_pytorch.hardware_abstraction.catalogue import CATALOGUE

__all__ = ["Conditions", "contradiction", "sentence_around"]


@dataclass(frozen=True)
class Conditions:
    """The conditions that a number was measured under: one entry for each measurement that it is chosen from."""

    device: str
    op: str
    cases: tuple[str, ...]
    phases: tuple[str, ...]
    subjects: tuple[str, ...]
    kernels: frozenset[str]
    """Every kernel of the record."""

    @classmethod
    def of(cls, record: Benchmark, rows: Iterable[Measurement]) -> Conditions:
        rows = list(rows)
        kernels = {
            row.subject.partition(":")[2] for row in record.measurements if row.subject.startswith("kernel:")
        }
        return cls(
            f"{record.device.vendor} {record.device.name} {record.device.arch}",
            record.op,
            tuple(row.case for row in rows),
            tuple(row.phase for row in rows),
            tuple(row.subject for row in rows),
            frozenset(kernels),
        )


def _product(name: str) -> str:
    """Return a pattern for a catalogue name in prose: ``rtx4090`` also matches ``RTX 4090``."""
    return r"[ -]?".join(map(re.escape, re.findall(r"[a-z]+|\d+[a-z]*", name)))


_PRODUCTS = "|".join(
    sorted((_product(name.partition("/")[2]) for name in CATALOGUE if not name.startswith("cpu/")), key=len)[::-1]
)
# Includes devices without a record.
_DEVICE = re.compile(
    rf"\b(?:{_PRODUCTS}|NVIDIA|AMD|Intel|Gaudi|Xeon|Apple|Grace|Graviton\d*|T4|V100|GB300|MI300A|"
    r"(?:smart)?phones?|laptops?|tablets?|iPhones?|iPads?|Android|Snapdragon|Raspberry Pi|Jetson|TPUs?|"
    r"microcontrollers?)\b",
    re.IGNORECASE,
)
_DIMENSION = re.compile(r"\bhead[ -]dim(?:ension|\.)?s? (?:of |is )?(\d+)|\bd(\d{2,3})\b", re.IGNORECASE)
_LENGTH = re.compile(
    r"\b(\d[\d,]*)(k|K)?(?:-|\s)(?:tokens?|token-long)\b|\b(a|one|1|two|2|four|4) million tokens\b", re.IGNORECASE
)
_MILLIONS = {"a": 1, "one": 1, "1": 1, "two": 2, "2": 2, "four": 4, "4": 4}


def sentence_around(text: str, place: int) -> str:
    """Return the sentence of a paragraph that contains a position.

    Example:
        >>> sentence_around("On an H200. On a CPU it takes 3 ms, see 2.1. Next.", 20)
        'On a CPU it takes 3 ms, see 2.1.'
    """
    ends = [found.end() for found in re.finditer(r"[.;?!](?=\s|$)", text)]
    start = max((end for end in ends if end <= place), default=0)
    return text[start : min((end for end in ends if end > place), default=len(text))].strip()


def contradiction(sentence: str, measured: Conditions) -> str:
    """Return a contradiction between a sentence and the conditions of its number, or an empty string.

    Example:
        >>> row = Conditions("nvidia NVIDIA H200", "attention", ("causal 4096 d64",), ("forward",), (), frozenset())
        >>> contradiction("On an H100 it takes", row), contradiction("The forward of 4,096 tokens takes", row)
        ("'H100': the record is of nvidia NVIDIA H200", '')
    """
    for check in (_other_device, _other_phase, _other_dimension, _other_length, _other_kernel):
        found = check(sentence, measured)
        if found:
            return found
    return ""


def _other_device(sentence: str, measured: Conditions) -> str:
    said = [found[0] for found in _DEVICE.finditer(sentence)]
    here = re.sub(r"[ -]", "", measured.device.lower())
    right = [name for name in said if re.sub(r"[ -]", "", name.lower()) in here]
    products = [name for name in said if re.search(r"\d", name)]
    if said and (not right or (products and not set(products) & set(right))):
        return f"{(products or said)[0]!r}: the record is of {measured.device}"
    return ""


def _other_phase(sentence: str, measured: Conditions) -> str:
    said = set(re.findall(r"\b(forward|backward)\b", sentence.lower()))
    if said and not any(word in phase for word in said for phase in measured.phases):
        return f"{said.pop()!r}: the record's phase is {measured.phases[0]!r}"
    return ""


def _other_dimension(sentence: str, measured: Conditions) -> str:
    said = {first or second for first, second in _DIMENSION.findall(sentence)}
    right = {found for case in measured.cases for found in re.findall(r"\bd(\d+)\b", case)}
    return (
        f"'head dimension {said.pop()}': the record's is {right.pop()}"
        if said and right and not said & right
        else ""
    )


def _other_length(sentence: str, measured: Conditions) -> str:
    said = set()
    for number, kilo, millions in _LENGTH.findall(sentence):
        if millions:
            said.add(_MILLIONS[millions.lower()] << 20)
        elif number.strip(","):
            said.add(int(number.replace(",", "")) * (1024 if kilo else 1))
    right = {number for case in measured.cases for number in _numbers(case)}
    if said and right and not said & right:
        return f"'{said.pop():,} tokens': the record's case is {measured.cases[0]!r}"
    return ""


def _numbers(case: str) -> set[int]:
    """Return the numbers of a case and its products, such as 4 x 4096."""
    found = {int(number) * (1024 if kilo else 1) for number, kilo in re.findall(r"(\d+)(k\b)?", case)}
    return found | {int(one) * int(other) for one, other in re.findall(r"(\d+) x (\d+)", case)}


def _other_kernel(sentence: str, measured: Conditions) -> str:
    """Return the name of a kernel that the sentence mentions, if the number belongs to another one."""
    if not measured.op.startswith("fp8") and re.search(r"\bin FP8\b|\bFP8 (?:attention|kernel)", sentence, re.I):
        return f"'FP8': the record is of {measured.op}"
    own = [name for name in measured.kernels if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", sentence, re.I)]
    about = " ".join(measured.subjects).lower()
    ours = any(subject.startswith("kernel:") for subject in measured.subjects)
    if ours and own and not any(name.lower() in about for name in own):
        return f"{own[0]!r}: the record's kernel is {measured.subjects[0].partition(':')[2]!r}"
    return ""
