"""Time the example program and ExecuTorch's portable kernels, after checking its results.

``python -m acme_backend.measure`` prints the times; ``--record`` writes them to a record, which the pages then show.
A record needs a commit without local changes, so that anybody can repeat it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from executorch.exir import to_edge_transform_and_lower
from torch.export import export

import kernel_pytorch as kp
from acme_backend import BACKEND
from acme_backend.example import model
from kernel_pytorch.benchmarking import record
from kernel_pytorch.evidence import Measurement, Quantiles, clean_commit, write_record
from kernel_pytorch.hardware_abstraction.timing import quantiles, sample_seconds

FEWEST_DECIBELS = 60.0


def measure(seconds: float) -> list[Measurement]:
    """Time the program with Acme's delegate, and the same model with portable kernels."""
    layers, inputs = model()
    program = kp.lower(layers, inputs, backend="acme")
    for difference in program.compare():
        if difference.snr < FEWEST_DECIBELS:
            raise SystemExit(f"the numbers are wrong, nothing is timed: {difference}")
    portable = kp.load(bytes(to_edge_transform_and_lower(export(layers, inputs)).to_executorch().buffer))
    subjects = {"kernel:delegate": program.load(), "baseline:portable": portable}
    rows = []
    for subject, call in subjects.items():
        samples = sample_seconds(lambda call=call: call(*inputs), kp.device("cpu"), seconds)
        times = Quantiles(*quantiles(samples))
        rows.append(Measurement("example", "forward", "float32", subject, times, len(samples), 0, 0))
        print(f"{subject:18} {times.median * 1e6:10.1f} us, median of {len(samples)}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the result as evidence")
    parser.add_argument("--seconds", type=float, default=0.5, help="time to sample each subject for")
    options = parser.parse_args()
    commit = clean_commit(Path(__file__).parents[2]) if options.record else ""
    rows = measure(options.seconds)
    if options.record:
        # Until the delegate calls your hardware, this machine's CPU runs the program, and the record names it.
        host = kp.device("cpu")
        device = replace(host, name=f"{host.name} (host)", backend="acme")
        found = record(
            "lowering",
            device,
            (),
            rows,
            command="python -m acme_backend.measure --record",
            commit=commit,
            parts=("lowering/",),
        )
        path = BACKEND.evidence / "lowering.host.json"
        write_record(found, path)
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
