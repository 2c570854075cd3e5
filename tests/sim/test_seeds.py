"""The 200 seeds: no invariant breaks, and every fault and every transition really happens.

`python -m tests.sim --seeds 1 --start S` repeats a seed that fails here.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.__main__ import print_counts
from tests.sim.coverage import rows
from tests.sim.options import Fault
from tests.sim.simulate import simulate

SEEDS = 200
ENGINES_MIN, TRANSFERS_MIN = 2, 20


@pytest.mark.timeout(400)  # about 30 s alone on a core
def test_seeds_pass_and_cover_every_fault_and_row() -> None:
    faults: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    failures = []
    for seed in range(SEEDS):
        result = simulate(seed)
        assert result.engines >= ENGINES_MIN
        assert result.transfers >= TRANSFERS_MIN
        faults += result.faults
        seen += result.rows
        if result.failure:
            failures.append(str(result))
    print_counts("fault", faults, [str(fault) for fault in Fault])
    print_counts("row", seen, rows())
    assert not failures, "\n\n".join(failures)
    assert [str(fault) for fault in Fault if not faults[str(fault)]] == []
    assert [row for row in rows() if not seen[row]] == []
