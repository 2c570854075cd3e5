"""Who may hand over next: turns, windows, permits, admission, against a plain model."""

from __future__ import annotations

import random

import pytest

from kvferry.engine.scheduler import Bounds, Scheduler


def scheduler(*peers: str, **bounds: int) -> Scheduler:
    made = Scheduler(Bounds(**bounds))
    for peer in peers:
        made.permit(peer, may_post=True)
    return made


def turns(made: Scheduler, count: int, size: int = 1) -> list[int]:
    """Take `count` writes; which transfer each belonged to. Stops when nobody may."""
    taken = []
    while len(taken) < count and (turn := made.pick()) is not None:
        if made.take(*turn, size):
            taken.append(turn[0])
    made.check_integrity()
    return taken


def test_round_robin_over_transfers_and_peers() -> None:
    made = scheduler("a", "b")
    for transfer, peer in ((1, "a"), (2, "a"), (3, "b")):
        made.ready(transfer, peer)
    assert turns(made, 8) == [1, 3, 2, 3, 1, 3, 2, 3]


def test_ready_and_idle_are_idempotent() -> None:
    made = scheduler("a")
    made.idle(1, "a")
    made.idle(1, "never heard of")
    for _ in range(3):
        made.ready(1, "a")
    made.idle(1, "a")
    made.idle(1, "a")
    assert made.pick() is None


def test_nothing_is_handed_over_without_a_permit() -> None:
    made = scheduler()
    made.ready(1, "a")
    assert made.pick() is None
    made.permit("a", may_post=True)
    assert turns(made, 1) == [1]
    made.permit("a", may_post=False)
    assert made.pick() is None


def test_a_full_window_holds_up_its_own_peer_only() -> None:
    made = scheduler("a", "b", peer_writes_max=2)
    made.ready(1, "a")
    made.ready(2, "b")
    assert turns(made, 9) == [1, 2, 1, 2]
    made.settle("b", 1)
    assert turns(made, 9) == [2]
    assert (made.outstanding("a"), made.outstanding("b"), made.outstanding("c")) == (2, 2, 0)


def test_bytes_are_bounded_and_one_larger_write_goes_alone() -> None:
    made = scheduler("a", peer_bytes_max=100)
    made.ready(1, "a")
    assert turns(made, 9, size=60) == [1]
    assert made.pick() is None
    made.settle("a", 60)
    assert turns(made, 9, size=101) == [1]
    assert turns(made, 9, size=1) == []
    made.settle("a", 101)
    assert turns(made, 9, size=50) == [1, 1]


def test_admission_is_bounded_and_in_order_of_arrival() -> None:
    made = scheduler("a", "b", admitted_max=2)
    for transfer in (1, 2, 3, 4):
        made.ready(transfer, "a")
    made.ready(9, "b")
    assert turns(made, 5) == [1, 9, 2, 9, 1]
    made.idle(1, "a")
    assert set(turns(made, 8)) == {2, 3, 9}
    made.idle(4, "a")
    made.idle(2, "a")
    assert set(turns(made, 4)) == {3, 9}


def test_a_peer_is_forgotten_when_nothing_of_it_is_outstanding() -> None:
    made = scheduler("a")
    made.ready(1, "a")
    turns(made, 1, size=5)
    made.idle(1, "a")
    made.forget("a")
    assert made.outstanding("a") == 1, "a credit stays counted until its write settles"
    made.settle("a", 5)
    made.forget("a")
    made.forget("a")
    assert made.outstanding("a") == 0
    made.ready(1, "a")
    assert made.pick() is None, "a forgotten peer has no permit"


@pytest.mark.parametrize("seed", range(20))
def test_against_a_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    made = scheduler("a", "b", peer_bytes_max=50, peer_writes_max=4, admitted_max=3)
    ready: dict[str, set[int]] = {"a": set(), "b": set()}
    open_: dict[str, list[int]] = {"a": [], "b": []}
    waited: dict[int, int] = {}
    for _ in range(600):
        peer = rng.choice("ab")
        transfer = rng.randrange(8) + (100 if peer == "b" else 0)
        match rng.randrange(5):
            case 0:
                made.ready(transfer, peer)
                ready[peer].add(transfer)
            case 1:
                made.idle(transfer, peer)
                ready[peer].discard(transfer)
                waited.pop(transfer, None)
            case 2 if open_[peer]:
                made.settle(peer, open_[peer].pop(rng.randrange(len(open_[peer]))))
            case _:
                turn = made.pick()
                size = rng.randrange(1, 80)
                if turn is None:
                    stuck = [p for p in "ab" if ready[p] and not open_[p]]
                    assert not stuck, f"seed {seed}: nobody may, but {stuck} have all their credit"
                    continue
                who, where = turn
                assert who in ready[where], f"seed {seed}: {who} has nothing ready"
                if made.take(who, where, size):
                    open_[where].append(size)
                    waited = {t: n + 1 for t, n in waited.items() if t != who}
                    waited.setdefault(who, 0)
                    over = len(open_[where]) > 4 or (
                        sum(open_[where]) > 50 and len(open_[where]) > 1
                    )
                    assert not over, f"seed {seed}: {open_[where]}"
                else:
                    assert open_[where], f"seed {seed}: full with nothing outstanding"
        made.check_integrity()
