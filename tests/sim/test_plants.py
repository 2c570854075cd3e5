"""Planted bugs are seen: each patch of product code fails a seed that passes without it."""

from __future__ import annotations

import pytest

from tests.sim.plants import PLANTS
from tests.sim.simulate import simulate

SEEDS = 200  # those of test_seeds.py, which shows that they pass unpatched
SEEN_AS = {
    "release_before_evidence": ("I1", "I6"),
    "post_after_permit": ("I1",),
    "drop_drained": ("I6", "liveness"),
    "done_before_settled": ("I3", "I6"),
    "doubt_taken_for_failure": ("I1", "I2", "I6"),
    "error_taken_for_evidence": ("I1", "I6"),
}


@pytest.mark.timeout(200)  # caught within seconds
@pytest.mark.parametrize("name", PLANTS)
def test_plant_is_caught(name: str) -> None:
    for seed in range(SEEDS):
        planted = simulate(seed, PLANTS[name]())
        if planted.failure:
            break
    else:
        pytest.fail(f"{name} was not seen in {SEEDS} seeds")
    print(f"{name}: seed {seed}: {planted.failure}")
    assert planted.failure.startswith(SEEN_AS[name]), planted.failure
    clean = simulate(seed)
    assert not clean.failure, str(clean)
