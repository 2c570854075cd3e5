"""Every checker sees what it is there for: what an engine never should do, done by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.sim.arena import Arena, Space
from tests.sim.checkers import Checkers, PostedWrite, Side
from tests.sim.geometry import NOTHING, SimGroup, values
from tests.sim.world import GROUPS

FULL = GROUPS[0]
REQUEST, SOURCE_SLOT, TARGET_SLOT, ORDINAL = 5, 1, 2, 3
TOKENS = (ORDINAL + 1) * FULL.tokens_per_block


class Scene:
    """One block on its way from "a" to "b", everything as it should be."""

    def __init__(self) -> None:
        self.now_s = 1.0
        self.checkers = Checkers(lambda: self.now_s, lambda: None)
        self.arena = Arena(self.checkers.lands)
        slots = {group.name: 4 for group in GROUPS}
        self.source = self.arena.allocate("a", "a/0", GROUPS, slots)
        self.target = self.arena.allocate("b", "b/0", GROUPS, slots)
        self.source.compute(FULL.name, SOURCE_SLOT, REQUEST, ORDINAL)
        self.receive = self.side(1, self.target, {FULL.name: {ORDINAL: TARGET_SLOT}})
        self.send = self.side(2, self.source, {})
        self.checkers.granted("b/0", "a/0", until_s=2.0)
        self.checkers.receive_begins(self.receive)
        self.checkers.send_begins(self.send)
        self.checkers.pushes(self.send, {FULL.name: {ORDINAL: SOURCE_SLOT}})

    def side(self, number: int, space: Space, blocks: dict[str, dict[int, int]]) -> Side:
        return Side(
            number=number,
            title=f"side {number}",
            request=REQUEST,
            attempt=1,
            peer="",
            space=space,
            blocks=blocks,
            started_s=1.0,
            match_s=2.0,
            total_s=10.0,
            pauses_s=lambda: 0.0,
        )

    def write(self) -> PostedWrite:
        landing = self.arena.resolve(*self.addresses())
        return PostedWrite(
            7,
            self.source,
            self.target,
            landing.source_offsets,
            landing.target_offsets,
            (self.receive.number,),
        )

    def addresses(
        self, source_slot: int = SOURCE_SLOT, target_slot: int = TARGET_SLOT
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (
            np.array([self.source.address(FULL.name) + source_slot * FULL.stride]),
            np.array([self.target.address(FULL.name) + target_slot * FULL.stride]),
            np.array([FULL.block_bytes]),
        )

    def move(self, **slots: int) -> None:
        self.arena.copy(*self.addresses(**slots))


def test_nothing_is_seen_when_all_is_well() -> None:
    scene = Scene()
    write = scene.write()
    scene.checkers.posts(write)
    scene.checkers.lands_of(write)
    scene.move()
    scene.checkers.settles(write)
    scene.checkers.ends(scene.receive, "done")
    scene.checkers.is_done(scene.receive, TOKENS)
    slots = scene.checkers.releases(scene.receive, {FULL.name: [TARGET_SLOT]}, "drained")
    scene.checkers.take_back(scene.receive, slots)
    scene.checkers.releases(scene.send, {FULL.name: [SOURCE_SLOT]}, "settled")
    assert scene.checkers.violations == []
    assert scene.receive.outstanding == scene.send.outstanding == 0


def lands_unlent(scene: Scene) -> None:
    scene.move(target_slot=TARGET_SLOT + 1)


def lands_after_release(scene: Scene) -> None:
    slots = scene.checkers.releases(scene.receive, {FULL.name: [TARGET_SLOT]}, "drained")
    scene.checkers.take_back(scene.receive, slots)
    scene.move()


def lands_under_another_request(scene: Scene) -> None:
    scene.source.compute(FULL.name, SOURCE_SLOT, REQUEST + 1, ORDINAL)
    scene.move()


def lands_under_another_lease(scene: Scene) -> None:
    write = scene.write()
    scene.target.lend(3, FULL.name, TARGET_SLOT, REQUEST, ORDINAL)
    scene.checkers.lands_of(write)


def posted_without_permit(scene: Scene) -> None:
    scene.now_s = 2.1
    scene.checkers.posts(scene.write())


def lands_in_the_wrong_place(scene: Scene) -> None:
    scene.source.compute(FULL.name, SOURCE_SLOT, REQUEST, ORDINAL - 1)
    scene.move()


def lands_twice(scene: Scene) -> None:
    scene.move()
    scene.move()


def lands_outside(scene: Scene) -> None:
    source, _, lengths = scene.addresses()
    scene.arena.copy(source, np.array([scene.target.base + scene.target.size - 8]), lengths)


def done_too_early(scene: Scene) -> None:
    scene.checkers.is_done(scene.receive, TOKENS)


def done_with_a_flipped_byte(scene: Scene) -> None:
    scene.move()
    scene.target.data[scene.target.range(FULL.name, TARGET_SLOT).start + 9] ^= 1
    scene.checkers.is_done(scene.receive, TOKENS)


def ends_twice(scene: Scene) -> None:
    scene.checkers.ends(scene.receive, "done")
    scene.checkers.ends(scene.receive, "Cancelled")


def ends_late(scene: Scene) -> None:
    scene.checkers.frame(1, "moving", ("r5", 1, 0), REQUEST)
    scene.now_s = 12.5
    scene.checkers.ends(scene.receive, "TimedOut")


def matches_late(scene: Scene) -> None:
    scene.now_s = 4.5
    scene.checkers.ends(scene.receive, "TimedOut")


def told_done_twice(scene: Scene) -> None:
    for _ in range(2):
        scene.checkers.frame(1, "done", ("r5", 1, 0), REQUEST)


def released_twice(scene: Scene) -> None:
    for _ in range(2):
        scene.checkers.releases(scene.receive, {FULL.name: [TARGET_SLOT]}, "drained")


def released_strange_slot(scene: Scene) -> None:
    scene.checkers.releases(scene.receive, {FULL.name: [TARGET_SLOT + 1]}, "drained")


def released_without_evidence(scene: Scene) -> None:
    scene.checkers.releases(scene.receive, {FULL.name: [TARGET_SLOT]}, "")


def released_while_written(scene: Scene) -> None:
    scene.checkers.posts(scene.write())
    scene.checkers.releases(scene.receive, {FULL.name: [TARGET_SLOT]}, "drained")


def released_while_buffered(scene: Scene) -> None:
    write = scene.write()
    scene.checkers.posts(write)
    write.reads = False
    scene.checkers.releases(scene.send, {FULL.name: [SOURCE_SLOT]}, "settled")
    assert not scene.checkers.violations
    scene.checkers.releases(scene.receive, {FULL.name: [TARGET_SLOT]}, "drained")


def released_while_read(scene: Scene) -> None:
    scene.checkers.posts(scene.write())
    scene.checkers.releases(scene.send, {FULL.name: [SOURCE_SLOT]}, "settled")


@pytest.mark.parametrize(
    ("act", "invariant"),
    [
        (lands_unlent, "I1"),
        (lands_after_release, "I1"),
        (lands_under_another_request, "I1"),
        (lands_under_another_lease, "I1"),
        (posted_without_permit, "I1"),
        (lands_in_the_wrong_place, "I2"),
        (lands_twice, "I2"),
        (lands_outside, "I2"),
        (done_too_early, "I3"),
        (done_with_a_flipped_byte, "I3"),
        (ends_twice, "I4"),
        (ends_late, "I4"),
        (matches_late, "I4"),
        (told_done_twice, "I4"),
        (released_twice, "I6"),
        (released_strange_slot, "I6"),
        (released_without_evidence, "I6"),
        (released_while_written, "I6"),
        (released_while_buffered, "I6"),
        (released_while_read, "I6"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_violation_is_seen(act: Callable[[Scene], None], invariant: str) -> None:
    scene = Scene()
    act(scene)
    assert [text.partition(":")[0] for text in scene.checkers.violations[:1]] == [invariant]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_coordinates_are_told_apart(group: SimGroup) -> None:
    """Every byte of several blocks and requests has a tag of its own, and bytes mostly differ."""
    tags = np.concatenate([group.tags(request, o) for request in (1, 2) for o in range(8)])
    tags = tags[tags != NOTHING]
    assert len(np.unique(tags)) == len(tags) == 2 * 8 * group.block_bytes
    blocks = values(tags).reshape(16, -1)
    for one in range(16):
        for other in range(one):
            assert np.mean(blocks[one] == blocks[other]) < 0.05


def test_window_needs_its_sink_and_its_end() -> None:
    window = GROUPS[1]
    assert window.needed(5) == [0, 1, 2]
    assert window.needed(20) == [0, 7, 8, 9]
    assert GROUPS[0].needed(5) == [0, 1]
