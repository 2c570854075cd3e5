"""One trial: a fresh pair of nodes, one operation in flight, and what became of the memory.

Roles are the design's words: the target owns the memory that is written, the source the memory
that is read; a WRITE is posted by the source, a READ by the target. Two rules: a trial whose
operation was not shown in flight at its event is void, never a result; and a byte counts as
foreign only if it differs from what the owner put there after the event.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

from tests.truth.cut import CutNetwork
from tests.truth.peer import NodeDied, Peer
from tests.truth.shared import ENDED, MIB, PENDING, POSTING

Lane = Literal["same-host", "tcp"]
Operation = Literal["WRITE", "READ"]

OLD, SOURCE, REFILL, REUSED = 0, 7, 5, 9  # what pools are filled with
POOL, POOL_MAX = 256 * MIB, 1024 * MIB
BLOCK = 16 * 1024
USER_TIMEOUT_S = 3  # of the operating system's TCP, through UCX_TCP_USER_TIMEOUT
LANDED_MIN, LANDED_MAX, SHORT_MAX = 0.02, 0.9, 0.6
CONTROL_S = 5.0  # for an operation that is known to go on, to end

_ENVIRONMENT = {
    "UCX_MODULES": "^cuda,ib",  # they crash the interpreter on hosts without such devices
    "UCX_TCP_USER_TIMEOUT": f"{USER_TIMEOUT_S}s",
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
}
# Trials overlap only while they wait: from its start to its event, one has the machine to itself.
_turns = Lock()


class Void(Exception):
    """The operation was not in flight at the event: this trial says nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one trial showed.

    `foreign`: bytes. `state`: what NIXL last said at the initiator, `state_after_s` seconds after
    the event (None: nothing terminal). `landed`: fraction at the event.
    """

    foreign: int
    state: str
    state_after_s: float | None
    phase: str
    landed: float
    notes: dict[str, Any]


class Trial:
    """A pair, its operation and the clock of its event. Use as a context manager.

    `evidence`: whether the scenario waits for the row's evidence before the memory is given away.
    `may_die`: roles whose process is known to crash here; any other death raises NodeDied.
    """

    def __init__(
        self,
        lane: Lane,
        operation: Operation,
        *,
        evidence: bool,
        settle_s: float,
        size: int = POOL,
        network: bool = False,
        may_die: tuple[str, ...] = (),
    ) -> None:
        self.lane, self.operation, self.evidence = lane, operation, evidence
        self.notes: dict[str, Any] = {}
        self._may_die = may_die
        self._settle_s, self._size, self._with_network = settle_s, size, network
        self._phase, self._landed, self._event = "", 0.0, 0.0
        self._stack = ExitStack()
        self._turn = ExitStack()

    def __enter__(self) -> Trial:
        try:
            self._turn.enter_context(_turns)
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._turn.close()
        self._stack.close()

    def _start(self) -> None:
        self.network: CutNetwork | None = None
        if self._with_network:
            self.network = CutNetwork()
            self._stack.callback(self.network.close)
        self.source, self.target = self._peer("source", SOURCE), self._peer("target", OLD)
        self.initiator = self.source if self.operation == "WRITE" else self.target
        pair = (self.source, self.target)
        for peer in pair:
            peer.send("open")
        self.metadata = {peer.name: peer.answer() for peer in pair}
        for peer, other in (pair, pair[::-1]):
            metadata, address = self.metadata[other.name]
            peer.call("connect", metadata, other.name, address)
        self.source_ends = self.source.call("local_ends")
        self.target.pool.bytes[:] = OLD  # undoes the byte that connecting moved
        self.source.pool.bytes[:] = SOURCE

    def _peer(self, role: str, fill: int) -> Peer:
        env: dict[str, str] = dict(_ENVIRONMENT)
        prefix: tuple[str, ...] = ()
        if self.lane == "tcp":
            env["UCX_TLS"] = "tcp"
        if self.network:
            env["UCX_NET_DEVICES"] = self.network.device
            prefix = self.network.prefix(role)
        peer = Peer(role, self._size, fill, env, prefix)
        self._stack.callback(peer.end)
        return peer

    # ------------------------------------------------------------ before the event

    def start(self, block: int = BLOCK) -> None:
        """Have the initiator post the operation, as pieces of `block` bytes."""
        self.initiator.call("start", self.operation, *self._other(), block)

    def _other(self) -> tuple[str, int]:
        name = "target" if self.operation == "WRITE" else "source"
        return name, self.metadata[name][1]

    def begin(self, block: int = BLOCK) -> None:
        """Start the operation and return when its bytes are seen landing. Raises Void."""
        self.start(block)
        deadline = time.monotonic() + 30
        while self.target.pool.landed(SOURCE) < LANDED_MIN:
            if self.phase == ENDED or time.monotonic() > deadline:
                raise Void(f"not seen moving: {self.state}")

    def event(self, *, is_error: bool = False) -> None:
        """Now is the event: confirm that the operation is in flight. Raises Void.

        `is_error`: the event is the operation's own error, and siblings must still be under way.
        """
        self._phase, self._landed = self.state, self.target.pool.landed(SOURCE)
        self._event = time.monotonic()
        ended = self.phase == ENDED
        self._turn.close()
        if ended != is_error or self._phase == "DONE" or self._landed >= LANDED_MAX:
            raise Void(f"{self._phase}, {self._landed:.0%} landed")

    # ------------------------------------------------------------ after the event

    @property
    def phase(self) -> int:
        return int(self.initiator.pool.board["phase"][0])

    @property
    def state(self) -> str:
        """What NIXL last said of the operation, at its initiator."""
        if self.phase == ENDED:
            return bytes(self.initiator.pool.board["state"][0]).decode(errors="replace")
        return {POSTING: "in the post", PENDING: "PROC"}.get(self.phase, "idle")

    def refill(self) -> None:
        """The target's owner gives the memory to somebody else, who writes it."""
        self.target.pool.bytes[:] = REFILL

    def wait_end(self, timeout_s: float = 30.0) -> None:
        """Wait until the initiator has seen the operation end. Raises Void if it does not."""
        if not self._wait_end(timeout_s):
            raise Void(f"still {self.state} after {timeout_s} s")

    def _wait_end(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.phase != ENDED and time.monotonic() < deadline:
            if self.initiator.died:
                return False
            time.sleep(0.002)
        return self.phase == ENDED

    def probe(self) -> str:
        """Have the initiator move one more byte; what NIXL said of that."""
        other, address = self._other()
        return str(self.initiator.call("probe", self.operation, other, address))

    def expect_short(self) -> None:
        """Confirm that enough was still to come when the event took effect. Raises Void."""
        if (landed := self.target.pool.landed(SOURCE)) >= SHORT_MAX:
            raise Void(f"{landed:.0%} had landed before the event took effect")

    def settle(self) -> Outcome:
        """Give late bytes their time, then count.

        With evidence, the memory is watched for all of the settling time. Without, the operation
        is expected to go on, and is only waited for until it ends: nothing changes after that.
        """
        if self.evidence:
            time.sleep(self._settle_s)
        else:
            self._wait_end(min(self._settle_s, CONTROL_S))
            time.sleep(0.3)
        after = None
        if self.phase == ENDED:
            after = float(self.initiator.pool.board["ended"][0]) / 1e9 - self._event
        for peer in (self.source, self.target):
            if peer.died and peer.name not in self._may_die:
                raise NodeDied(peer.name, peer.process.returncode)
            if peer.died:
                self.notes["died"] = f"{peer.name}, signal {-peer.process.returncode}"
        return Outcome(
            foreign=self.target.pool.foreign(REFILL),
            state=self.state,
            state_after_s=after,
            phase=self._phase,
            landed=self._landed,
            notes=self.notes,
        )
