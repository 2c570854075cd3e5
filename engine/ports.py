"""What the engine asks of the world: a transport for bytes, a network for control, a host.

Only Protocols and the values that cross them. Two rules: nothing here does anything, and
nothing that crosses a port refers back into the engine.

A transport's workers talk in two closed sets: `Command` (engine to worker) and `Event`
(worker to engine). Commands may be handed over from the event loop at any time and never
block; events come back on the loop, in order, in batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from anyio.abc import ByteStream
    from numpy.typing import NDArray

    from .spans import Span

    Int64Array = NDArray[np.int64]

MemoryKind = Literal["dram", "vram"]
WriteResult = Literal["done", "withdrawn", "expired", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a transport registers: `[address, address + size)` bytes of one device.

    owner: kept referenced by the transport as long as something may touch the memory.
    """

    address: int
    size: int
    memory: MemoryKind = "dram"
    device: int = 0
    owner: object = field(default=None, compare=False, repr=False)


# ---------------------------------------------------------------- engine -> worker


@dataclass(frozen=True, slots=True)
class Connect:
    """Load a peer's memory metadata, so that writes to `peer` can be posted."""

    peer: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Forget `peer`'s metadata once nothing to it is posted. Proves nothing and stops nothing."""

    peer: str


@dataclass(frozen=True, slots=True, eq=False)
class Post:
    """One write: `lengths[i]` bytes from `source[i]` to `target[i]`, for every i.

    Shapes: three int64[n] arrays, n >= 1, C-contiguous; absolute addresses; every source lies in
    memory of (`source_memory`, `source_device`), every target in the peer's memory of
    (`target_memory`, `target_device`).
    `not_after` is compared with the worker's `now` directly before posting (same clock, ns).
    """

    write: int
    peer: str
    source: Int64Array
    target: Int64Array
    lengths: Int64Array
    not_after: int
    source_memory: MemoryKind = "dram"
    source_device: int = 0
    target_memory: MemoryKind = "dram"
    target_device: int = 0


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Do not post this write if it is not posted yet. Only the worker's answer counts."""

    write: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Make it impossible, if the lane allows, that bytes of `peer` still land in our memory."""

    peer: str


@dataclass(frozen=True, slots=True)
class Close:
    """Keep polling what is posted until it settles or `not_later_than`, then end the backend."""

    not_later_than: int


Command = Connect | Disconnect | Post | Withdraw | Revoke | Close


# ---------------------------------------------------------------- worker -> engine


@dataclass(frozen=True, slots=True)
class Opened:
    """The backend is up; `metadata` lets a peer write into the registered regions."""

    metadata: bytes


@dataclass(frozen=True, slots=True)
class Connected:
    """Writes to `peer` can be posted from now on."""

    peer: str


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    """`peer`'s metadata could not be loaded; nothing else is affected."""

    peer: str
    text: str


@dataclass(frozen=True, slots=True)
class Posted:
    """The write is on its way: from now on only settling ends it."""

    write: int


@dataclass(frozen=True, slots=True)
class Settled:
    """This write reads its source no more, and nothing more of it is sent.

    `done`: every byte is in place. `withdrawn`, `expired`, `refused`: it was never posted.
    `failed`: it ended by an error of its endpoint. Bytes that the target's host had taken by then
    may still land (measured over tcp, docs/transports.md): no evidence for the target.
    """

    write: int
    result: WriteResult
    text: str = ""


@dataclass(frozen=True, slots=True)
class InDoubt:
    """The write failed in a way that does not prove that it ended; it keeps being polled."""

    write: int
    text: str


@dataclass(frozen=True, slots=True)
class Revoked:
    """The answer to `Revoke`; `proven` only if nothing of `peer` can land any more."""

    peer: str
    proven: bool
    text: str = ""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The last event of a worker. `text` is empty after `Close`, else what broke the backend.

    `unsettled` are the writes that were posted and never seen to end.
    """

    text: str = ""
    unsettled: tuple[int, ...] = ()


Event = Opened | Connected | ConnectFailed | Posted | Settled | InDoubt | Revoked | Stopped


# ---------------------------------------------------------------- below the worker


class Progress:
    """What a backend knows of a posted write: a closed set of constants."""

    PENDING: Literal["pending"] = "pending"
    DONE: Literal["done"] = "done"
    FAILED: Literal["failed"] = "failed"  # ended by an error of its endpoint, see `Settled`
    DOUBT: Literal["doubt"] = "doubt"  # failed, and may still move


ProgressKind = Literal["pending", "done", "failed", "doubt"]


class NotPosted(Exception):
    """Raised by `Backend.post`: nothing of this write was handed to the transport."""


class BackendError(Exception):
    """Raised by a backend's other calls: the call failed, the backend itself goes on."""


class Backend(Protocol):
    """One agent of a real or simulated transport. Only its worker calls it, never the loop.

    Every call may block for as long as the transport blocks. Handles are opaque; the worker
    releases each exactly once, and only after it settled.
    """

    def open(self) -> bytes:
        """Create the agent, register every region, return the metadata that peers need."""
        ...

    def connect(self, peer: str, metadata: bytes) -> None:
        """Load a peer's metadata. Raises BackendError."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Raises BackendError."""
        ...

    def post(self, post: Post) -> tuple[object, ProgressKind, str]:
        """Post one write; return (handle, progress, text). Raises NotPosted."""
        ...

    def poll(self, handle: object) -> tuple[ProgressKind, str]:
        """Where a posted write stands, and what went wrong if something did."""
        ...

    def release(self, handle: object) -> None:
        """Free a settled write's handle. Not a cancel."""
        ...

    def revoke(self, peer: str) -> tuple[bool, str]:
        """Cut `peer` off from our memory; (proven, why)."""
        ...

    def close(self, unsettled: Sequence[object]) -> None:
        """End the agent. `unsettled` handles are given up: their memory must stay mapped."""
        ...


class Steps(Protocol):
    """What a runner drives: a worker, seen from outside."""

    def submit(self, commands: Sequence[Command]) -> None:
        """Append commands. Thread-safe, never blocks; the runner is woken by its owner."""
        ...

    def step(self, now: int) -> int | None:
        """Do a bounded piece of work at `now` (ns).

        Returns when to step again (absolute ns; at or before `now` means at once), None to wait
        for commands.
        """
        ...

    def take_events(self) -> list[Event]:
        """The events since the last call, in order."""
        ...

    @property
    def stopped(self) -> bool:
        """True after `Stopped` was emitted: there is nothing left to step."""
        ...


class Runner(Protocol):
    """Who calls `step`, and how events reach the loop. One runner drives one worker."""

    def start(self, worker: Steps, deliver: Callable[[list[Event]], None]) -> None:
        """Begin stepping; `deliver` is called on the loop, with events in order."""
        ...

    def wake(self) -> None:
        """Commands were submitted. Thread-safe, never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class WriteBounds:
    """The largest write that a transport wants to be given at once."""

    descriptors_max: int
    bytes_max: int


class Transport(Protocol):
    """A way to move bytes, with one or several agents. Belongs to one engine."""

    name: str
    agents: int
    bounds: WriteBounds

    def start(
        self,
        incarnation: str,
        regions: Sequence[Region],
        deliver: Callable[[int, list[Event]], None],
    ) -> None:
        """Open every agent; `deliver(agent, events)` is called on the loop. Never blocks.

        Raises UsageError when the transport was started before.
        """
        ...

    async def emptied(self) -> None:
        """Return when nothing that an ended process of this host had sent can still land.

        Called after its end. Never blocks the loop; may take as long as a peer's socket stays open.
        """
        ...

    def submit(self, agent: int, commands: Sequence[Command]) -> None:
        """Hand commands to one agent. Never blocks."""
        ...


# ---------------------------------------------------------------- the source's cache


class CacheFacts(Protocol):
    """What a cache manager knows of one request on the source: facts, never policy.

    tokens: how many tokens the send promises; fixed when the send is entered.
    """

    tokens: int

    def extract(self, group: str, first: int, stop: int) -> Span:
        """The resident blocks of `group` with ordinals in [first, stop).

        Called by `advance`, on its caller's thread; numpy, O(new blocks), never waiting.
        """
        ...

    def released(self, slots: dict[str, Int64Array], evidence: str) -> None:
        """These source blocks are read no more; each slot exactly once. On the loop."""
        ...


# ---------------------------------------------------------------- control and host


class Listener(Protocol):
    """A bound control port."""

    address: str

    async def accept(self) -> ByteStream:
        """The next inbound connection."""
        ...

    async def aclose(self) -> None:
        """Stop listening."""
        ...


class Network(Protocol):
    """Byte streams between engines, for control messages only."""

    async def dial(self, address: str) -> ByteStream:
        """Connect to "host:port". Raises OSError."""
        ...

    async def listen(self, address: str) -> Listener:
        """Bind "host:port" (port 0: any). Raises OSError."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Which process this is, so that a peer on the same host can watch it end.

    The namespaces must be equal too: of another one's processes and sockets nothing is known.
    """

    boot_id: str
    pid_namespace: str
    net_namespace: str
    pid: int
    start_time: int


class ProcessWatch(Protocol):
    """A process of this host that is watched. No other process is ever taken for it."""

    async def ended(self) -> None:
        """Return when all of its threads have ended."""
        ...

    def close(self) -> None:
        """Watch no more."""
        ...


class Host(Protocol):
    """Everything that would make a run differ from its repetition: time, chance, identity."""

    network: Network

    def now(self) -> int:
        """Monotonic nanoseconds, the same clock that runners pass to `step`."""
        ...

    def entropy(self, size: int) -> bytes:
        """Fresh unpredictable bytes."""
        ...

    def identity(self) -> ProcessIdentity:
        """This process."""
        ...

    def watch(self, process: ProcessIdentity) -> ProcessWatch | None:
        """Watch a process that may have ended already; None when it can't be seen from here."""
        ...
