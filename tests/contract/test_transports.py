"""One contract for every transport, lane and loop. About 25 s, mostly loading NIXL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from .checks import CHECKS
from .ends import LANES, Lane
from .run import LoopName, run_checks

if TYPE_CHECKING:
    from pathlib import Path

_results: dict[tuple[Lane, LoopName], dict[str, str]] = {}


def run_in_process(lane: Lane, loop: LoopName, out: Path) -> dict[str, str]:
    """Run a NIXL lane's checks where nothing has loaded UCX yet."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    if lane == "nixl-tcp":
        environ["UCX_TLS"] = "tcp"
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.run", lane, loop, str(out)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, str] = json.loads(out.read_text())
    return results


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", list(CHECKS))
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("lane", LANES)
def test_contract(lane: Lane, loop: LoopName, name: str, tmp_path: Path) -> None:
    if (lane, loop) not in _results:
        nixl = lane.startswith("nixl")
        _results[lane, loop] = (
            run_in_process(lane, loop, tmp_path / "out") if nixl else run_checks(lane, loop)
        )
    failure = _results[lane, loop][name]
    assert not failure, failure
