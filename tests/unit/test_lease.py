"""The lease machine: slots leave with evidence, once."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvferry.engine.lease import LeaseMachine
from kvferry.engine.transitions import LEASE, IllegalTransition, Lease, LeaseEvent

WAYS = {
    Lease.GRANTED: [],
    Lease.IN_USE: [LeaseEvent.EXPOSE],
    Lease.DRAINING: [LeaseEvent.EXPOSE, LeaseEvent.END],
    Lease.QUARANTINED: [LeaseEvent.EXPOSE, LeaseEvent.END, LeaseEvent.LOSE],
}


def lease_in(state: Lease) -> LeaseMachine:
    lease = LeaseMachine({"a": np.array([4, 2]), "b": np.array([], dtype=np.int64)})
    for event in WAYS[state]:
        lease.handle(event)
    assert lease.state is state
    return lease


@pytest.mark.parametrize("state", list(WAYS))
def test_evidence_gives_every_slot_back_once(state: Lease) -> None:
    lease = lease_in(state)
    lease.hold({"a": np.array([9]), "c": np.array([1])})
    assert lease.slots_held == 4
    slots = lease.prove()
    assert {group: array.tolist() for group, array in slots.items()} == {
        "a": [4, 2, 9],
        "b": [],
        "c": [1],
    }
    assert lease.fenced
    assert lease.slots_held == 0
    with pytest.raises(IllegalTransition):
        lease.prove()


@pytest.mark.parametrize(("state", "event"), list(product(WAYS, LeaseEvent)))
def test_no_other_event_releases_anything(state: Lease, event: LeaseEvent) -> None:
    lease = lease_in(state)
    if event is LeaseEvent.PROVE:
        with pytest.raises(ValueError, match="prove"):
            lease.handle(event)
        assert lease.state is state
    elif (state, event) in LEASE:
        lease.handle(event)
        assert not lease.fenced
    else:
        with pytest.raises(IllegalTransition):
            lease.handle(event)
        assert lease.state is state
    assert lease.slots_held == 2
