"""What must always be true, judged from outside: calls, frames, posts, landings and callbacks.

    I1  no byte lands in a slot that is not under a live lease of that transfer, and no write is
        posted after the target's own count of its permit
    I2  a landed byte is of the coordinate that its place is lent for, and lands once
    I3  done means that every needed byte is in place
    I4  every transfer ends exactly once on each side, within its deadlines
    I6  slots come back exactly once, when nothing can land in them (or be read from them) any more

Two rules: nothing here asks the engine or uses its code, and the first violation ends the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .geometry import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .arena import Landing, Space

SLACK_S = 1.0  # over a deadline: rounds of the sweep, a clock 1% off, a busy process
EVIDENCE = frozenset({"never-exposed", "drained", "source-ended", "settled"})


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False)
class Side:
    """One side of one transfer as its caller sees it.

    peer: the source's name on the target's side, whose word is the evidence; else empty.
    blocks: {group: {ordinal: slot}} that this side lends, as far as it has lent them.
    """

    number: int
    title: str
    request: int
    attempt: int
    peer: str
    space: Space
    blocks: dict[str, dict[int, int]]
    started_s: float
    match_s: float
    total_s: float
    pauses_s: Callable[[], float]
    began: bool = False
    ended_s: float | None = None
    outcome: str = ""
    released: dict[str, set[int]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int]:
        """(request, attempt, branch) as frames have it."""
        return f"r{self.request}", self.attempt, 0

    def lent(self, group: str) -> set[int]:
        return set(self.blocks.get(group, {}).values())

    @property
    def outstanding(self) -> int:
        """Slots that have not come back."""
        return sum(len(blocks) for blocks in self.blocks.values()) - sum(
            len(slots) for slots in self.released.values()
        )


@dataclass(eq=False)
class PostedWrite:
    """A write between its post and the moment when nothing of it can move any more.

    reads: whether it still reads its source; what is left of it is in buffers afterwards.
    """

    number: int
    source: Space
    target: Space
    source_bytes: NDArray[np.int64]
    target_bytes: NDArray[np.int64]
    leases: tuple[int, ...]
    reads: bool = True

    def touches(self, side: Side) -> bool:
        """Whether it moves bytes of what a side lends or lent."""
        if side.space is self.target:
            return side.number in self.leases
        return side.space is self.source and any(
            _overlaps(self.source_bytes, side.space.range(group, slot))
            for group, blocks in side.blocks.items()
            for slot in blocks.values()
        )


class Checkers:
    """Every checker of one run. `violations` is empty while all is well."""

    def __init__(self, time_s: Callable[[], float], on_violation: Callable[[], None]) -> None:
        self._time_s = time_s
        self._on_violation = on_violation
        self.violations: list[str] = []
        self.involved: int | None = None
        self.over = False  # the run was judged: what is taken down then is no part of it
        self.events: list[tuple[float, int | None, str]] = []
        self.receives: list[Side] = []
        self.sends: list[Side] = []
        self.flying: list[PostedWrite] = []
        self.lost: list[PostedWrite] = []  # nobody will ever hear how they ended
        self.failed: list[PostedWrite] = []  # ended by an error: some of it may come late
        self._frames: dict[tuple[int, tuple[str, int, int]], list[str]] = {}
        self._moving: dict[int, list[float]] = {}  # when a request was said to be matched
        self._permits: dict[tuple[str, str], float] = {}
        self._leases: dict[int, Side] = {}

    # ------------------------------------------------------------ telling

    def note(self, request: int | None, text: str) -> None:
        """Remember something for the story of a request; None concerns all."""
        if not self.over:
            self.events.append((self._time_s(), request, text))

    def violate(self, invariant: str, text: str, request: int | None = None) -> None:
        if self.over:
            return
        if not self.violations:
            self.involved = request
        self.note(request, f"VIOLATION {invariant}: {text}")
        self.violations.append(f"{invariant}: {text}")
        self._on_violation()

    def story(self, events_max: int = 60) -> str:
        """What happened to the request of the first violation, latest last."""
        mine = [e for e in self.events if e[1] is None or e[1] == self.involved]
        return "\n".join(f"  {t:11.6f} s  {text}" for t, _, text in mine[-events_max:])

    def story_hash(self) -> str:
        """Hash over every event of the run."""
        text = "\n".join(f"{t:.9f} {request} {text}" for t, request, text in self.events)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    # ------------------------------------------------------------ what the callers do

    def receive_begins(self, side: Side) -> None:
        """The target lends its slots from now on."""
        side.began = True
        self.receives.append(side)
        self._leases[side.number] = side
        for group, blocks in side.blocks.items():
            for ordinal, slot in blocks.items():
                side.space.lend(side.number, group, slot, side.request, ordinal)
        self.note(side.request, f"{side.title}: lends {_show(side.blocks)}")

    def send_begins(self, side: Side) -> None:
        side.began = True
        self.sends.append(side)
        self.note(side.request, f"{side.title}: begins")

    def never_begins(self, side: Side) -> None:
        """The engine took nothing: it was closed, or the caller ended before it asked."""
        if side.began:
            (self.receives if side in self.receives else self.sends).remove(side)
            self.take_back(
                side, {group: list(blocks.values()) for group, blocks in side.blocks.items()}
            )
            self.note(side.request, f"{side.title}: never begins")

    def pushes(self, side: Side, chunk: dict[str, dict[int, int]]) -> None:
        """The source lends these blocks to be read."""
        for group, blocks in chunk.items():
            side.blocks.setdefault(group, {}).update(blocks)
        self.note(side.request, f"{side.title}: pushes {_show(chunk)}")

    def ends(self, side: Side, outcome: str) -> None:
        """`await` on a side returned or raised."""
        now = self._time_s()
        if side.ended_s is not None:
            if outcome != side.outcome:
                self.violate(
                    "I4", f"{side.title} ended {side.outcome}, then {outcome}", side.request
                )
            return
        self.note(side.request, f"{side.title}: ends: {outcome}")
        side.ended_s, side.outcome = now, outcome
        if outcome.startswith(("InternalError", "UsageError")):
            self.violate("no error is lost", f"{side.title}: {outcome}", side.request)
        matched = any(
            side.started_s <= at <= side.started_s + side.match_s + SLACK_S + side.pauses_s()
            for at in self._moving.get(side.request, ())
        )
        for name, limit_s in (("match", side.match_s), ("total", side.total_s)):
            late_s = now - side.started_s - limit_s - side.pauses_s()
            if late_s > SLACK_S and not (matched and name == "match"):
                self.violate(
                    "I4",
                    f"{side.title} ended {late_s:.3f} s after its {name} deadline",
                    side.request,
                )

    def is_done(self, side: Side, tokens: int) -> None:
        """The target was told done, for `tokens`: every needed byte must be in place, once."""
        for group, blocks in side.blocks.items():
            for ordinal, slot in blocks.items():
                why = side.space.in_place(group, slot, side.request, ordinal, tokens)
                if why:
                    self.violate(
                        "I3", f"{side.title} is done for {tokens} tokens, but {why}", side.request
                    )
                    return

    def releases(self, side: Side, slots: dict[str, Any], evidence: str) -> dict[str, list[int]]:
        """`on_released` was called; return the slots as plain integers."""
        plain = {group: [int(slot) for slot in array] for group, array in slots.items()}
        self.note(side.request, f"{side.title}: gets back {plain}, evidence {evidence}")
        if str(evidence) not in EVIDENCE:
            self.violate("I6", f"{side.title}: unknown evidence {evidence!r}", side.request)
        for group, given in plain.items():
            known = side.released.setdefault(group, set())
            strange = set(given) - side.lent(group)
            if strange or set(given) & known or len(set(given)) != len(given):
                self.violate(
                    "I6",
                    f"{side.title}: {group} slots {given} come back, lent are "
                    f"{sorted(side.lent(group))}, back already {sorted(known)}",
                    side.request,
                )
            known |= set(given)
        self._check_quiet(side, plain)
        return plain

    def _check_quiet(self, side: Side, slots: dict[str, list[int]]) -> None:
        """No posted write may still move bytes of slots that come back."""
        for write in self.flying:
            for space, offsets, moves in (
                (write.target, write.target_bytes, True),
                (write.source, write.source_bytes, write.reads),
            ):
                if space is not side.space or not moves:
                    continue
                for group, given in slots.items():
                    for slot in given:
                        if _overlaps(offsets, space.range(group, slot)):
                            self.violate(
                                "I6",
                                f"{side.title}: {group} slot {slot} comes back while write "
                                f"{write.number} of {write.source.owner} still moves",
                                side.request,
                            )
                            return

    def take_back(self, side: Side, slots: dict[str, list[int]]) -> None:
        """The target's lease of these slots is over."""
        for group, given in slots.items():
            for slot in given:
                side.space.end_lease(group, slot)

    # ------------------------------------------------------------ frames

    def frame(self, connection: int, kind: str, key: tuple[str, int, int], request: int) -> None:
        """A message about a key was sent: what ends it is said once per connection."""
        said = self._frames.setdefault((connection, key), [])
        said.append(kind)
        if kind == "moving":
            self._moving.setdefault(request, []).append(self._time_s())
        for final in (("done", "failed"), ("drained",), ("offer",)):
            if kind in final and sum(said.count(one) for one in final) > 1:
                self.violate("I4", f"{'#'.join(map(str, key))}: told twice: {said}", request)
        if kind != "drained" and kind in ("moving", "failed") and "done" in said:
            self.violate("I4", f"{'#'.join(map(str, key))}: {kind} after done: {said}", request)

    # ------------------------------------------------------------ permits

    def granted(self, target: str, source: str, until_s: float) -> None:
        """`target` told `source` that it may post; the target's own count ends at `until_s`."""
        known = self._permits.get((target, source), 0.0)
        self._permits[target, source] = max(known, until_s)

    # ------------------------------------------------------------ writes

    def posts(self, write: PostedWrite) -> None:
        """A write is handed to the transport: from now on its bytes may land."""
        now = self._time_s()
        until = self._permits.get((write.target.owner, write.source.owner), 0.0)
        request = self._request_at(write.target, write.target_bytes)
        self.note(
            request,
            f"{write.source.owner} posts write {write.number}: {len(write.target_bytes)} bytes to "
            f"{write.target.where(int(write.target_bytes[0]))}",
        )
        if now > until and write.target.alive:
            self.violate(
                "I1",
                f"write {write.number} of {write.source.owner} to {write.target.owner} was posted "
                f"{now - until:.6f} s after the target's count of its permit",
                request,
            )
        self.flying.append(write)

    def settles(self, write: PostedWrite) -> None:
        """Nothing of a write can move any more."""
        if write in self.flying:
            self.flying.remove(write)

    def lands(self, landing: Landing) -> None:
        """Bytes are about to land."""
        target, to = landing.target, landing.target_offsets
        tags = landing.tags
        if np.any((to < 0) | (to >= target.size)):
            self.violate("I2", f"bytes land outside of every pool of {target.owner}")
            return
        lease = target.lease[to]
        wild = np.flatnonzero(lease == 0)
        if wild.size:
            byte, tag = int(to[wild[0]]), int(tags[wild[0]])
            self.violate(
                "I1",
                f"{wild.size} bytes of {describe(tag)} land in {target.where(byte)}, "
                "which is not lent",
                _request_of(tag),
            )
            return
        wrong = np.flatnonzero(target.expected[to] != tags)
        if wrong.size:
            byte, tag = int(to[wrong[0]]), int(tags[wrong[0]])
            lent = int(target.expected[byte])
            invariant = "I2" if _request_of(tag) == _request_of(lent) else "I1"
            self.violate(
                invariant,
                f"{describe(tag)} lands in {target.where(byte)}, lent for {describe(lent)}",
                _request_of(lent),
            )
            return
        if np.any(target.landed[to] > 0):
            byte = int(to[np.flatnonzero(target.landed[to] > 0)[0]])
            self.violate("I2", f"{target.where(byte)} is written twice", _request_of(int(tags[0])))

    def lands_of(self, write: PostedWrite) -> None:
        """Bytes of a known write are about to land: the lease must be the one it was posted for."""
        now = tuple(int(n) for n in np.unique(write.target.lease[write.target_bytes]))
        if now != write.leases and write.target.alive:
            self.violate(
                "I1",
                f"write {write.number} of {write.source.owner} was posted for leases "
                f"{write.leases}, and lands under {now}",
                self._request_at(write.target, write.target_bytes),
            )

    def _request_at(self, space: Space, offsets: NDArray[np.int64]) -> int | None:
        side = self._leases.get(int(space.lease[offsets[0]]))
        return side.request if side is not None else None


def _overlaps(offsets: NDArray[np.int64], where: slice) -> bool:
    return bool(np.any((offsets >= where.start) & (offsets < where.stop)))


def _request_of(tag: int) -> int | None:
    return tag >> 40 if tag >= 0 else None


def _show(blocks: dict[str, dict[int, int]]) -> str:
    return ", ".join(f"{group} {blocks_of}" for group, blocks_of in blocks.items())
