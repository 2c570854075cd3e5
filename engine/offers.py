"""What a source knows of keys that no send serves: offers that wait, and keys that have ended.

Pure tables, bounded per target and in all. Two rules: an offer waits for its send at most until
its own deadline, and an ended key is remembered, so that a late offer of it starts nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .context import nanoseconds
from .effects import Report
from .errors import UsageError
from .limits import OFFERS_WAITING_BYTES_MAX, TOMBSTONE_S, TOMBSTONES_MAX
from .spans import Span
from .template import FRAGMENT_BYTES_WARN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from . import wire
    from .context import Context
    from .keys import Key
    from .source_sessions import Target


@dataclass(slots=True, eq=False)
class WaitingOffer:
    """An offer whose send has not come yet. need: {group: span of the target's slots}."""

    offer: wire.Offer
    need: dict[str, Span]
    target: Target
    expires_at: int

    @property
    def size(self) -> int:
        """Bytes of memory that it is counted as."""
        return 256 + sum(span.nbytes for span in self.need.values())


class WaitingOffers:
    """Offers by request and key, bounded per target."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._by_request: dict[str, dict[Key, WaitingOffer]] = {}
        self._by_target: dict[str, dict[Key, WaitingOffer]] = {}
        self._bytes: dict[str, int] = {}

    def of_request(self, request: str) -> list[WaitingOffer]:
        """Those that a send of `request` could serve."""
        return list(self._by_request.get(request, {}).values())

    def of_target(self, target: Target) -> list[WaitingOffer]:
        """Those of one target."""
        return list(self._by_target.get(target.peer, {}).values())

    def get(self, key: Key) -> WaitingOffer | None:
        """The offer of `key`."""
        return self._by_request.get(key.request, {}).get(key)

    def full_for(self, target: Target) -> bool:
        """True when one more offer of this target would be over a bound."""
        return (
            len(self._by_target.get(target.peer, {})) >= self._count_max
            or self._bytes.get(target.peer, 0) >= OFFERS_WAITING_BYTES_MAX
        )

    def add(self, waiting: WaitingOffer) -> None:
        """Let an offer wait. The caller has checked that its key does not."""
        key, peer = waiting.offer.key, waiting.target.peer
        self._by_request.setdefault(key.request, {})[key] = waiting
        self._by_target.setdefault(peer, {})[key] = waiting
        self._bytes[peer] = self._bytes.get(peer, 0) + waiting.size

    def drop(self, waiting: WaitingOffer) -> None:
        """Let an offer wait no more."""
        key, peer = waiting.offer.key, waiting.target.peer
        for table, name in ((self._by_request, key.request), (self._by_target, peer)):
            del table[name][key]
            if not table[name]:
                del table[name]
        self._bytes[peer] -= waiting.size
        if peer not in self._by_target:
            del self._bytes[peer]

    def all(self) -> Iterator[WaitingOffer]:
        """Every waiting offer."""
        for offers in self._by_target.values():
            yield from offers.values()

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        by_request = sum(len(offers) for offers in self._by_request.values())
        assert by_request == sum(1 for _ in self.all()), "an offer is in one table only"
        for peer, offers in self._by_target.items():
            size = sum(waiting.size for waiting in offers.values())
            assert self._bytes[peer] == size, f"{peer}: {self._bytes[peer]} bytes counted, {size}"
        assert self._bytes.keys() == self._by_target.keys(), "bytes counted for no offer"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """An ended (request, branch): attempts up to `attempt` are over."""

    attempt: int
    reason: str
    expires_at: int


class Tombstones:
    """Ended keys, oldest first; bounded in number and time."""

    def __init__(self) -> None:
        self._graves: dict[tuple[str, int], Tombstone] = {}
        self._unheard: dict[str, int] = {}  # request -> branch cancelled before any send came

    def find(self, key: Key) -> Tombstone | None:
        """The tombstone that covers `key`, None when its attempt has not ended."""
        grave = self._graves.get((key.request, key.branch))
        return grave if grave is not None and key.attempt <= grave.attempt else None

    def bury(self, key: Key, reason: str, now: int, *, unheard: bool = False) -> None:
        """Attempts of this branch up to `key.attempt` have ended.

        unheard: they were cancelled before any send of the request came.
        """
        place = (key.request, key.branch)
        older = self._graves.pop(place, None)
        attempt = key.attempt if older is None else max(older.attempt, key.attempt)
        while len(self._graves) >= TOMBSTONES_MAX:
            self._forget(next(iter(self._graves)))
        self._graves[place] = Tombstone(attempt, reason, now + nanoseconds(TOMBSTONE_S))
        if unheard:
            self._unheard[key.request] = key.branch

    def hear(self, request: str) -> Tombstone | None:
        """A send of `request` came: the cancel that came before it, once."""
        branch = self._unheard.pop(request, None)
        return None if branch is None else self._graves[request, branch]

    def expire(self, now: int) -> None:
        """Forget what is old enough. Amortised O(1): the order is that of burying."""
        while self._graves:
            place, grave = next(iter(self._graves.items()))
            if grave.expires_at > now:
                break
            self._forget(place)

    def _forget(self, place: tuple[str, int]) -> None:
        del self._graves[place]
        request, branch = place
        if self._unheard.get(request) == branch:
            del self._unheard[request]


def read_need(context: Context, target: Target, offer: wire.Offer) -> dict[str, Span]:
    """The spans that the target wrote, checked. Raises UsageError, Refused."""
    if not 0 <= offer.min_tokens <= offer.tokens:
        raise UsageError(f"offer of {offer.tokens} tokens, at least {offer.min_tokens}")
    need: dict[str, Span] = {}
    for item in offer.needs:
        if item.group in need:
            raise UsageError(f"group {item.group!r} is in the offer twice")
        _check_template(context, target, item.group)
        span = Span.from_wire(item.firsts, item.counts, item.slots)
        target.layout.check_slots(item.group, span.slots())
        need[item.group] = span
    return need


def _check_template(context: Context, target: Target, group: str) -> None:
    """Make the template of `group`, once; warn when it is slow. Raises Refused, UsageError."""
    known = group in target.templates
    template = target.template(context.layout, group)
    if not known and template.mean_fragment_bytes < FRAGMENT_BYTES_WARN:
        text = (
            f"group {group!r} moves to {target.name} in fragments of "
            f"{template.mean_fragment_bytes} bytes on average, which is slow: store the axes "
            "of both sides in the same order"
        )
        context.emit(Report(logging.WARNING, text))
