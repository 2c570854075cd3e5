"""The truth table: which event and which evidence stop late bytes on which lane of real NIXL.

`docs/transports.md` says how to read the rows and holds the table of a full run.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.truth.peer import NodeDied
from tests.truth.rows import ATTEMPTS_MAX, DISCONNECT, ROWS, Row
from tests.truth.shared import ENDED
from tests.truth.trial import BLOCK, REUSED, SOURCE, Lane, Trial, Void

if TYPE_CHECKING:
    from tests.truth.conftest import Table

pytestmark = [pytest.mark.slow, pytest.mark.truth, pytest.mark.timeout(480)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(row: Row, table: Table) -> None:
    if row.network and table.no_network:
        pytest.skip(f"network namespaces are not possible here: {table.no_network}")
    result = table.result(row)
    outcome = result.with_evidence.outcome
    assert outcome.state in row.states, outcome
    if row.lane == "same-host":
        # Else these rows would tell of another lane, as where cma is not permitted.
        assert outcome.phase == "in the post", (
            f"not the lane that copies inside the post: {outcome}"
        )
    if outcome.notes.get("missing"):
        # Whatever was reported of the broken operation, even DONE: the endpoint is lost with it.
        assert outcome.notes["next"] == DISCONNECT, outcome
    if row.foreign is None:
        # Never a quiet cancel: it crashed, let bytes through, or the operation ended by itself.
        ended = outcome.state in ("DONE", DISCONNECT)
        assert outcome.notes.get("died") or outcome.foreign or ended, outcome
        return
    assert (outcome.foreign > 0) == row.foreign, outcome
    if result.control is not None:
        assert result.control.outcome.foreign > 0, f"nothing to prove: {result.control}"


@pytest.mark.parametrize("lane", ["tcp", "same-host"])
def test_done_means_in_place(lane: Lane) -> None:
    """A write that the target's kernel has, and its process has not read, is not DONE."""
    with Trial(lane, "WRITE", evidence=True, settle_s=0, size=4 * BLOCK) as trial:
        trial.target.stop()
        trial.start()
        time.sleep(1)
        if lane == "tcp":
            assert trial.state == "PROC"  # posted, accepted by the kernel, and not done
        if trial.phase != ENDED:
            trial.target.resume()
            trial.wait_end()
        assert trial.state == "DONE"
        assert trial.target.pool.foreign(SOURCE) == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_failed_endpoint_reads_its_source_no_more(waits: bool) -> None:
    """A source's own blocks are free once its endpoint has failed, and not a moment before."""
    ends = [_reused_before_the_target_goes_on(waits=waits) for _ in range(2)]
    assert [reused == 0 for reused in ends] == [waits, waits], ends


def _reused_before_the_target_goes_on(*, waits: bool) -> int:
    """How many bytes of a source's next owner reach a target that was stopped meanwhile."""
    told: list[str] = []
    for _ in range(ATTEMPTS_MAX):
        try:
            with Trial("tcp", "WRITE", evidence=True, settle_s=0) as trial:
                trial.begin()
                trial.target.stop()
                trial.event()
                if waits:
                    trial.wait_end()
                    if trial.state != DISCONNECT:
                        raise Void(f"its endpoint did not fail: {trial.state}")
                trial.source.pool.bytes[:] = REUSED
                trial.target.resume()
                time.sleep(3)
                return int((trial.target.pool.bytes == REUSED).sum())
        except (Void, NodeDied) as reason:
            told.append(str(reason))
    raise AssertionError(f"no trial counted: {told}")
