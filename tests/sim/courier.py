"""What becomes of each write: torn, late, failed, in doubt, its completion late or lost.

Implements the memory transport's `Courier`, and is where posts are seen by the checkers. Two
rules: no fate breaks the fabric's own promise (a settled write moves no more), and while a path
is cut nothing of it lands and nothing of it is reported.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvferry.engine.ports import NotPosted, Progress
from kvferry.transports.memory import Fabric, Fate, Piece, Report

from .checkers import PostedWrite
from .options import Fault

if TYPE_CHECKING:
    from kvferry.engine.ports import Post

    from .arena import Arena, Landing
    from .checkers import Checkers
    from .loop import SimLoop
    from .network import Internet
    from .options import Options

WIRE_S = (2e-6, 3e-4)  # from the post to the landing, when nothing is wrong
AT_ONCE = 0.3  # chance that a write is over before its post returns, as small ones are on cma
BEFORE_NS = 1_000  # a source is read for the last time this long before anybody may hear it
DOUBT_S = (0.5, 15.0)
LOST = 0.3  # chance that a doubt is never resolved


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


class SimCourier:
    """Decides fates, and knows which write a landing belongs to."""

    def __init__(
        self,
        loop: SimLoop,
        prng: random.Random,
        options: Options,
        internet: Internet,
        arena: Arena,
        checkers: Checkers,
        count: Callable[[Fault], None],
    ) -> None:
        self._loop = loop
        self._prng = prng
        self._options = options
        self._internet = internet
        self._arena = arena
        self._checkers = checkers
        self._count = count
        self._writes: dict[int, PostedWrite] = {}  # by id of a piece's own array
        self._pieces: dict[int, int] = {}  # by id of a write: pieces still to land
        self._leftovers: dict[int, list[Piece]] = {}  # of failing writes, by id of the write
        self._moving: dict[str, set[int]] = {}  # by the source's life: writes that may still move
        self.healed = False
        self.fabric: Fabric | None = None

    # ------------------------------------------------------------ ports of the memory transport

    def carry(self, source: str, target: str, post: Post, now: int) -> Fate:
        """Draw the fate of a write. Raises NotPosted."""
        del source, target  # agents; the addresses say which processes
        if self._hits(self._options.write_refused, Fault.WRITE_REFUSED):
            raise NotPosted("simulated: the transport took nothing")
        write = self._describe(post)
        self._checkers.posts(write)
        fate = self._draw(post, now, write)
        for piece in fate.pieces:
            self._writes[id(piece.source)] = write
        self._pieces[id(write)] = len(fate.pieces)
        self._moving.setdefault(write.source.owner, set()).add(id(write))
        self._settle_if_over(write)
        for piece in fate.pieces:
            self._internet.later(max(piece.at - now, 0) / 1e9, self._advance)
        return fate

    def copy(self, source: np.ndarray, target: np.ndarray, lengths: np.ndarray) -> None:
        """A piece lands: the transport's `Memory`."""
        write = self._writes.pop(id(source))
        self._checkers.lands_of(write)
        self._arena.copy(source, target, lengths)
        self._pieces[id(write)] -= 1
        self._settle_if_over(write)

    def moves_of(self, owner: str) -> bool:
        """Whether anything that this life of a process posted may still land."""
        return bool(self._moving.get(owner))

    def _advance(self) -> None:
        assert self.fabric is not None
        self.fabric.advance()

    # ------------------------------------------------------------ fates

    def _hits(self, rate: float, fault: Fault) -> bool:
        hit = self._prng.random() < rate and not self.healed
        if hit:
            self._count(fault)
        return hit

    def _draw(self, post: Post, now: int, write: PostedWrite) -> Fate:
        prng, options = self._prng, self._options
        open_ = self._internet.open_at(write.source.process, write.target.process)
        start = max(now, ns(open_))
        landed = start + ns(prng.uniform(*WIRE_S))
        at_once = start == now and prng.random() < AT_ONCE
        if at_once:
            landed = now
        if self._hits(options.write_late, Fault.WRITE_LATE):
            landed = start + ns(prng.uniform(0.01, options.write_late_s))
        if self._hits(options.write_failed, Fault.WRITE_FAILED):
            return self._fail(post, start, landed, write)
        if self._hits(options.write_doubted, Fault.WRITE_DOUBTED):
            return self._doubt(post, now, start, write)
        pieces = [Piece(landed, post.source.copy(), post.target, post.lengths)]
        if not at_once and self._hits(options.write_torn, Fault.WRITE_TORN):
            pieces = self._tear(post, start, landed)
        told = landed
        if self._hits(options.completion_late, Fault.COMPLETION_LATE):
            told += ns(prng.uniform(0.001, 3.0))
        return Fate(tuple(pieces), (Report(told, Progress.DONE),))

    def _fail(self, post: Post, start: int, failed: int, write: PostedWrite) -> Fate:
        """Its endpoint broke: some of it is in place, some in the target host's buffers."""
        now = self._loop.now()
        failed = max(failed, now + 2 * BEFORE_NS)
        pieces = self._tear(post, start, failed)
        landed = self._prng.randrange(len(pieces))
        buffered = self._prng.randint(landed, len(pieces))
        self._checkers.failed.append(write)
        self._leftovers[id(write)] = pieces[landed:buffered]
        self._internet.later((failed - BEFORE_NS - now) / 1e9, lambda: self._buffer(write))
        report = Report(failed, Progress.FAILED, "simulated: the endpoint broke")
        return Fate(tuple(pieces[:landed]), (report,))

    def _buffer(self, write: PostedWrite) -> None:
        """The source is not read any more; what was read of it lands whenever it likes."""
        write.reads = False
        for piece in self._leftovers.pop(id(write)):
            bytes_read = self._arena.read(
                self._arena.resolve(piece.source, piece.target, piece.lengths)
            )
            self._pieces[id(write)] = self._pieces.get(id(write), 0) + 1
            delay_s = self._prng.choice((0.001, 0.1, 5.0)) * self._prng.random()
            self._internet.later(delay_s, partial(self._land_late, write, bytes_read))
        self._settle_if_over(write)

    def _land_late(self, write: PostedWrite, bytes_read: Landing) -> None:
        self._count(Fault.BUFFER_LATE)
        self._checkers.lands_of(write)
        self._arena.land(bytes_read)
        self._pieces[id(write)] -= 1
        self._settle_if_over(write)

    def _settle_if_over(self, write: PostedWrite) -> None:
        """Tell the checkers once nothing of a write can move any more."""
        if not self._pieces.get(id(write)) and id(write) not in self._leftovers:
            self._pieces.pop(id(write), None)
            self._moving.get(write.source.owner, set()).discard(id(write))
            self._checkers.settles(write)

    def _doubt(self, post: Post, now: int, start: int, write: PostedWrite) -> Fate:
        """An error that proves nothing; some of it lands much later, and perhaps nobody hears."""
        prng = self._prng
        last = start + ns(prng.uniform(*DOUBT_S))
        doubted = start if prng.random() < 0.3 else now + (last - now) // 2
        pieces = self._tear(post, start, last)
        reports = [Report(doubted, Progress.DOUBT, "simulated: an error of unknown meaning")]
        if prng.random() < 0.5:
            reports.append(Report(last, Progress.DONE))
        else:
            pieces = pieces[: prng.randrange(len(pieces) + 1)]
            if prng.random() < LOST:
                self._count(Fault.COMPLETION_LOST)
                self._checkers.lost.append(write)
            else:
                self._checkers.failed.append(write)
                reports.append(Report(last, Progress.FAILED, "simulated: ended after all"))
        return Fate(tuple(pieces), tuple(reports))

    def _tear(self, post: Post, start: int, last: int) -> list[Piece]:
        """The write in single runs of bytes, in any order, some cut in two, until `last`."""
        prng = self._prng
        runs: list[tuple[int, int, int]] = []
        for from_, to, length in zip(
            post.source.tolist(), post.target.tolist(), post.lengths.tolist(), strict=True
        ):
            middle = prng.randrange(length)
            if middle:
                runs.append((from_, to, middle))
            runs.append((from_ + middle, to + middle, length - middle))
        prng.shuffle(runs)
        times = sorted(prng.randint(start, last) for _ in runs)
        times[-1] = last
        return [
            Piece(at, *(np.array([value], dtype=np.int64) for value in run))
            for at, run in zip(times, runs, strict=True)
        ]

    def _describe(self, post: Post) -> PostedWrite:
        arena = self._arena
        landing: Landing = arena.resolve(post.source, post.target, post.lengths)
        leases = np.unique(landing.target.lease[landing.target_offsets])
        return PostedWrite(
            post.write,
            landing.source,
            landing.target,
            landing.source_offsets,
            landing.target_offsets,
            tuple(int(lease) for lease in leases),
        )
