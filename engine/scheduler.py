"""Which transfer may hand over its next write. Pure.

Two rules: credit is only ever taken by a transfer that has a write ready (never by one that waits
for its other side or its next chunk), and a bound of one peer never holds up another peer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from .limits import PEER_POSTED_BYTES_MAX, PEER_POSTED_WRITES_MAX, TRANSFERS_ADMITTED_MAX


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be handed over at once to one peer, and how many transfers hold planned writes."""

    peer_bytes_max: int = PEER_POSTED_BYTES_MAX
    peer_writes_max: int = PEER_POSTED_WRITES_MAX
    admitted_max: int = TRANSFERS_ADMITTED_MAX


@dataclass(slots=True)
class _PeerQueue:
    admitted: OrderedDict[int, None] = field(default_factory=OrderedDict)
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    bytes: int = 0
    writes: int = 0
    may_post: bool = False
    full: bool = False


class Scheduler:
    """Round robin by write over the ready transfers of each peer, and over the peers."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._peers: OrderedDict[str, _PeerQueue] = OrderedDict()

    def ready(self, transfer: int, peer: str) -> None:
        """`transfer` has something to hand over. Idempotent."""
        queue = self._peers.setdefault(peer, _PeerQueue())
        if transfer not in queue.admitted:
            queue.waiting[transfer] = None
            self._admit(queue)

    def idle(self, transfer: int, peer: str) -> None:
        """`transfer` has nothing to hand over for now. Idempotent."""
        queue = self._peers.get(peer)
        if queue is not None:
            queue.admitted.pop(transfer, None)
            queue.waiting.pop(transfer, None)
            self._admit(queue)

    def permit(self, peer: str, *, may_post: bool) -> None:
        """Whether anything may be handed over for `peer` at all."""
        self._peers.setdefault(peer, _PeerQueue()).may_post = may_post

    def forget(self, peer: str) -> None:
        """Drop `peer` if nothing of it is outstanding; else its credits stay counted."""
        queue = self._peers.get(peer)
        if queue is not None and not (queue.writes or queue.admitted or queue.waiting):
            del self._peers[peer]

    def pick(self) -> tuple[int, str] | None:
        """The transfer whose turn it is, None when nothing may be handed over."""
        for peer, queue in self._peers.items():
            if queue.may_post and not queue.full and queue.admitted:
                transfer = next(iter(queue.admitted))
                return transfer, peer
        return None

    def take(self, transfer: int, peer: str, size: int) -> bool:
        """Charge a write of `size` bytes and end the turn; False when the window is full.

        A write larger than the whole window is let through alone.
        """
        queue = self._peers[peer]
        over = queue.bytes + size > self._bounds.peer_bytes_max and queue.writes > 0
        if over or queue.writes >= self._bounds.peer_writes_max:
            queue.full = True
            return False
        queue.bytes += size
        queue.writes += 1
        queue.admitted.move_to_end(transfer)
        self._peers.move_to_end(peer)
        return True

    def settle(self, peer: str, size: int) -> None:
        """A charged write has ended: its credit is free."""
        queue = self._peers[peer]
        queue.bytes -= size
        queue.writes -= 1
        queue.full = False

    def outstanding(self, peer: str) -> int:
        """Writes that were charged and did not settle."""
        queue = self._peers.get(peer)
        return queue.writes if queue is not None else 0

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts contradict each other."""
        for peer, queue in self._peers.items():
            assert queue.bytes >= 0, f"{peer}: {queue.bytes} bytes charged"
            assert queue.writes >= 0, f"{peer}: {queue.writes} writes charged"
            assert queue.writes > 0 or queue.bytes == 0, f"{peer}: bytes charged without writes"
            assert len(queue.admitted) <= self._bounds.admitted_max, f"{peer}: over admission"

    def _admit(self, queue: _PeerQueue) -> None:
        while queue.waiting and len(queue.admitted) < self._bounds.admitted_max:
            transfer, _ = queue.waiting.popitem(last=False)
            queue.admitted[transfer] = None
