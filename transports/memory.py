"""Bytes moved by memory copies inside one process: for fast tests and for the simulator.

A `Fabric` is what an RDMA network is in production: it knows the agents, and it carries pieces of
writes that are under way, whether or not the agent that posted them still runs. A `Courier`
decides each write's fate, a `Memory` does the copying. Rules: a fate never settles before its
last piece has landed, and nothing here reads a clock other than the fabric's `now`.
"""

from __future__ import annotations

import ctypes
import heapq
import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np

from ..engine.ports import BackendError, NotPosted, Progress, WriteBounds
from .transport import WorkerTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..engine.ports import Int64Array, Post, ProgressKind, Region
    from .transport import RunnerFactory

BOUNDS: Final = WriteBounds(descriptors_max=512, bytes_max=2 * 1024 * 1024)


class Memory(Protocol):
    """Where addresses lead."""

    def copy(self, source: Int64Array, target: Int64Array, lengths: Int64Array) -> None:
        """Copy `lengths[i]` bytes from `source[i]` to `target[i]`. Shapes: int64[n] each."""
        ...


class ProcessMemory:
    """This process's own memory: addresses as numpy and torch give them."""

    def copy(self, source: Int64Array, target: Int64Array, lengths: Int64Array) -> None:
        """Copy; undefined when an address is not mapped."""
        for from_, to, size in zip(source.tolist(), target.tolist(), lengths.tolist(), strict=True):
            ctypes.memmove(to, from_, size)


# ---------------------------------------------------------------- what becomes of a write


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes that land together at `at` (ns). Arrays as in `Post`: the whole write or a part."""

    at: int
    source: Int64Array
    target: Int64Array
    lengths: Int64Array


@dataclass(frozen=True, slots=True)
class Report:
    """What a poll answers from `at` (ns) on, until a later report's time comes."""

    at: int
    progress: ProgressKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Fate:
    """When which bytes of a write land, and what its poster is told when.

    Pieces may land in any order, before or after any report that leaves the write open
    (pending, in doubt): torn is several pieces, late is a piece after a doubt, a lost completion
    is no settling report or a doubt that is settled much later. Before the first report's time
    the write is pending. A report at or before the time of posting is the post's own answer.
    """

    pieces: tuple[Piece, ...]
    reports: tuple[Report, ...]

    def __post_init__(self) -> None:
        """Raise ValueError when a settling report precedes a piece or another report."""
        last = max((piece.at for piece in self.pieces), default=0)
        settling = (Progress.DONE, Progress.FAILED)
        for report in self.reports:
            if report.progress in settling and report.at < last:
                raise ValueError(
                    f"the report {report.progress} at {report.at} settles a write of which a "
                    f"piece lands at {last}"
                )
        for earlier, later in pairwise(self.reports):
            if earlier.progress in settling:
                raise ValueError(f"a report at {later.at} follows one that settles the write")
            if later.at < earlier.at:
                raise ValueError(f"reports are out of order: {later.at} after {earlier.at}")

    def progress(self, now: int) -> tuple[ProgressKind, str]:
        """What a poll at `now` answers."""
        answer: tuple[ProgressKind, str] = (Progress.PENDING, "")
        for report in self.reports:
            if report.at <= now:
                answer = (report.progress, report.text)
        return answer


class Courier(Protocol):
    """Decides what becomes of each write: the seam for faults."""

    def carry(self, source: str, target: str, post: Post, now: int) -> Fate:
        """The fate of a write that agent `source` posts to agent `target` at `now`.

        Raises NotPosted: nothing of it was handed over.
        """
        ...


class PromptCourier:
    """No faults: every write lands whole and is done, `delay_ns` after it was posted."""

    def __init__(self, delay_ns: int = 0) -> None:
        self._delay_ns = delay_ns

    def carry(self, source: str, target: str, post: Post, now: int) -> Fate:
        """Land everything at once."""
        at = now + self._delay_ns
        whole = Piece(at, post.source, post.target, post.lengths)
        return Fate((whole,), (Report(at, Progress.DONE),))


# ---------------------------------------------------------------- the fabric


@dataclass(slots=True, eq=False)
class _Carried:
    """A write on the fabric. `severed` is why its remaining pieces were dropped."""

    source: str
    target: str
    memory: Memory
    fate: Fate
    severed: str = ""


class Fabric:
    """The agents of one process and everything that is under way between them.

    Thread-safe: workers of several engines share it, each in its own thread; the simulator
    advances it by itself, so that the bytes of an agent that ended still land.
    """

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.now = now
        self._lock = threading.Lock()
        self._agents: dict[str, Sequence[Region]] = {}
        self._landings: list[tuple[int, int, Piece, _Carried]] = []
        self._sequence = 0
        self._severed: dict[tuple[str, str], str] = {}

    def join(self, agent: str, regions: Sequence[Region]) -> None:
        """Add an agent. Raises BackendError when the name is taken."""
        with self._lock:
            if agent in self._agents:
                raise BackendError(f"an agent named {agent} is on the fabric already")
            self._agents[agent] = regions

    def leave(self, agent: str) -> None:
        """Remove an agent. What it posted still lands, and so does what was posted to it."""
        with self._lock:
            self._agents.pop(agent, None)

    def attach(self, source: str, target: str) -> None:
        """Let `source` post to `target`, again after a cut. Raises BackendError when unknown."""
        with self._lock:
            if target not in self._agents:
                raise BackendError(f"no agent named {target} is on the fabric")
            self._severed.pop((source, target), None)

    def carry(
        self, source: str, target: str, post: Post, memory: Memory, courier: Courier
    ) -> _Carried:
        """Take a write over. Raises NotPosted when an address is outside the ends' regions."""
        now = self.now()
        with self._lock:
            cut = self._severed.get((source, target))
            if cut is not None:
                raise NotPosted(cut)
            _check_inside(self._agents.get(source), post.source, post.lengths, source)
            _check_inside(self._agents.get(target), post.target, post.lengths, target)
            carried = _Carried(source, target, memory, courier.carry(source, target, post, now))
            for piece in carried.fate.pieces:
                self._sequence += 1
                heapq.heappush(self._landings, (piece.at, self._sequence, piece, carried))
            self._land(now)
        return carried

    def poll(self, carried: _Carried) -> tuple[ProgressKind, str]:
        """Land what is due, then say how far this write is."""
        now = self.now()
        with self._lock:
            self._land(now)
            if carried.severed:
                return Progress.FAILED, carried.severed
            return carried.fate.progress(now)

    def sever(self, source: str, target: str, text: str) -> None:
        """Cut `source` off from `target`: what has not landed never will, and its writes fail."""
        now = self.now()
        with self._lock:
            self._land(now)
            self._severed[source, target] = text
            kept = []
            for landing in self._landings:
                carried = landing[3]
                if (carried.source, carried.target) == (source, target):
                    carried.severed = text
                else:
                    kept.append(landing)
            heapq.heapify(kept)
            self._landings = kept

    def advance(self) -> None:
        """Land everything that is due at the fabric's `now`."""
        now = self.now()
        with self._lock:
            self._land(now)

    def next_landing(self) -> int | None:
        """When the next piece is due (ns), None when nothing is under way."""
        with self._lock:
            return self._landings[0][0] if self._landings else None

    def _land(self, now: int) -> None:
        while self._landings and self._landings[0][0] <= now:
            _, _, piece, carried = heapq.heappop(self._landings)
            carried.memory.copy(piece.source, piece.target, piece.lengths)


def _check_inside(
    regions: Sequence[Region] | None, addresses: Int64Array, lengths: Int64Array, agent: str
) -> None:
    if regions is None:
        raise NotPosted(f"no agent named {agent} is on the fabric")
    inside = np.zeros(len(addresses), dtype=bool)
    for region in regions:
        inside |= (addresses >= region.address) & (
            addresses + lengths <= region.address + region.size
        )
    if not inside.all():
        first = int(np.argmin(inside))
        raise NotPosted(
            f"descriptor {first}, {int(lengths[first])} bytes at {int(addresses[first]):#x}, "
            f"lies in no registered region of {agent}"
        )


# ---------------------------------------------------------------- backend and transport


class _Metadata(msgspec.Struct, frozen=True):
    agent: str


class MemoryBackend:
    """Implements `ports.Backend` over a fabric."""

    def __init__(
        self,
        name: str,
        regions: Sequence[Region],
        *,
        fabric: Fabric,
        memory: Memory,
        courier: Courier,
    ) -> None:
        self._name = name
        self._regions = regions
        self._fabric = fabric
        self._memory = memory
        self._courier = courier
        self._peers: dict[str, str] = {}

    def open(self) -> bytes:
        """Join the fabric; return metadata for peers."""
        self._fabric.join(self._name, self._regions)
        return msgspec.msgpack.encode(_Metadata(self._name))

    def connect(self, peer: str, metadata: bytes) -> None:
        """Learn which agent a peer is. Raises BackendError."""
        try:
            told = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.MsgspecError as error:
            raise BackendError(f"metadata of {peer} can't be read: {error}") from None
        self._fabric.attach(self._name, told.agent)
        self._peers[peer] = told.agent

    def disconnect(self, peer: str) -> None:
        """Forget a peer."""
        del self._peers[peer]

    def post(self, post: Post) -> tuple[object, ProgressKind, str]:
        """Hand one write to the fabric. Raises NotPosted."""
        carried = self._fabric.carry(
            self._name, self._peers[post.peer], post, self._memory, self._courier
        )
        return carried, *self._fabric.poll(carried)

    def poll(self, handle: object) -> tuple[ProgressKind, str]:
        """Where a posted write stands."""
        assert isinstance(handle, _Carried)
        return self._fabric.poll(handle)

    def release(self, handle: object) -> None:
        """Nothing to free."""

    def revoke(self, peer: str) -> tuple[bool, str]:
        """Never proven yet: a target does not know which agents of a peer write to it."""
        return False, f"this release has no means that proves that {peer} can't write any more"

    def close(self, unsettled: Sequence[object]) -> None:
        """Leave the fabric; it carries on what is unsettled."""
        self._fabric.leave(self._name)


_process_fabric: Final = Fabric()


def memory(
    fabric: Fabric | None = None,
    *,
    agents: int = 1,
    space: Memory | None = None,
    courier: Courier | None = None,
    runner_factory: RunnerFactory | None = None,
) -> WorkerTransport:
    """A transport between engines of one process.

    fabric: the agents that can reach each other; by default all of this process.
    space: where addresses lead, this process's memory by default.
    courier: what becomes of each write; by default it is done at once.
    runner_factory: called with a name, gives what steps a worker; a thread by default.
    """
    make_backend = partial(
        MemoryBackend,
        fabric=fabric or _process_fabric,
        memory=space or ProcessMemory(),
        courier=courier or PromptCourier(),
    )
    return WorkerTransport(
        "memory",
        BOUNDS,
        make_backend,
        agents=agents,
        describe=lambda: "memory copies in one process",
        runner_factory=runner_factory,
    )
