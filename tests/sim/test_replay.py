"""Same seed, same run: in another interpreter, under another hash seed, after other seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.sim.simulate import simulate

ROOT = Path(__file__).parents[2]
SEEDS = (3, 11, 17, 24, 30)

PROGRAM = "\n".join(
    (
        "from tests.sim.simulate import simulate",
        f"for seed in {SEEDS}:",
        "    result = simulate(seed)",
        "    print(seed, result.trace, result.story_hash)",
    )
)


def traces(hash_seed: int) -> str:
    """What an interpreter of its own says about the seeds."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return done.stdout


def test_trace_is_the_same_in_every_interpreter() -> None:
    first, second = traces(1), traces(4242)
    assert first == second
    here = [(seed, simulate(seed)) for seed in reversed(SEEDS)]
    lines = [f"{seed} {r.trace} {r.story_hash}\n" for seed, r in reversed(here)]
    assert "".join(lines) == first
    assert len({r.trace for _, r in here}) == len(SEEDS)
