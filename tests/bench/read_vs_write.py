"""READ beside WRITE: the same bytes between the same two pools, in turn, over real NIXL.

    python -m tests.bench.read_vs_write [--lane same-host|tcp] [--repetitions 20]

A WRITE is posted by the source's process, a READ by the target's; both sides' blocks are scattered
alike. Each shape's operations alternate one by one in one run, so load hits both. Printed: median
milliseconds inside the post and until seen done, gigabytes per second (median and best tenth) and
CPU milliseconds of both processes per operation. docs/transports.md holds the figures.
"""

from __future__ import annotations

import argparse

import numpy as np

from tests.truth.shared import MIB
from tests.truth.trial import Trial

SHAPES = ((1, 4096), (1, 256 * 1024), (4096, 16 * 1024), (1024, 64 * 1024), (64, MIB), (8, 8 * MIB))
POOL = 128 * MIB


def main() -> None:
    """Measure every shape on the chosen lanes and print one table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--lane", choices=("same-host", "tcp"), action="append")
    options.add_argument("--repetitions", type=int, default=20)
    chosen = options.parse_args()
    print("| lane | block x count | operation | post ms | done ms | GB/s | best GB/s | CPU ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for lane in chosen.lane or ("same-host", "tcp"):
        with Trial(lane, "WRITE", evidence=True, settle_s=0, size=POOL) as trial:
            for count, block in SHAPES:
                _compare(trial, lane, count, block, chosen.repetitions)


def _compare(trial: Trial, lane: str, count: int, block: int, repetitions: int) -> None:
    slots = POOL // block
    mine, theirs = (np.random.default_rng(s).permutation(slots)[:count] * block for s in (1, 2))
    sides = {"WRITE": (trial.source, trial.target), "READ": (trial.target, trial.source)}
    for operation, (peer, other) in sides.items():
        _, address = trial.metadata[other.name]
        peer.call("prepare", operation, other.name, address, mine, theirs, block)
        peer.call("repeat", 2)
    taken: dict[str, list[tuple[float, float]]] = {operation: [] for operation in sides}
    cpu = dict.fromkeys(sides, 0.0)
    for _ in range(repetitions):
        for operation, (peer, _other) in sides.items():
            before = _cpu(trial)
            taken[operation] += peer.call("repeat", 5 if count > 1 else 20)
            cpu[operation] += _cpu(trial) - before
    for operation, times in taken.items():
        _print(
            f"{lane} | {block // 1024} KiB x {count} | {operation}",
            times,
            cpu[operation],
            count * block,
        )


def _cpu(trial: Trial) -> float:
    return float(sum(peer.call("cpu_s") for peer in (trial.source, trial.target)))


def _print(label: str, times: list[tuple[float, float]], cpu_s: float, size: int) -> None:
    post, done = np.median(times, axis=0) * 1e3
    best = np.percentile([total for _, total in times], 10)
    print(
        f"| {label} | {post:.3g} | {done:.3g} | {size / done / 1e6:.2f} | {size / best / 1e9:.2f} "
        f"| {cpu_s / len(times) * 1e3:.3g} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
