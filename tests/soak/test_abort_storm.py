"""Half of the requests are cancelled at random, and their slots are used again at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.process import LANES

REQUESTS = 1500
IN_FLIGHT_MIN = 250
WATCH_S = {"tcp": 5}  # for bytes that the kernel still holds


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lane", LANES)
def test_no_byte_lands_in_memory_that_was_given_back(
    lane: str, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    if lane != "default":
        environ["UCX_TLS"] = lane
    command = [sys.executable, "-m", "tests.soak.storm", "--requests", str(REQUESTS)]
    command += ["--watch", str(WATCH_S.get(lane, 1))]
    ran = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    told = json.loads(ran.stdout)
    with capsys.disabled():
        print(f"\nabort storm, {lane}: {json.dumps(told)}")
    assert told["wrong_words"] == told["damaged_marks"] == 0
    assert told["slots_back"] == told["slots"]
    assert told["slots_lent"] == told["internal_errors"] == 0
    assert told["source"]["free"] == told["source"]["slots"]
    assert told["source"]["writes_open"] == told["source"]["internal_errors"] == 0
    assert sum(told["ends"].values()) == REQUESTS
    assert told["ends"].keys() <= {"done", "Cancelled", "TimedOut"}
    # It was a storm: the pool was full, cancels met transfers at work, slots were reused at once.
    assert told["most_in_flight"] >= IN_FLIGHT_MIN
    assert told["least_free"] < told["slots"] * 0.05
    assert told["ends"]["done"] >= REQUESTS * 0.3
    assert told["ends"]["Cancelled"] >= REQUESTS * 0.3
    assert told["source"]["met"].get("queued", 0) > 0
    assert told["reused"] > 0
