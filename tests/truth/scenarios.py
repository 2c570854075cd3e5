"""What is done to a pair in mid-operation: one function for each event of the table.

With evidence (`trial.evidence`), a scenario waits for what the row claims to be proof, then gives
the target's memory away; without, it gives the memory away at once. Two rules: the two ways differ
in nothing else; and what happens between event and settling is deterministic. Where received
bytes matter, the target is stopped first (`_hold`), so that they wait in its kernel as they would
behind a progress thread that is late.
"""

from __future__ import annotations

import time

from tests.truth.peer import NodeDied
from tests.truth.shared import ENDED, MIB
from tests.truth.trial import BLOCK, REUSED, SOURCE, USER_TIMEOUT_S, Outcome, Trial, Void

_PAST_TIMEOUTS_S = USER_TIMEOUT_S * 2
_LARGE_BLOCK = 1 * MIB
_HOLE_AT, _HOLE_SIZE = 192 * MIB, 64 * 1024
_NEAR_HOLE_AT = 1 * MIB


def _hold(trial: Trial) -> None:
    """Stop the target, and let the bytes that are on their way reach its kernel."""
    trial.target.stop()
    time.sleep(0.2)


def _in_post(trial: Trial) -> bool:
    """Whether the operation moves only inside the target's own call: then holding ends it."""
    return trial.lane == "same-host" and trial.operation == "READ"


def source_killed(trial: Trial) -> Outcome:
    """The source process is killed and reaped."""
    trial.begin()
    if not trial.evidence and trial.lane == "tcp":
        _hold(trial)
    trial.event()
    if not trial.evidence and trial.lane == "same-host":
        trial.refill()  # too early: the source still lives
        return trial.settle()
    trial.source.kill()
    if not trial.evidence:
        trial.refill()
        trial.target.resume()
        return trial.settle()
    if trial.operation == "READ":
        trial.wait_end()
    elif trial.lane == "tcp":
        trial.notes["closed_after_s"] = trial.target.call("wait_closed", trial.source_ends)
    trial.expect_short()
    trial.refill()
    return trial.settle()


def source_stopped(trial: Trial) -> Outcome:
    """The source process is stopped for longer than every time-out, then continued."""
    # A READ sends one request per piece, at once. Many small ones fill the stopped source's receive
    # buffer, which the reader's kernel counts as a time-out: another event than this one.
    trial.begin(BLOCK if trial.operation == "WRITE" else _LARGE_BLOCK)
    trial.source.stop()
    trial.event()
    if _in_post(trial):
        if trial.evidence:
            trial.wait_end()  # the copy needs nothing of the stopped source
        trial.refill()
        time.sleep(_PAST_TIMEOUTS_S)
        trial.source.resume()
        return trial.settle()
    time.sleep(_PAST_TIMEOUTS_S)
    trial.notes["meanwhile"] = trial.state
    if trial.phase == ENDED:
        raise Void(f"{trial.state} while the source was stopped")
    if trial.evidence:
        trial.source.resume()
        trial.wait_end()
        trial.refill()
    else:
        trial.refill()
        trial.source.resume()
    return trial.settle()


def target_stopped(trial: Trial) -> Outcome:
    """The target is stopped until the source's endpoint gives it up, then continued."""
    trial.begin()
    trial.target.stop()
    trial.event()
    trial.wait_end()
    if trial.evidence:
        trial.target.resume()
        trial.notes["closed_after_s"] = trial.target.call("wait_closed", trial.source_ends)
        trial.refill()
    else:
        trial.refill()
        trial.target.resume()
    return trial.settle()


def network_cut(trial: Trial) -> Outcome:
    """The path is cut: until the time-out has fired (evidence), or only for a second."""
    assert trial.network is not None
    trial.begin()
    trial.network.cut()
    trial.event()
    if trial.evidence:
        trial.wait_end(60)
        trial.notes["sockets_left"] = trial.target.call("count_sockets", trial.source_ends)
    else:
        time.sleep(1)
        trial.notes["meanwhile"] = trial.state
    trial.refill()
    trial.network.heal()
    return trial.settle()


def target_destroys(trial: Trial) -> Outcome:
    """The target destroys its agent and sees none of its sockets left.

    A writing source is stopped before. One that is read over tcp runs where the agent really
    goes: continued after that, it aborts, and a dead source would prove nothing.
    """
    trial.begin()
    if trial.operation == "WRITE" or (trial.lane == "tcp" and not trial.evidence):
        trial.source.stop()
    trial.event()
    if trial.evidence:
        trial.notes["sockets_left"] = trial.target.call("end_agent")
        if trial.lane == "tcp":
            trial.expect_short()
    elif trial.lane == "tcp" and trial.operation == "READ":
        # The agent is dropped, yet its released handle keeps it alive.
        trial.notes["sockets_left"] = trial.target.call("end_agent", True)
    trial.refill()
    trial.source.resume()
    return trial.settle()


def target_shuts(trial: Trial) -> Outcome:
    """The target shuts down the stopped source's sockets and waits until UCX closed them.

    A source that is read from on the same host is not stopped: that would change nothing.
    """
    trial.begin()
    if not _in_post(trial):
        trial.source.stop()
    return _shut(trial)


def target_shuts_running(trial: Trial) -> Outcome:
    """The same against a source that runs."""
    trial.begin()
    return _shut(trial)


def _shut(trial: Trial) -> Outcome:
    trial.event()
    if trial.evidence:
        trial.notes["sockets_shut"] = trial.target.call("shut_sockets", trial.source_ends)
        trial.notes["meanwhile"] = trial.state
        trial.expect_short()
    trial.refill()
    trial.source.resume()
    return trial.settle()


def handle_released(trial: Trial) -> Outcome:
    """The initiator releases the handle, and the source's memory is reused too.

    On the same host the operation is inside the post then, so another thread releases it.
    """
    trial.begin()
    if trial.lane == "tcp":
        trial.initiator.call("stop_polling")  # returns when the post has
    trial.event()
    try:
        trial.notes["release"] = trial.initiator.call("release")
    except NodeDied as death:
        trial.notes["release"] = str(death)
    if trial.lane == "tcp":
        trial.expect_short()
    trial.notes["meanwhile"] = trial.state
    trial.refill()
    trial.source.pool.bytes[:] = REUSED
    outcome = trial.settle()
    outcome.notes["reused"] = int((trial.target.pool.bytes == REUSED).sum())
    return outcome


def part_fails(trial: Trial) -> Outcome:
    """Four descriptors of the operation lie in memory that can't be accessed any more."""
    if trial.lane == "tcp" and trial.operation == "WRITE":
        return _part_fails_unread(trial)
    # The inaccessible side is the one that the other side's call or answer touches.
    side = trial.target if trial.operation == "WRITE" else trial.source
    side.call("protect", _HOLE_AT, _HOLE_SIZE)
    trial.begin()
    trial.event()
    if trial.evidence:
        trial.wait_end()
        trial.notes["missing"] = trial.target.pool.foreign(SOURCE)
        trial.notes["next"] = trial.probe()
    trial.refill()
    return trial.settle()


def _part_fails_unread(trial: Trial) -> Outcome:
    """The source sees the error while earlier descriptors still lie in the target's kernel."""
    trial.source.call("protect", _NEAR_HOLE_AT, _HOLE_SIZE)
    trial.target.stop()
    trial.start()
    trial.wait_end()
    trial.event(is_error=True)
    if not trial.evidence:
        trial.refill()
        trial.target.resume()
        return trial.settle()
    trial.target.resume()
    trial.notes["closed_after_s"] = trial.target.call("wait_closed", trial.source_ends)
    if not trial.target.pool.landed(SOURCE):
        raise Void("no sibling of the failed part moved")
    trial.refill()
    return trial.settle()


def source_ends(trial: Trial) -> Outcome:
    """The source destroys its own agent."""
    trial.begin()
    if not trial.evidence:
        _hold(trial)
    trial.event()
    trial.source.call("end_agent")
    if not trial.evidence:
        trial.refill()
        trial.target.resume()
        return trial.settle()
    if trial.operation == "READ":
        trial.wait_end()
    else:
        trial.notes["closed_after_s"] = trial.target.call("wait_closed", trial.source_ends)
    trial.expect_short()
    trial.refill()
    return trial.settle()
