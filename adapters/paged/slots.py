"""The slots of pools: which are free, and who keeps the others from being so.

Two rules: a slot has any number of holders, of three kinds, and whichever drops it last frees it;
groups that lie in one pool draw from one stack, so that no byte is lent to two of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

import numpy as np

from ...engine.errors import KvferryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from ...engine.layout import Layout

    Int64Array = NDArray[np.int64]
    BoolArray = NDArray[np.bool_]

# table: the blocks of a request, or of a prefix that is kept. send: a transfer that may still read.
# receive: a transfer that may still write.
Holder = Literal["table", "send", "receive"]
HOLDERS: Final[tuple[Holder, ...]] = get_args(Holder)


class OutOfBlocks(KvferryError):
    """There are too few free blocks; nothing was taken. Try again when some were freed.

    group: which lacks them. wanted, free: blocks. Groups that share a pool are served in the
    layout's order, so `free` is what the groups before have left.
    """

    def __init__(self, group: str, wanted: int, free: int) -> None:
        super().__init__(
            f"group {group!r}: {wanted} blocks are wanted, {free} are free",
            by="caller",
            code="out-of-blocks",
            retry_safe=True,
        )
        self.group, self.wanted, self.free = group, wanted, free


class Counts(NamedTuple):
    """Where the slots of a group are, each in one place; of a pool that groups share, all of them.

    free: can be lent. tabled: only in tables, of requests or of prefixes. pinned: a send may still
    read them. leased: a receive may still write to them.
    """

    free: int
    tabled: int
    pinned: int
    leased: int


class SlotSpace:
    """One numbering of slots. What was freed last is lent first, so that a mistake shows at once.

    slots: how many there are; reserved: those of them that are never lent.
    random: None lends ascending slots as long as nothing was freed; with a generator the order is
    shuffled, then and whenever slots are freed.
    """

    def __init__(
        self, slots: int, reserved: Iterable[int], random: np.random.Generator | None = None
    ) -> None:
        usable = np.setdiff1d(np.arange(slots), np.array([*reserved], dtype=np.int64))
        self.usable = int(usable.size)
        self.free = 0
        self.held = {holder: np.zeros(slots, dtype=np.int64) for holder in HOLDERS}
        self._stack = np.empty_like(usable)
        self._random = random
        self._put(usable)

    def take(self, count: int) -> Int64Array:
        """Lend `count` free slots, of which there must be as many, to a table: int64[count]."""
        assert count <= self.free, f"{count} slots are taken, {self.free} are free"
        self.free -= count
        slots = self._stack[self.free : self.free + count][::-1].copy()
        self.hold("table", slots)
        return slots

    def hold(self, holder: Holder, slots: Int64Array) -> None:
        """One more holder of each of these slots: int64[n], each once."""
        self.held[holder][slots] += 1

    def drop(self, holder: Holder, slots: Int64Array) -> None:
        """One holder less of each of these slots: int64[n], each once."""
        held = self.held[holder]
        assert (held[slots] > 0).all(), f"a {holder} drops slots that it does not hold"
        held[slots] -= 1
        self._put(slots[self._holders(slots) == 0])

    def counts(self) -> Counts:
        """Where the slots are."""
        leased, pinned = self.held["receive"] > 0, self.held["send"] > 0
        written, read = int(leased.sum()), int((pinned & ~leased).sum())
        return Counts(self.free, self.usable - self.free - read - written, read, written)

    def check(self, tabled: Int64Array) -> None:
        """Raise AssertionError unless every slot is free, or held, by these tables among others.

        tabled: how many tables hold each slot: int64[slots].
        """
        assert np.array_equal(self.held["table"], tabled), "the tables hold other slots"
        assert self.held["receive"].max() <= 1, "two receives share a slot"
        free = self._stack[: self.free]
        assert np.unique(free).size == free.size, "a slot is free twice"
        assert not self._holders(free).any(), "a slot that is held is free"
        held = int(np.count_nonzero(self._holders(np.arange(tabled.size))))
        assert held + self.free == self.usable, "a slot is neither held nor free"

    def _holders(self, slots: Int64Array) -> Int64Array:
        counts: Int64Array = np.sum([held[slots] for held in self.held.values()], axis=0)
        return counts

    def _put(self, slots: Int64Array) -> None:
        order = slots[::-1] if self._random is None else self._random.permutation(slots)
        self._stack[self.free : self.free + slots.size] = order
        self.free += int(slots.size)


class Slots:
    """The slots of every group of a layout. Groups that share a pool share a space."""

    def __init__(self, layout: Layout, seed: int | None) -> None:
        self._spaces: dict[str, SlotSpace] = {}
        for index, (pools, groups) in enumerate(_parts(layout)):
            described = [layout.pool(name) for name in pools]
            space = SlotSpace(
                min(pool.slots for pool in described),
                {slot for pool in described for slot in pool.reserved},
                None if seed is None else np.random.default_rng([seed, index]),
            )
            self._spaces.update(dict.fromkeys(groups, space))

    def take(self, wanted: Mapping[str, int]) -> dict[str, Int64Array]:
        """Slots for each group, held by a table; or OutOfBlocks, and none for any."""
        left = {space: space.free for space in self._spaces.values()}
        for group, count in wanted.items():
            space = self._spaces[group]
            if count > left[space]:
                raise OutOfBlocks(group, count, left[space])
            left[space] -= count
        return {group: self._spaces[group].take(count) for group, count in wanted.items()}

    def hold(self, holder: Holder, group: str, slots: Int64Array) -> None:
        """One more holder of each of these slots: int64[n], each once."""
        self._spaces[group].hold(holder, slots)

    def drop(self, holder: Holder, group: str, slots: Int64Array) -> None:
        """One holder less of each of these slots: int64[n], each once."""
        self._spaces[group].drop(holder, slots)

    def leased(self, group: str, slots: Int64Array) -> BoolArray:
        """Which of these slots a receive holds: bool[n]."""
        return self._spaces[group].held["receive"][slots] > 0

    def counts(self, group: str) -> Counts:
        """Where the slots of a group are."""
        return self._spaces[group].counts()

    @property
    def all_free(self) -> bool:
        """True when nobody holds any slot."""
        return all(space.free == space.usable for space in self._spaces.values())

    def check(self, tabled: Iterable[tuple[str, Int64Array]]) -> None:
        """Raise AssertionError unless every slot is accounted for, once.

        tabled: (group, slots) of every table.
        """
        counted = {space: np.zeros_like(space.held["table"]) for space in self._spaces.values()}
        for group, slots in tabled:
            np.add.at(counted[self._spaces[group]], slots, 1)
        for space, counts in counted.items():
            space.check(counts)


def _parts(layout: Layout) -> list[tuple[set[str], list[str]]]:
    """(pools, groups in them), apart from each other: sharing by way of a third group counts."""
    parts: list[tuple[set[str], list[str]]] = []
    for group in layout.groups:
        pools, groups = {tensor.pool for tensor in group.tensors}, [group.name]
        for part in [part for part in parts if part[0] & pools]:
            parts.remove(part)
            pools, groups = part[0] | pools, part[1] + groups
        parts.append((pools, groups))
    return parts
