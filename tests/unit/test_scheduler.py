"""Who may hand over next: turns by bytes, windows, permits, admission, and how priority arrives."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from kvferry.engine import source
from kvferry.engine.keys import Key
from kvferry.engine.limits import PRIORITY_MAX, TURN_WRITES_MAX
from kvferry.engine.scheduler import Bounds, Scheduler

from .pair import BLOCK_BYTES, Handle, Pair

SHARE = 160  # an equal share of the windows below: one turn, and the largest small write
WINDOW = {"peer_bytes_max": 4 * SHARE, "peer_writes_max": 4}
WIDE = {"peer_bytes_max": 10_000 * SHARE, "peer_writes_max": 10_000}


def scheduler(*peers: str, **bounds: int) -> Scheduler:
    made = Scheduler(Bounds(**bounds))
    for peer in peers:
        made.permit(peer, may_post=True)
    return made


def turns(made: Scheduler, count: int, size: int | dict[int, int] = SHARE) -> list[int]:
    """Take `count` writes; which transfer each belonged to. Stops when nobody may."""
    taken = []
    while len(taken) < count and (turn := made.pick()) is not None:
        if made.take(*turn, size if isinstance(size, int) else size[turn[0]]):
            taken.append(turn[0])
    made.check_integrity()
    return taken


# ---------------------------------------------------------------- turns


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param({1: SHARE, 2: SHARE}, [1, 2, 1, 2, 1, 2], id="a turn each"),
        pytest.param({1: 80, 2: 80}, [1, 1, 2, 2, 1, 1], id="a turn of two writes"),
        pytest.param({1: 320, 2: SHARE}, [1, 2, 2, 1, 2, 2], id="twice a turn: out for a round"),
        pytest.param({1: 240, 2: SHARE}, [1, 2, 1, 2, 2, 1], id="what is overdrawn is kept"),
        pytest.param({1: 1600, 2: SHARE}, [1, *[2] * 10, 1], id="ten turns"),
        pytest.param({1: 1, 2: SHARE}, [*[1] * TURN_WRITES_MAX, 2, 1], id="tiny writes"),
    ],
)
def test_turns_are_by_bytes(sizes: dict[int, int], expected: list[int]) -> None:
    made = scheduler("a", **WIDE)
    for transfer in sizes:
        made.ready(transfer, "a")
    assert turns(made, len(expected), sizes) == expected


@pytest.mark.parametrize("priority", range(-PRIORITY_MAX, PRIORITY_MAX + 1))
def test_a_step_of_priority_doubles_the_share(priority: int) -> None:
    made = scheduler("a", **WIDE)
    made.ready(1, "a", priority)
    made.ready(2, "a", 0)
    count = Counter(turns(made, 900))
    assert count[1] / count[2] == pytest.approx(2**priority, rel=0.05)


def test_peers_take_turns_by_bytes_too() -> None:
    made = scheduler("a", "b", **WIDE)
    made.ready(1, "a")
    made.ready(2, "a", PRIORITY_MAX)
    made.ready(3, "b")
    count = Counter(turns(made, 900, {1: SHARE, 2: SHARE, 3: 4 * SHARE}))
    assert count[1] + count[2] == pytest.approx(4 * count[3], abs=4)


def test_who_comes_goes_before_those_that_overdrew() -> None:
    made = scheduler("a", **WIDE)
    made.ready(1, "a")
    assert turns(made, 1, 8 * SHARE) == [1]
    made.ready(2, "a")
    assert turns(made, 8, {1: 8 * SHARE, 2: SHARE}) == [*[2] * 7, 1]


def test_nothing_is_gained_by_leaving_and_coming_back() -> None:
    made = scheduler("a", **WIDE)
    made.ready(1, "a")
    made.ready(2, "a")
    taken = []
    for _ in range(19):
        taken += turns(made, 1, {1: 8 * SHARE, 2: SHARE})
        made.idle(1, "a")
        made.ready(1, "a")
    assert taken == [1, *[2] * 9, 1, *[2] * 8]


def test_a_write_out_of_turn_is_a_bug() -> None:
    made = scheduler("a", "b", peer_writes_max=1)
    made.ready(1, "a")
    made.ready(2, "a")
    with pytest.raises(AssertionError, match="turn of 1"):
        made.take(2, "a", 1)
    assert turns(made, 9) == [1]
    with pytest.raises(AssertionError, match="nothing may be handed over"):
        made.take(2, "a", 1)


# ---------------------------------------------------------------- who is in


def test_ready_and_idle_are_idempotent() -> None:
    made = scheduler("a")
    made.idle(1, "a")
    made.idle(1, "never heard of")
    made.drop(1, "never heard of")
    for priority in range(3):
        made.ready(1, "a", priority)
    made.idle(1, "a")
    made.idle(1, "a")
    assert made.pick() is None
    assert len(made) == 1
    made.drop(1, "a")
    made.drop(1, "a")
    assert len(made) == 0
    made.check_integrity()


def test_nothing_is_handed_over_without_a_permit() -> None:
    made = scheduler()
    made.ready(1, "a")
    assert made.pick() is None
    made.permit("a", may_post=True)
    assert turns(made, 1) == [1]
    made.permit("a", may_post=False)
    assert made.pick() is None


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
    made.forget("a")
    made.permit("a", may_post=True)
    assert made.pick() == (1, "a"), "what waits keeps its peer"


# ---------------------------------------------------------------- windows


def test_a_full_window_holds_up_its_own_peer_only() -> None:
    made = scheduler("a", "b", peer_writes_max=2)
    made.ready(1, "a")
    made.ready(2, "b")
    assert sorted(turns(made, 9)) == [1, 1, 2, 2]
    made.settle("b", SHARE)
    assert turns(made, 9) == [2]
    assert (made.outstanding("a"), made.outstanding("b"), made.outstanding("c")) == (2, 2, 0)


@pytest.mark.parametrize(
    ("posted", "size", "fits"),
    [
        pytest.param([], 5 * SHARE, True, id="larger than the window: alone"),
        pytest.param([1], 4 * SHARE, False, id="as large as the window, beside another"),
        pytest.param([2 * SHARE], 2 * SHARE, True, id="exactly the window"),
        pytest.param([2 * SHARE], 2 * SHARE + 1, False, id="a byte over the window"),
        pytest.param([4 * SHARE], SHARE, True, id="small: beyond the window"),
        pytest.param([4 * SHARE], SHARE + 1, False, id="a byte too large to be small"),
        pytest.param([9 * SHARE, SHARE, SHARE], SHARE, True, id="small beside a larger one"),
        pytest.param([1, 1, 1, 1], 1, False, id="small, with every write in use"),
    ],
)
def test_what_fits_into_a_window(posted: list[int], size: int, fits: bool) -> None:
    made = scheduler("a", **WINDOW)
    for transfer, before in enumerate(posted):
        made.ready(transfer, "a")
        assert turns(made, 1, before) == [transfer]
        made.drop(transfer, "a")
    made.ready(9, "a")
    assert turns(made, 1, size) == ([9] if fits else [])
    assert made.outstanding("a") == len(posted) + fits


def test_what_was_refused_keeps_its_turn_until_something_settles() -> None:
    made = scheduler("a", **WINDOW)
    made.ready(1, "a")
    made.ready(2, "a")
    sizes = {1: 3 * SHARE, 2: 3 * SHARE}
    assert turns(made, 9, sizes) == [1]
    assert made.pick() is None, "it is the turn of 2, which does not fit"
    made.settle("a", 3 * SHARE)
    assert turns(made, 9, sizes) == [2]


def test_one_block_is_not_stuck_behind_the_window_of_a_big_request() -> None:
    made = scheduler("a", **WINDOW)
    made.ready(1, "a")
    assert turns(made, 9, 2 * SHARE) == [1, 1]
    assert made.pick() is None
    made.ready(2, "a")
    assert turns(made, 1) == [2]


def test_who_was_refused_and_leaves_holds_nobody_up() -> None:
    made = scheduler("a", **WINDOW)
    for transfer in (1, 2, 3):
        made.ready(transfer, "a")
    sizes = {1: 3 * SHARE, 2: 3 * SHARE, 3: SHARE}
    assert turns(made, 9, sizes) == [1]
    made.idle(2, "a")
    assert turns(made, 1, sizes) == [3]
    made.ready(2, "a")
    assert turns(made, 2, dict.fromkeys(sizes, SHARE)) == [2, 3], "its next one may be small"


# ---------------------------------------------------------------- admission


@pytest.fixture
def one_at_a_time() -> Scheduler:
    return scheduler("a", **WIDE, admitted_max=1, peer_admitted_min=1)


def test_admission_is_by_priority_then_arrival(one_at_a_time: Scheduler) -> None:
    made, order = one_at_a_time, []
    for transfer, priority in enumerate((0, 0, 3, -1, 3, 0)):
        made.ready(transfer, "a", priority)
    while (turn := made.pick()) is not None:
        order.append(turn[0])
        made.idle(*turn)
        made.check_integrity()
    assert order == [0, 2, 4, 1, 5, 3]


def test_admission_is_bounded_over_all_peers_and_each_gets_its_minimum() -> None:
    made = scheduler("a", "b", **WIDE, admitted_max=4, peer_admitted_min=2)
    for peer, first in (("a", 0), ("b", 10)):
        for transfer in range(first, first + 9):
            made.ready(transfer, peer)
    assert set(turns(made, 99)) == {0, 1, 2, 3, 10, 11}
    made.permit("a", may_post=False)
    assert set(turns(made, 99)) == {10, 11}, "the others may still hold planned writes"
    made.idle(0, "a")
    made.idle(1, "a")
    made.permit("a", may_post=True)
    assert set(turns(made, 99)) == {2, 3, 10, 11}
    for transfer in range(9):
        made.idle(transfer, "a")
    assert set(turns(made, 99)) == {10, 11, 12, 13}, "b takes the room at its next turn"


def test_who_waits_for_a_permit_takes_no_room() -> None:
    made = scheduler("b", **WIDE, admitted_max=4, peer_admitted_min=1)
    for transfer in range(4):
        made.ready(transfer, "a")
        made.ready(10 + transfer, "b")
    assert set(turns(made, 99)) == {10, 11, 12, 13}


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        pytest.param({}, [1, 1, 1, 1], id="nobody waits"),
        pytest.param({2: 0, 3: 0}, [1, 2, 3, 1], id="equals"),
        pytest.param({2: 1, 3: -1}, [1, 2, 2, 2], id="a higher priority"),
        pytest.param({2: -1, 3: -1}, [1, 1, 1, 1], id="lower priorities"),
    ],
)
def test_a_transfer_between_steps_gives_way(
    one_at_a_time: Scheduler, waiting: dict[int, int], expected: list[int]
) -> None:
    made, taken = one_at_a_time, []
    made.ready(1, "a")
    for transfer, priority in waiting.items():
        made.ready(transfer, "a", priority)
    for _ in expected:
        taken += turns(made, 1)
        made.give_way(taken[-1], "a")
    assert taken == expected


# ---------------------------------------------------------------- in an engine


def posting(pair: Pair, count: int) -> list[int]:
    """Post and settle one write after the other: the source block of group "full" of each."""
    worker, slots = pair.prefill.worker, []
    for _ in range(count):
        (write,) = worker.queued
        slots.append(int(worker.queued[write].source[0] - pair.prefill.base) // BLOCK_BYTES % 64)
        worker.post(write, pair.now)
        worker.settle(write)
        pair.prefill.work()
        pair.roundtrip()
    return slots


def start(pair: Pair, name: str, blocks: int, first: int, priority: int) -> Handle:
    slots = list(range(first, first + blocks))
    pair.decode.receive(Key(name), pair.prefill, slots, priority=priority)
    pair.roundtrip()
    return pair.prefill.send(name, 4 * blocks)


def test_the_priority_of_an_offer_decides_and_is_bounded() -> None:
    """One write in flight, of two blocks at most: a turn is one write, or eight, or an eighth."""
    pair = Pair(peer_posted_writes_max=1, peer_posted_bytes_max=2 * BLOCK_BYTES)
    pair.prefill.worker.prompt = False
    low = start(pair, "low", 8, 0, -(2**62))
    high = start(pair, "high", 16, 20, 2**62)
    for tx, first, blocks in ((low, 0, 8), (high, 20, 16)):
        pair.prefill.push(tx, list(range(first, first + blocks)))
        pair.prefill.finish(tx)
    pair.roundtrip()
    assert posting(pair, 12) == [0, *range(20, 36, 2), 2, 4, 6]
    assert low.done
    assert high.done


def test_admission_goes_round_by_planning_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    one = partial(Bounds, admitted_max=1, peer_admitted_min=1)
    monkeypatch.setattr(source, "Bounds", one)
    pair = Pair(peer_posted_writes_max=1)
    pair.prefill.worker.prompt = False
    big, small = start(pair, "big", 3, 0, 0), start(pair, "small", 1, 20, 0)
    for ordinal in range(3):
        pair.prefill.push(big, [ordinal], first=ordinal)
    pair.prefill.push(small, [20])
    pair.roundtrip()
    assert posting(pair, 4) == [0, 1, 20, 2]
