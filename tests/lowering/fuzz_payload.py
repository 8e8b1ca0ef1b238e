"""Fuzz the C++ runtime under AddressSanitizer: ``python tests/lowering/fuzz_payload.py --cases 9999``."""

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import kernel_pytorch as kp
from kernel_pytorch.lowering.backend import build_payload
from kernel_pytorch.lowering.build import SOURCES, _run, _tool, executorch_root
from kernel_pytorch.lowering.constants import Constants
from kernel_pytorch.lowering.emitter import Emitter
from kernel_pytorch.lowering.packing import pack_quantized_weights
from kernel_pytorch.lowering.payload import OpCode
from kernel_pytorch.lowering.strided import Storage, Strided, contiguous_strides

RECORD = Path(__file__).parents[2] / "benchmarks" / "evidence" / "fuzz_payload.txt"


class Cached(torch.nn.Module):
    """Caches of every format, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        options = {"window": 3, "sinks": 2, "longest": 4}
        kinds = (torch.float32, torch.float16, torch.int8)
        self.caches = torch.nn.ModuleList(kp.KVCache(2, 8, dtype=kind, **options) for kind in kinds)
        self.linear = torch.nn.Linear(8, 160)

    def forward(self, q: torch.Tensor, k: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        for cache in self.caches:
            q = cache(q, k, k, position)
        return self.linear(q)


def tokens(count: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(1, 4, count, 8), torch.randn(1, 2, count, 8), torch.tensor([0])


class _Everything(torch.nn.Module):
    """A small model that uses every op, a bias, constants, views and two symbols' worth of shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        table = torch.eye(2, dtype=torch.bool)
        table[1, 0] = True
        self.masks = [
            kp.masks.causal() & (kp.masks.window(3) | kp.masks.sinks(1)),
            kp.masks.documents([5, 0, 15], kp.masks.causal()) | kp.masks.prefix(3),
            kp.masks.blocks(table, block=16) & kp.masks.causal(),
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(self.norm(x)).view(1, 20, 2, 4).transpose(1, 2)
        for mask in self.masks:
            heads = kp.attention(heads, heads[:, :1], heads[:, 1:], mask)
        y = heads.transpose(1, 2).reshape(1, 20, 8)
        y = kp.rms_norm(torch.nn.functional.gelu(y) * torch.sigmoid(x))
        return torch.cat([torch.softmax(y, 1), y.mean(-1, keepdim=True)], dim=-1)


def quantized_payload() -> bytes:
    """Linears of 4 and 8 bits, which no rule emits yet."""
    emitter = Emitter(Constants.__new__(Constants), {})
    node = torch.fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(3, 32)
    emitter.add_input(node)
    made = emitter.result(node)
    for bits, groups in ((4, 2), (8, 1)):
        weight = torch.randint(-8, 8, (32, 32), dtype=torch.int8)
        packed = pack_quantized_weights(weight, torch.rand(32, groups), bits=bits)
        constants = [emitter.constant(tensor) for tensor in (packed.weights, packed.scales, packed.sums)]
        into = Strided(Storage(torch.float32, 3 * 32), (3, 32), contiguous_strides((3, 32)))
        ints = (packed.bits, packed.group)
        emitter.emit(OpCode.QUANTIZED_LINEAR, [made, *constants, None], [into], ints, ())
        made = into
    return emitter.finish([("y", made)]).to_bytes()


def payloads() -> list[bytes]:
    """Seeds: models that use every op, one whose length is a symbol, one with caches, and quantized linears."""
    from executorch.exir import to_edge

    from kernel_pytorch.lowering.rewrite import rewritten

    made = [quantized_payload()]
    length = torch.export.Dim("length", min=2, max=24)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    class Dynamic(torch.nn.Module):
        def forward(self, q: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return sdpa(q, q, q * 2, attn_mask=bias) + torch.softmax(q.transpose(2, 3), -1).transpose(2, 3)

    for model, inputs, shapes in (
        (Cached(), tokens(4), None),
        (_Everything(), (torch.randn(1, 20, 8),), None),
        (
            Dynamic(),
            (torch.randn(1, 2, 6, 4), torch.ones(6, 6).tril().bool()),
            ({2: length}, {0: length, 1: length}),
        ),
    ):
        with torch.no_grad():
            exported = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes)
        edge = to_edge(rewritten(exported)).exported_program()
        made.append(build_payload(edge).to_bytes())
    return made


def build_fuzzers(folder: Path) -> Path:
    cmake, ninja = _tool("cmake"), _tool("ninja")
    configure = [cmake, "-S", str(SOURCES), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    _run([*configure, "-DKERNEL_PYTORCH_FUZZ=ON", f"-DCMAKE_PREFIX_PATH={executorch_root()}"])
    _run([cmake, "--build", str(folder), "--parallel", "2"])
    return folder / "fuzz"


def fuzz(folder: Path, cases: int, programs: int, seed: int) -> str:
    """Run so many damaged payloads and whole programs; returns what the fuzzers say, raises where one stopped."""
    files = []
    for number, payload in enumerate(payloads()):
        path = folder / f"{number}.payload"
        path.write_bytes(payload)
        files.append(str(path))
    kp.lower(Cached().eval(), {"prefill": tokens(4), "decode": tokens(1)}).save(folder / "chat.pte")
    built, told = build_fuzzers(folder / "build"), ""
    for name, count, seeds in (("fuzz", cases, files), ("fuzz_pte", programs, ["chat.pte"])):
        command = [str(built / f"kernel_pytorch_{name}"), str(count), str(seed), *seeds]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise AssertionError(f"{name} stopped; the case is {folder}/crash.*:\n{done.stderr[-6000:]}")
        told += done.stdout
    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--programs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/evidence")
    options = parser.parse_args()
    told = fuzz(Path(tempfile.mkdtemp(prefix="fuzz-")), options.cases, options.programs, options.seed)
    sys.stdout.write(told)
    if options.write:
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.rglob("*.*")))).hexdigest()[
            :16
        ]
        RECORD.write_text(f"{told}seed {options.seed}, AddressSanitizer and UBSan, C++ sources {digest}\n")
