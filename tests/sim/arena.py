"""Simulated memory: the pools of every process in one address space, with an owner for each byte.

Beside its value every byte carries the tag of the coordinate that it holds, the tag that its
lease expects, the lease's number and how often it was written under it. Two rules: only `copy`
moves bytes between processes, and every copy is shown to the checkers before it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .geometry import NOTHING, SimGroup, values

_SPACE_BITS = 32


@dataclass(frozen=True, slots=True)
class Landing:
    """Bytes that land: aligned offsets into two spaces, and what was read there.

    Shapes: int64[n] each, `data` uint8[n]; `data` and `tags` are empty before the read.
    """

    source: Space
    source_offsets: NDArray[np.int64]
    target: Space
    target_offsets: NDArray[np.int64]
    data: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    tags: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class Space:
    """The pools of one life of one process: `process` is its name, `owner` names this life.

    Shapes: int[size] each. `data` values, `tag` coordinates held, `expected` coordinates that may
    land, `lease` the number of the live lease (0 for none), `landed` how often the byte was
    written under that lease.
    """

    def __init__(
        self,
        process: str,
        owner: str,
        base: int,
        groups: tuple[SimGroup, ...],
        slots: dict[str, int],
    ) -> None:
        self.process = process
        self.owner = owner
        self.base = base
        self.groups = {group.name: group for group in groups}
        self.slots = slots
        self.alive = True
        self.starts: dict[str, int] = {}
        size = 64
        for group in groups:
            self.starts[group.name] = size
            size += group.stride * slots[group.name] + 64  # a gap that nobody may write
        self.size = size
        self.data = np.full(size, 0xEE, dtype=np.uint8)
        self.tag = np.full(size, NOTHING, dtype=np.int64)
        self.expected = np.full(size, NOTHING, dtype=np.int64)
        self.lease = np.zeros(size, dtype=np.int32)
        self.landed = np.zeros(size, dtype=np.int16)

    def address(self, group: str) -> int:
        return self.base + self.starts[group]

    def range(self, group: str, slot: int) -> slice:
        stride = self.groups[group].stride
        start = self.starts[group] + slot * stride
        return slice(start, start + stride)

    def where(self, offset: int) -> str:
        """An offset as text: group, slot and byte."""
        for name, start in self.starts.items():
            slot, byte = divmod(offset - start, self.groups[name].stride)
            if 0 <= slot < self.slots[name]:
                return f"{self.owner} group {name} slot {slot} byte {byte}"
        return f"{self.owner} outside of every pool, offset {offset}"

    def compute(self, group: str, slot: int, request: int, ordinal: int) -> None:
        """Prefill: put block `ordinal` of `request` into a slot."""
        where = self.range(group, slot)
        tags = self.groups[group].tags(request, ordinal)
        self.tag[where] = tags
        self.data[where] = values(tags)

    def lend(self, lease: int, group: str, slot: int, request: int, ordinal: int) -> None:
        """From now on block `ordinal` of `request` may land in a slot, once, under `lease`."""
        where = self.range(group, slot)
        self.expected[where] = self.groups[group].tags(request, ordinal)
        self.lease[where] = lease
        self.landed[where] = 0

    def end_lease(self, group: str, slot: int) -> None:
        """Nothing may land in the slot any more; what it holds stays until it is wiped."""
        where = self.range(group, slot)
        self.expected[where] = NOTHING
        self.lease[where] = 0

    def wipe(self, group: str, slot: int) -> None:
        """The slot's owner uses it for something else."""
        where = self.range(group, slot)
        self.tag[where] = NOTHING
        self.data[where] = 0xEE

    def in_place(self, group: str, slot: int, request: int, ordinal: int, tokens: int) -> str:
        """Why the slot does not hold block `ordinal` up to `tokens`; empty when it does."""
        where = self.range(group, slot)
        judged = self.groups[group].judged(ordinal, tokens)
        tags = self.groups[group].tags(request, ordinal)
        good = (self.tag[where] == tags) & (self.data[where] == values(tags))
        bad = np.flatnonzero(judged & ~good)
        if bad.size:
            return f"{self.where(where.start + int(bad[0]))}: {bad.size} bytes are not in place"
        twice = np.flatnonzero(judged & (self.landed[where] != 1))
        if twice.size:
            byte = where.start + int(twice[0])
            return f"{self.where(byte)}: was written {int(self.landed[byte])} times"
        return ""


class Arena:
    """Every space, by address; what the simulated transport copies in."""

    def __init__(self, watch: Callable[[Landing], None]) -> None:
        self._spaces: list[Space] = []
        self._watch = watch

    def allocate(
        self, process: str, owner: str, groups: tuple[SimGroup, ...], slots: dict[str, int]
    ) -> Space:
        """Memory for a new process: addresses are never used again."""
        base = (len(self._spaces) + 1) << _SPACE_BITS
        self._spaces.append(Space(process, owner, base, groups, slots))
        return self._spaces[-1]

    def space(self, address: int) -> Space:
        return self._spaces[(address >> _SPACE_BITS) - 1]

    def resolve(
        self,
        source: NDArray[np.int64],
        target: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> Landing:
        """What `copy` of the same arguments would move, byte by byte."""
        steps = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        near, far = self.space(int(source[0])), self.space(int(target[0]))
        return Landing(
            near,
            np.repeat(source - near.base, lengths) + steps,
            far,
            np.repeat(target - far.base, lengths) + steps,
        )

    def copy(
        self,
        source: NDArray[np.int64],
        target: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Copy `lengths[i]` bytes from `source[i]` to `target[i]`, all within two spaces.

        Memory of a dead target takes nothing; that of a dead source still gives (its bytes were
        on their way).
        """
        self.land(self.read(self.resolve(source, target, lengths)))

    def read(self, landing: Landing) -> Landing:
        """The same with what its source holds now: bytes in a buffer on their way."""
        near, from_ = landing.source, landing.source_offsets
        return replace(landing, data=near.data[from_], tags=near.tag[from_])

    def land(self, landing: Landing) -> None:
        """Put bytes that were read before into their place."""
        far, to = landing.target, landing.target_offsets
        if not far.alive:
            return
        self._watch(landing)
        inside = (to >= 0) & (to < far.size)
        far.data[to[inside]] = landing.data[inside]
        far.tag[to[inside]] = landing.tags[inside]
        far.landed[to[inside]] += 1
