"""The rows of the truth table: what NIXL 1.5.1 on UCX is expected to do, and how a row is run.

Two rules: a row that claims clean memory counts only beside a control, the same trial without the
evidence, that did show foreign bytes; and void trials and crashes are counted, never dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.truth import scenarios
from tests.truth.peer import NodeDied
from tests.truth.trial import POOL, POOL_MAX, Lane, Operation, Outcome, Trial, Void

ATTEMPTS_MAX = 5
DISCONNECT = "NIXL_ERR_REMOTE_DISCONNECT"
# What the board of a process says that ended, was abandoned or destroyed before NIXL answered.
UNTOLD = ("in the post", "PROC")


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    `foreign`: whether bytes land although the evidence was waited for; None: now and then.
    `evidence`: what is waited for before the target's memory is given away.
    `states`: what NIXL may report at the initiator. `may_die`: see Trial.
    """

    event: str
    lane: Lane
    operation: Operation
    scenario: Callable[[Trial], Outcome]
    evidence: str
    foreign: bool | None
    states: tuple[str, ...]
    may_die: tuple[str, ...] = ()
    network: bool = False

    @property
    def name(self) -> str:
        return "-".join((self.event.replace(" ", "_"), self.lane, self.operation.lower()))


@dataclass(slots=True)
class Tried:
    """One side of a row (with or without evidence): its outcome, and what it took to get it."""

    outcome: Outcome
    trials: int = 1
    void: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """A row that was run. `control` is None where the row itself shows foreign bytes."""

    row: Row
    settle_s: float
    with_evidence: Tried
    control: Tried | None

    def record(self) -> dict[str, Any]:
        """As a line of the report."""
        line = asdict(self)
        line["row"] = {k: v for k, v in asdict(self.row).items() if k != "scenario"}
        return line | {"name": self.row.name}


def run_row(row: Row, settle_s: float) -> Result:
    """Run a row's control and the row itself. Raises AssertionError if neither counts."""
    control = _try(row, settle_s, evidence=False) if row.foreign is False else None
    return Result(row, settle_s, _try(row, settle_s, evidence=True), control)


def _try(row: Row, settle_s: float, *, evidence: bool) -> Tried:
    void: list[str] = []
    crashes: list[str] = []
    size = POOL
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            with Trial(
                row.lane,
                row.operation,
                evidence=evidence,
                settle_s=settle_s,
                size=size,
                network=row.network,
                may_die=row.may_die,
            ) as trial:
                outcome = row.scenario(trial)
            if evidence or outcome.foreign:
                return Tried(outcome, attempt, void, crashes)
            void.append(f"a control without foreign bytes: {outcome}")
        except Void as reason:
            void.append(str(reason))
        except NodeDied as death:
            crashes.append(str(death))
        size = min(size * 2, POOL_MAX)  # on a fast machine it may be over before its event
        time.sleep(0.1)
    raise AssertionError(
        f"{row.name}: no trial counted out of {ATTEMPTS_MAX}: void {void}, crashes {crashes}"
    )


def _pair(
    event: str,
    lane: Lane,
    scenario: Callable[[Trial], Outcome],
    write: tuple[Any, ...],
    read: tuple[Any, ...],
    **options: Any,
) -> list[Row]:
    """The two operations of one event on one lane: (evidence, foreign, states) of each."""
    return [
        Row(event, lane, "WRITE", scenario, *write, **options),
        Row(event, lane, "READ", scenario, *read, **options),
    ]


_CLOSED = "none of the target's sockets of that peer is open"
_OWN_END = "the target's own operation ended"
_AGENT = "the target's agent is destroyed, none of its sockets is left"
_SHUT = "the peer's sockets are shut down and closed by UCX"

ROWS: list[Row] = [
    *_pair(
        "source killed",
        "tcp",
        scenarios.source_killed,
        (f"reaped, and {_CLOSED}", False, UNTOLD),
        (_OWN_END, False, (DISCONNECT,)),
    ),
    *_pair(
        "source killed",
        "same-host",
        scenarios.source_killed,
        ("reaped", False, UNTOLD),
        (_OWN_END, False, (DISCONNECT,)),
    ),
    *_pair(
        "source stopped and continued",
        "tcp",
        scenarios.source_stopped,
        ("the source saw DONE", False, ("DONE",)),
        (_OWN_END, False, ("DONE",)),
    ),
    *_pair(
        "source stopped and continued",
        "same-host",
        scenarios.source_stopped,
        ("the source saw DONE", False, ("DONE",)),
        (_OWN_END, False, ("DONE",)),
    ),
    Row(
        "target stopped and continued",
        "tcp",
        "WRITE",
        scenarios.target_stopped,
        f"the source saw its endpoint's error, and {_CLOSED}",
        False,
        (DISCONNECT,),
    ),
    *_pair(
        "network cut and healed",
        "tcp",
        scenarios.network_cut,
        ("the source saw its endpoint's error", False, (DISCONNECT,)),
        (_OWN_END, False, (DISCONNECT,)),
        network=True,
    ),
    *_pair(
        "target destroys its agent",
        "tcp",
        scenarios.target_destroys,
        (_AGENT, False, (DISCONNECT,)),
        (_AGENT, False, (*UNTOLD, DISCONNECT)),
        may_die=("source",),
    ),
    *_pair(
        "target destroys its agent",
        "same-host",
        scenarios.target_destroys,
        (_AGENT, True, ("DONE", DISCONNECT)),
        (f"{_AGENT} (which waits for the post)", False, ("DONE",)),
    ),
    *_pair(
        "target shuts a stopped source's sockets",
        "tcp",
        scenarios.target_shuts,
        (_SHUT, False, (DISCONNECT,)),
        (_SHUT, False, (DISCONNECT,)),
        may_die=("source",),
    ),
    *_pair(
        "target shuts a running source's sockets",
        "tcp",
        scenarios.target_shuts_running,
        (_SHUT, False, (DISCONNECT,)),
        (_SHUT, False, (DISCONNECT,)),
        may_die=("source",),
    ),
    *_pair(
        "target shuts the source's sockets",
        "same-host",
        scenarios.target_shuts,
        (_SHUT, True, ("DONE", DISCONNECT)),
        (_SHUT, None, ("DONE", DISCONNECT)),
    ),
    *_pair(
        "handle released in flight",
        "tcp",
        scenarios.handle_released,
        ("release returned", True, UNTOLD),
        ("release returned", True, UNTOLD),
    ),
    Row(
        "handle released in flight",
        "same-host",
        "WRITE",
        scenarios.handle_released,
        "release returned",
        None,
        (*UNTOLD, "DONE"),
        may_die=("source",),
    ),
    Row(
        "handle released in flight",
        "same-host",
        "READ",
        scenarios.handle_released,
        "release returned",
        None,
        (*UNTOLD, "DONE"),
        may_die=("target",),
    ),
    *_pair(
        "one part fails, siblings move",
        "tcp",
        scenarios.part_fails,
        (f"the source saw its endpoint's error, and {_CLOSED}", False, (DISCONNECT,)),
        (_OWN_END, False, (DISCONNECT,)),
        may_die=("source",),
    ),
    *_pair(
        "one part fails, siblings move",
        "same-host",
        scenarios.part_fails,
        ("the post returned", False, ("DONE", DISCONNECT)),
        (_OWN_END, False, ("DONE", DISCONNECT)),
    ),
    *_pair(
        "source ends its agent",
        "tcp",
        scenarios.source_ends,
        (_CLOSED, False, UNTOLD),
        (_OWN_END, False, (DISCONNECT,)),
    ),
]
