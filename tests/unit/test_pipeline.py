"""One transfer's way from blocks to writes, against a plain model of what must move."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvferry.engine.pipeline import Pipeline
from kvferry.engine.ports import WriteBounds
from kvferry.engine.spans import Span
from kvferry.engine.template import make_template
from kvferry.engine.transitions import IllegalTransition, Write, WriteEvent
from tests.unit.pair import BLOCK_BYTES, SLOTS, make_layout, slots_of

SOURCE, TARGET = 1 << 32, 2 << 32
TOKENS = 1 << 20  # more than any span here has
TEMPLATES = {
    name: make_template(make_layout(SOURCE), name, make_layout(TARGET), name)
    for name in ("full", "side")
}
BOUNDS = WriteBounds(descriptors_max=3, bytes_max=2 * BLOCK_BYTES)


def pipeline(**need: Span) -> Pipeline:
    return Pipeline(need, TOKENS, TEMPLATES.__getitem__, BOUNDS)


def lists(slots: dict) -> dict[str, list[int]]:
    return {group: sorted(array.tolist()) for group, array in slots.items()}


def take_all(line: Pipeline, start: int = 1) -> list:
    writes = []
    while line.head() is not None:
        writes.append(line.take(start + len(writes)))
    line.check_integrity()
    return writes


def test_blocks_that_are_not_needed_come_back_at_once() -> None:
    line = pipeline(full=Span.from_slots([9, 8], first=1))
    free = line.add({"full": Span.from_slots([1, 2, 3, 4]), "side": Span.from_slots([7])})
    assert lists(free) == {"full": [1, 4], "side": [7]}
    assert line.has_work
    assert line.must_plan


def test_a_whole_transfer() -> None:
    line = pipeline(full=Span.from_slots([20, 21, 22, 23]))
    assert line.add({"full": Span.from_slots([1, 2, 3, 4])}) == {}
    assert {g: a.tolist() for g, a in line.missing().items()} == {"full": [0, 1, 2, 3]}
    first = line.head()
    assert first is line.head(), "looking at the head does not take it"
    assert not line.must_plan
    writes = take_all(line)
    assert [write.copies.bytes for write in writes] == [2 * BLOCK_BYTES] * 2
    assert not line.has_work
    assert line.writes_open == 2
    assert line.settle(writes[0], WriteEvent.COMPLETE) == {}, "the piece is not whole yet"
    assert lists(line.settle(writes[1], WriteEvent.COMPLETE)) == {"full": [1, 2, 3, 4]}
    assert line.missing() == {}
    assert line.bytes_done == 4 * BLOCK_BYTES


def test_a_failed_write_frees_its_blocks_but_covers_nothing() -> None:
    line = pipeline(full=Span.from_slots([20, 21, 22, 23]))
    line.add({"full": Span.from_slots([1, 2, 3, 4])})
    one, two = take_all(line)
    line.settle(one, WriteEvent.FAIL)
    assert lists(line.settle(two, WriteEvent.COMPLETE)) == {"full": [1, 2, 3, 4]}
    assert {g: a.tolist() for g, a in line.missing().items()} == {"full": [0, 1, 2, 3]}
    assert line.bytes_done == 2 * BLOCK_BYTES


def test_dropping_spares_what_was_taken() -> None:
    line = pipeline(full=Span.from_slots(range(20, 30)))
    line.add({"full": Span.from_slots([1, 2, 3, 4])})
    line.add({"full": Span.from_slots([6], first=4)})
    line.head()
    write = line.take(1)
    assert lists(line.drop()) == {"full": [6]}, "the open write still reads from its piece"
    assert line.drop() == {}
    assert not line.has_work
    assert lists(line.settle(write, WriteEvent.COMPLETE)) == {"full": [1, 2, 3, 4]}
    assert line.writes_open == 0


def test_a_requeued_write_goes_first_and_under_a_new_number() -> None:
    line = pipeline(full=Span.from_slots(range(20, 24)))
    line.add({"full": Span.from_slots([1, 2, 3, 4])})
    line.head()
    write = line.take(1)
    line.requeue(write)
    assert write.state is Write.DROPPED
    again = line.head()
    assert again is not None
    assert again.copies is write.copies
    one, two = take_all(line, 10)
    line.settle(two, WriteEvent.COMPLETE)
    assert lists(line.settle(one, WriteEvent.COMPLETE)) == {"full": [1, 2, 3, 4]}
    assert line.missing() == {}


@pytest.mark.parametrize("event", [WriteEvent.DROP, WriteEvent.HAND, WriteEvent.POST])
def test_an_impossible_settling_changes_nothing(event: WriteEvent) -> None:
    line = pipeline(full=Span.from_slots([20]))
    line.add({"full": Span.from_slots([1])})
    line.head()
    write = line.take(1)
    write.follow(WriteEvent.POST)
    with pytest.raises(IllegalTransition):
        line.settle(write, event)
    with pytest.raises(IllegalTransition):
        line.requeue(write)
    assert line.writes_open == 1
    assert write.state is Write.POSTED


def test_a_plan_that_raises_loses_and_repeats_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.engine import pipeline as module

    line = pipeline(full=Span.from_slots(range(20, 24)))
    line.add({"full": Span.from_slots([1, 2, 3, 4])})

    def cut(*_: object) -> None:
        raise ArithmeticError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(module, "Cut", cut)
        with pytest.raises(ArithmeticError):
            line.head()
    assert lists(line.drop()) == {"full": [1, 2, 3, 4]}


def test_giving_up_while_a_plan_is_being_cut_frees_each_block_once() -> None:
    """Two of ten blocks are in a write that was taken, eight are planned and not cut."""
    line = pipeline(full=Span.from_slots(range(20, 30)))
    line.add({"full": Span.from_slots(range(1, 11))})
    assert line.head() is not None
    write = line.take(1)
    assert lists(line.drop()) == {}  # one piece: it leaves with its last write
    assert not line.has_work
    write.follow(WriteEvent.POST)
    assert lists(line.settle(write, WriteEvent.COMPLETE)) == {"full": list(range(1, 11))}
    assert line.missing()["full"].tolist() == list(range(10))


def test_large_chunks_are_planned_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.engine.pipeline.PLAN_STEP_DESCRIPTORS_MAX", 4)
    line = pipeline(full=Span.from_slots(range(20)))
    line.add({"full": Span.from_slots(range(30, 50))})
    planned = 0
    while line.has_work:
        planned += line.must_plan
        line.head()
        line.take(100 + planned * 10 + line.writes_open)
    assert planned == 5


@pytest.mark.parametrize("seed", range(40))
def test_every_needed_byte_moves_once_and_every_block_comes_back_once(seed: int) -> None:
    rng = random.Random(seed)
    needs, held = {}, {}
    for group in ("full", "side"):
        ordinals = sorted(rng.sample(range(40), rng.randrange(30)))
        slots = rng.sample(range(SLOTS), len(ordinals))
        needs[group] = Span.from_runs([(o, [s]) for o, s in zip(ordinals, slots, strict=True)])
        held[group] = dict(zip(range(40), rng.sample(range(SLOTS), 40), strict=True))
    line = pipeline(**needs)
    back: list[tuple[str, int]] = []
    open_: list = []
    moved: list[tuple[int, int, int]] = []
    chunks = [(g, o) for g in needs for o in range(0, 40, 4)]
    rng.shuffle(chunks)
    pushed: set[tuple[str, int]] = set()
    give_up = rng.random() < 0.3

    def collect(slots: dict) -> None:
        back.extend((g, s) for g, array in slots.items() for s in array.tolist())

    number = 0
    while chunks or line.has_work or open_:
        action = rng.random()
        if chunks and action < 0.3:
            group, first = chunks.pop()
            slots = [held[group][o] for o in range(first, first + 4)]
            pushed |= {(group, slot) for slot in slots}
            collect(line.add({group: Span.from_slots(slots, first)}))
        elif line.has_work and action < 0.6:
            assert line.head() is not None
            number += 1
            open_.append(line.take(number))
        elif open_:
            write = open_.pop(rng.randrange(len(open_)))
            if rng.random() < 0.2:
                line.requeue(write)
                continue
            copies = write.copies
            moved += zip(
                copies.source.tolist(), copies.target.tolist(), copies.lengths.tolist(), strict=True
            )
            collect(line.settle(write, WriteEvent.COMPLETE))
        if give_up and not chunks and rng.random() < 0.2:
            collect(line.drop())
        line.check_integrity()
    assert sorted(back) == sorted(pushed), f"seed {seed}"
    wanted = {
        (address_of(SOURCE, g, held[g][o]), address_of(TARGET, g, s))
        for g, span in needs.items()
        for o, s in zip(span.ordinals().tolist(), span.slots().tolist(), strict=True)
    }
    pairs = [
        (source + at, target + at)
        for source, target, length in moved
        for at in range(0, length, BLOCK_BYTES)
    ]
    assert len(pairs) == len(set(pairs)), f"seed {seed}: moved twice"
    assert set(pairs) <= wanted, f"seed {seed}"
    if not give_up:
        assert set(pairs) == wanted, f"seed {seed}"
        assert line.missing() == {}
        assert line.bytes_done == len(wanted) * BLOCK_BYTES


def address_of(base: int, group: str, slot: int) -> int:
    start = {"full": 0x100_0000, "side": 0x200_0000}[group]
    address = base + start + slot * BLOCK_BYTES
    assert slots_of([address], [BLOCK_BYTES], base) == {(group, slot)}
    return address


def test_shapes_stay_aligned() -> None:
    line = pipeline(full=Span.from_slots([30, 10, 20]))
    line.add({"full": Span.from_slots([3, 2, 1])})
    (write, *rest) = take_all(line)
    sources = np.concatenate([w.copies.source for w in (write, *rest)])
    targets = np.concatenate([w.copies.target for w in (write, *rest)])
    slots = {
        (int(s - SOURCE - 0x100_0000) // BLOCK_BYTES, int(t - TARGET - 0x100_0000) // BLOCK_BYTES)
        for s, t in zip(sources, targets, strict=True)
    }
    assert slots == {(3, 30), (2, 10), (1, 20)}
