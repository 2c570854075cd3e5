"""Which transfer may hand over its next write. Pure.

Owns admission (by priority, then arrival), the turns of transfers within a peer and of peers, and
what is outstanding to each peer. Two rules: credit is only ever taken by a transfer that has a
write ready (never by one that waits for its other side or its next chunk), and a bound of one
peer never holds up another peer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from .limits import (
    PEER_ADMITTED_MIN,
    PEER_POSTED_BYTES_MAX,
    PEER_POSTED_WRITES_MAX,
    TRANSFERS_ADMITTED_MAX,
)
from .turns import Place, Turns


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be handed over at once to one peer, and how many transfers hold planned writes.

    peer_bytes_max, peer_writes_max: the window. Beyond its bytes go a write that is alone, and a
    small one: of no more than an equal share of the window. Small writes alone can't fill its
    bytes, so there is never more outstanding than twice the window, or the one large write and
    a window of small ones.
    admitted_max: transfers over all peers; peer_admitted_min: those a peer gets in any case.
    """

    peer_bytes_max: int = PEER_POSTED_BYTES_MAX
    peer_writes_max: int = PEER_POSTED_WRITES_MAX
    admitted_max: int = TRANSFERS_ADMITTED_MAX
    peer_admitted_min: int = PEER_ADMITTED_MIN

    @property
    def share_bytes(self) -> int:
        """An equal share of the window: the largest small write, and one turn at priority 0."""
        return max(1, self.peer_bytes_max // self.peer_writes_max)


@dataclass(slots=True, eq=False)
class _Transfer(Place):
    """A transfer: in the turns when it is admitted, waiting to be, or neither."""

    number: int = 0
    waiting: bool = False


@dataclass(slots=True, eq=False)
class _Peer(Place):
    """A peer; in the turns while something may be handed over to it now.

    waiting: by priority. refused: whose next write did not fit when its turn came.
    """

    name: str = ""
    turns: Turns[_Transfer] = field(default_factory=lambda: Turns(1))
    transfers: dict[int, _Transfer] = field(default_factory=dict)
    waiting: dict[int, OrderedDict[int, _Transfer]] = field(default_factory=dict)
    refused: _Transfer | None = None
    bytes: int = 0
    writes: int = 0
    may_post: bool = False


class Scheduler:
    """Turns by bytes over the admitted transfers of each peer, and over the peers.

    Everything takes constant time, amortised over writes, however many transfers and peers
    there are.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._share = self._bounds.share_bytes
        self._peers: dict[str, _Peer] = {}
        self._turns: Turns[_Peer] = Turns(self._share)
        self._admitted = 0

    def __len__(self) -> int:
        """Transfers that are known: those that were ready once and not dropped since."""
        return sum(len(queue.transfers) for queue in self._peers.values())

    # ------------------------------------------------------------ who has something ready

    def ready(self, transfer: int, peer: str, priority: int = 0) -> None:
        """`transfer` has something to hand over. Idempotent; the first priority stays."""
        queue = self._peer(peer)
        known = queue.transfers.get(transfer)
        if known is None:
            known = queue.transfers[transfer] = _Transfer(priority, number=transfer)
        if not known.seated and not known.waiting:
            self._wait(queue, known)
            self._update(queue)

    def idle(self, transfer: int, peer: str) -> None:
        """`transfer` has nothing to hand over for now. Idempotent."""
        queue = self._peers.get(peer)
        known = queue.transfers.get(transfer) if queue is not None else None
        if queue is not None and known is not None:
            self._withdraw(queue, known)
            self._update(queue)

    def give_way(self, transfer: int, peer: str) -> None:
        """`transfer` is ready, but holds no planned writes now: it waits like a newcomer.

        So that admission goes round, by planning steps, among equals.
        """
        queue = self._peers[peer]
        known = queue.transfers[transfer]
        if known.seated and queue.waiting:
            self._withdraw(queue, known)
            self._wait(queue, known)
            self._update(queue)

    def drop(self, transfer: int, peer: str) -> None:
        """Forget `transfer`: it is over. Idempotent."""
        self.idle(transfer, peer)
        if peer in self._peers:
            self._peers[peer].transfers.pop(transfer, None)

    def permit(self, peer: str, *, may_post: bool) -> None:
        """Whether anything may be handed over for `peer` at all."""
        queue = self._peer(peer)
        queue.may_post = may_post
        self._update(queue)

    def forget(self, peer: str) -> None:
        """Drop `peer` if nothing of it is outstanding; else its credits stay counted."""
        queue = self._peers.get(peer)
        if queue is not None and not (queue.writes or len(queue.turns) or queue.waiting):
            del self._peers[peer]

    # ------------------------------------------------------------ handing over

    def pick(self) -> tuple[int, str] | None:
        """The transfer whose turn it is, None when nothing may be handed over."""
        queue = self._turns.head()
        if queue is None:
            return None
        head = queue.turns.head()
        assert head is not None
        return head.number, queue.name

    def take(self, transfer: int, peer: str, size: int) -> bool:
        """Charge a write of `size` bytes to whom `pick` named; False when the window is full.

        What was refused keeps its turn, and is named again once something has settled.
        """
        queue = self._peers[peer]
        head = queue.turns.head()
        assert head is not None
        assert queue.seated, f"{peer}: nothing may be handed over"
        assert head.number == transfer, f"{peer}: it is the turn of {head.number}"
        fits = queue.bytes + size <= self._bounds.peer_bytes_max or size <= self._share
        granted = fits or not queue.writes
        if granted:
            queue.bytes += size
            queue.writes += 1
            queue.turns.spend(head, size)
            self._turns.spend(queue, size)
        else:
            queue.refused = head
        self._update(queue)
        return granted

    def settle(self, peer: str, size: int) -> None:
        """A charged write has ended: its credit is free."""
        queue = self._peers[peer]
        queue.bytes -= size
        queue.writes -= 1
        queue.refused = None
        self._update(queue)

    def outstanding(self, peer: str) -> int:
        """Writes that were charged and did not settle."""
        queue = self._peers.get(peer)
        return queue.writes if queue is not None else 0

    # ------------------------------------------------------------ admission

    def _peer(self, name: str) -> _Peer:
        queue = self._peers.get(name)
        if queue is None:
            queue = self._peers[name] = _Peer(name=name, turns=Turns(self._share))
        return queue

    def _wait(self, queue: _Peer, known: _Transfer) -> None:
        known.waiting = True
        line = queue.waiting.setdefault(known.priority, OrderedDict())
        line[known.number] = known

    def _withdraw(self, queue: _Peer, known: _Transfer) -> None:
        """Neither admitted nor waiting any more."""
        if known.waiting:
            known.waiting = False
            self._unqueue(queue, known)
        elif known.seated:
            queue.turns.leave(known)
            self._admitted -= 1
            if queue.refused is known:
                queue.refused = None

    def _unqueue(self, queue: _Peer, known: _Transfer) -> None:
        line = queue.waiting[known.priority]
        del line[known.number]
        if not line:
            del queue.waiting[known.priority]

    def _admit(self, queue: _Peer) -> None:
        bounds = self._bounds
        while (queue.may_post and queue.waiting) and (
            self._admitted < bounds.admitted_max or len(queue.turns) < bounds.peer_admitted_min
        ):
            line = queue.waiting[max(queue.waiting)]
            known = next(iter(line.values()))
            self._unqueue(queue, known)
            known.waiting = False
            queue.turns.join(known)
            self._admitted += 1

    def _update(self, queue: _Peer) -> None:
        """Admit who may be, and let the peer take part while something may be handed over."""
        self._admit(queue)
        head = queue.turns.head()
        if (
            queue.may_post
            and queue.writes < self._bounds.peer_writes_max
            and head is not None
            and head is not queue.refused
        ):
            self._turns.join(queue)
        else:
            self._turns.leave(queue)

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts contradict each other."""
        for peer, queue in self._peers.items():
            assert queue.bytes >= 0, f"{peer}: {queue.bytes} bytes charged"
            assert 0 <= queue.writes <= self._bounds.peer_writes_max, f"{peer}: {queue.writes}"
            assert queue.writes > 0 or queue.bytes == 0, f"{peer}: bytes charged without writes"
            known = queue.transfers.values()
            seated = sum(transfer.seated for transfer in known)
            waiting = sum(transfer.waiting for transfer in known)
            assert seated == len(queue.turns), f"{peer}: {seated} seated, {len(queue.turns)}"
            lines = sum(map(len, queue.waiting.values()))
            assert waiting == lines, f"{peer}: {waiting} wait, {lines} are in line"
            assert all(queue.waiting.values()), f"{peer}: an empty line of waiting transfers"
        admitted = sum(len(queue.turns) for queue in self._peers.values())
        assert admitted == self._admitted, f"{admitted} admitted, {self._admitted} counted"
