"""Exit codes of programs that carried something: their own, whatever NIXL and UCX do at exit."""

from __future__ import annotations

import pytest

from tests.e2e.pair import Pair, fragmented
from tests.e2e.process import LANES, Process


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("lane", LANES)
def test_sys_exit_3_is_3_after_a_transfer(lane: str, closed: bool) -> None:
    prefill, decode = Process(lane), Process(lane)
    try:
        pair = Pair(prefill, decode)
        pair.open()
        pair.receive("r", fragmented(1, 16))
        pair.send("r", fragmented(2, 16))
        assert [outcome["end"] for outcome in pair.outcomes("r")] == ["done", "done"]
        if closed:
            pair.close()
        assert (prefill.exit(3), decode.exit(3)) == (3, 3)
    finally:
        prefill.kill()
        decode.kill()
