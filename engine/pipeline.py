"""One source transfer's way from pushed spans to writes: extract, align, plan, post, settle.

Pure. Pushed chunks are aligned with the need at once (array operations) and planned later, a
bounded step at a time, when the scheduler has credit for them. Two rules: an ordinal is planned
at most once, and source blocks leave the pipeline exactly once: not needed, settled, or dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .align import Pairs, Stream, steps
from .limits import PLAN_STEP_DESCRIPTORS_MAX
from .plan import Copies, Cut, Flow, plan
from .transitions import WRITE, WRITES_SETTLED, Write, WriteEvent, follow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .lease import Slots
    from .ports import Int64Array, WriteBounds
    from .spans import Span
    from .template import Template


@dataclass(slots=True, eq=False)
class Piece:
    """Pairs of blocks of one group that are planned together, and released together.

    flows_left: of its plan, not all cut into writes. writes_open: cut and not settled.
    """

    group: str
    pairs: Pairs
    flows_left: int = 0
    writes_open: int = 0
    failed: bool = False

    def source_slots(self) -> Int64Array:
        """The piece's source blocks, each once."""
        slots = self.pairs.source_slots
        return slots if self.pairs.shift is None else np.unique(slots)


@dataclass(slots=True, eq=False)
class PlannedWrite:
    """One write of a piece, with its state."""

    piece: Piece
    flow: Flow
    copies: Copies
    state: Write = Write.QUEUED
    number: int = 0

    def follow(self, event: WriteEvent) -> None:
        """Change state. Raises IllegalTransition, leaving it unchanged."""
        self.state = follow(WRITE, self.state, event)


@dataclass(slots=True)
class _Planned:
    """A flow of a piece that is being cut into writes."""

    piece: Piece
    flow: Flow
    cut: Cut


@dataclass(slots=True)
class _Cover:
    """Which ordinals of one group's need are in place."""

    ordinals: Int64Array
    settled: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.settled = np.zeros(len(self.ordinals), dtype=bool)

    def mark(self, ordinals: Int64Array) -> None:
        self.settled[np.searchsorted(self.ordinals, ordinals)] = True


class Pipeline:
    """What one transfer still has to move. See the module's docstring.

    need: {group: span of target slots}, already cut to the `tokens` that are transferred.
    template: gives the copy template of a group.
    """

    def __init__(
        self,
        need: Mapping[str, Span],
        tokens: int,
        template: Callable[[str], Template],
        bounds: WriteBounds,
    ) -> None:
        self._template = template
        self._bounds = bounds
        self._streams = {
            group: Stream(
                span, template(group).target_tokens, template(group).source_tokens, tokens
            )
            for group, span in need.items()
        }
        self._aligned: deque[Piece] = deque()
        self._planned: deque[_Planned] = deque()
        self._queued: deque[PlannedWrite] = deque()
        self._open: dict[int, PlannedWrite] = {}
        self._cover = {group: _Cover(span.ordinals()) for group, span in need.items()}
        self.bytes_done = 0

    @property
    def has_work(self) -> bool:
        """True when a write can be taken."""
        return bool(self._queued or self._planned or self._aligned)

    @property
    def must_plan(self) -> bool:
        """True when `head` has to plan a step first."""
        return bool(self._aligned) and not (self._queued or self._planned)

    @property
    def writes_open(self) -> int:
        """Writes that were taken and did not settle: handed, posted or in doubt."""
        return len(self._open)

    def open_writes(self) -> list[PlannedWrite]:
        """The writes that were taken and did not settle."""
        return list(self._open.values())

    def add(self, chunk: Mapping[str, Span]) -> Slots:
        """Take ready source blocks; return those that the target does not need."""
        unneeded: Slots = {}
        for group, span in chunk.items():
            stream = self._streams.get(group)
            if stream is None:
                unneeded[group] = span.slots()
                continue
            pairs, unneeded[group] = stream.add(span)
            template = self._template(group)
            sizes = template.target_tokens, template.source_tokens
            size = max(1, PLAN_STEP_DESCRIPTORS_MAX // template.fragments_per_block)
            for part in steps(pairs, *sizes, size):
                self._aligned.append(Piece(group, part))
        return {group: slots for group, slots in unneeded.items() if slots.size}

    def head(self) -> PlannedWrite | None:
        """The next write, planning a step when none is planned. Does not take it."""
        if self.must_plan:
            self._planned.extend(self._plan(self._aligned[0]))
            self._aligned.popleft()  # only now: a plan that raises leaves its blocks to `drop`
        if not self._queued and self._planned:
            planned = self._planned[0]
            self._queued.append(PlannedWrite(planned.piece, planned.flow, next(planned.cut)))
            planned.piece.writes_open += 1
            if planned.cut.is_over:
                planned.piece.flows_left -= 1
                self._planned.popleft()
        return self._queued[0] if self._queued else None

    def take(self, number: int) -> PlannedWrite:
        """Take the head: it is handed to the I/O thread under `number`."""
        write = self._queued.popleft()
        write.follow(WriteEvent.HAND)
        write.number = number
        self._open[number] = write
        return write

    def settle(self, write: PlannedWrite, event: WriteEvent) -> Slots:
        """A taken write ended; return the source blocks that are free now."""
        write.follow(event)
        del self._open[write.number]
        if write.state is Write.DONE:
            self.bytes_done += write.copies.bytes
        else:
            write.piece.failed = True
        return self._close(write.piece)

    def requeue(self, write: PlannedWrite) -> None:
        """A taken write was never posted, and is still wanted: queue it again, first."""
        write.follow(WriteEvent.DROP)
        del self._open[write.number]
        self._queued.appendleft(PlannedWrite(write.piece, write.flow, write.copies))

    def drop(self) -> Slots:
        """Give up what was not taken; return the source blocks that are free now."""
        free: dict[str, list[Int64Array]] = {}
        for group, stream in self._streams.items():
            free[group] = [stream.drop()]
        for piece in self._aligned:
            free[piece.group].append(piece.source_slots())
        self._aligned.clear()
        while self._queued:
            write = self._queued.popleft()
            write.follow(WriteEvent.DROP)
            write.piece.failed = True
            for group, slots in self._close(write.piece).items():
                free[group].append(slots)
        for planned in self._planned:
            planned.piece.failed = True
            planned.piece.flows_left -= 1
            if not planned.piece.flows_left and not planned.piece.writes_open:
                free[planned.piece.group].append(planned.piece.source_slots())
        self._planned.clear()
        together = {group: np.concatenate(parts) for group, parts in free.items()}
        return {group: slots for group, slots in together.items() if slots.size}

    def missing(self) -> dict[str, Int64Array]:
        """The needed ordinals that are not in place, of each group that lacks some."""
        lacking = {group: c.ordinals[~c.settled] for group, c in self._cover.items()}
        return {group: ordinals for group, ordinals in lacking.items() if len(ordinals)}

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts contradict each other."""
        for write in self._open.values():
            assert write.state not in WRITES_SETTLED, f"write {write.number} is {write.state}"
            assert write.piece.writes_open > 0, f"write {write.number}: its piece is closed"

    def _plan(self, piece: Piece) -> list[_Planned]:
        template, pairs = self._template(piece.group), piece.pairs
        bounds = self._bounds
        planned = [
            _Planned(piece, flow, Cut(flow.copies, bounds.descriptors_max, bounds.bytes_max))
            for flow in plan(template, pairs.source_slots, pairs.target_slots, pairs.shift)
        ]
        piece.flows_left = len(planned)
        return planned

    def _close(self, piece: Piece) -> Slots:
        piece.writes_open -= 1
        if piece.writes_open or piece.flows_left:
            return {}
        if not piece.failed:
            self._cover[piece.group].mark(piece.pairs.ordinals)
        return {piece.group: piece.source_slots()}
