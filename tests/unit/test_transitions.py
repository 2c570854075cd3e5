"""The state tables: every pair of state and event is a row, or raises and changes nothing."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kvferry.engine import transitions as t
from kvferry.engine.errors import InternalError
from kvferry.engine.lease import LeaseMachine
from kvferry.engine.transitions import IllegalTransition, follow

if TYPE_CHECKING:
    from collections.abc import Mapping


class Table(NamedTuple):
    states: type[StrEnum]
    events: type[StrEnum]
    rows: Mapping
    start: StrEnum
    final: frozenset


TABLES = {
    "outcome": Table(t.Outcome, t.OutcomeEvent, t.OUTCOME, t.Outcome.WAITING, t.OUTCOMES_ENDED),
    "lease": Table(t.Lease, t.LeaseEvent, t.LEASE, t.Lease.GRANTED, frozenset({t.Lease.FENCED})),
    "session": Table(
        t.Session, t.SessionEvent, t.SESSION, t.Session.OPENING, frozenset({t.Session.ENDED})
    ),
    "write": Table(t.Write, t.WriteEvent, t.WRITE, t.Write.QUEUED, t.WRITES_SETTLED),
}
PAIRS = [
    (name, state, event)
    for name, table in TABLES.items()
    for state in table.states
    for event in table.events
]


@pytest.mark.parametrize(("name", "state", "event"), PAIRS)
def test_every_pair_is_a_row_or_raises(name: str, state: StrEnum, event: StrEnum) -> None:
    table = TABLES[name]
    if (state, event) in table.rows:
        after = follow(table.rows, state, event)
        assert type(after) is table.states
        assert after is not state, "a row that changes nothing hides a mistake"
    else:
        with pytest.raises(IllegalTransition) as error:
            follow(table.rows, state, event)
        assert isinstance(error.value, InternalError)
        assert str(state) in str(error.value)
        assert str(event) in str(error.value)


@pytest.mark.parametrize("name", list(TABLES))
def test_final_states_have_no_rows_and_all_others_have_some(name: str) -> None:
    table = TABLES[name]
    left = {state for state, _ in table.rows}
    assert left == set(table.states) - table.final


@pytest.mark.parametrize("name", list(TABLES))
def test_every_state_is_reached_and_every_state_can_end(name: str) -> None:
    table = TABLES[name]

    def reach(start: StrEnum) -> set[StrEnum]:
        seen, queue = {start}, deque([start])
        while queue:
            state = queue.popleft()
            for (before, _), after in table.rows.items():
                if before is state and after not in seen:
                    seen.add(after)
                    queue.append(after)
        return seen

    assert reach(table.start) == set(table.states)
    for state in table.states:
        assert reach(state) & table.final


def test_a_lease_is_fenced_only_by_evidence() -> None:
    fencing = {event for (_, event), after in t.LEASE.items() if after is t.Lease.FENCED}
    assert fencing == {t.LeaseEvent.PROVE}
    proved = {state for (state, event) in t.LEASE if event is t.LeaseEvent.PROVE}
    assert proved == set(t.Lease) - {t.Lease.FENCED}


def test_a_write_in_doubt_only_settles() -> None:
    after = {end for (state, _), end in t.WRITE.items() if state is t.Write.IN_DOUBT}
    assert after == {t.Write.DONE, t.Write.FAILED}
    dropped = {state for (state, event) in t.WRITE if event is t.WriteEvent.DROP}
    assert dropped == {t.Write.QUEUED, t.Write.HANDED}, "what is posted can't be taken back"


def test_an_illegal_event_leaves_a_machine_unchanged() -> None:
    lease = LeaseMachine()
    lease.handle(t.LeaseEvent.EXPOSE)
    with pytest.raises(IllegalTransition):
        lease.handle(t.LeaseEvent.EXPOSE)
    assert lease.state is t.Lease.IN_USE
