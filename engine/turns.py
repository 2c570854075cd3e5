"""Whose turn it is: deficit round robin by bytes. Pure.

In every round each of those who take part may spend one turn of bytes, twice as many with each
step of priority. A size is charged when it is known, so a turn may be overdrawn: who overdrew
sits out the rounds that this was worth. Two rules: whoever comes begins with the round after the
one that is served, and the account outlasts leaving, so that nothing is gained by coming back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

from .limits import PRIORITY_MAX, TURN_WRITES_MAX


@dataclass(slots=True, eq=False)
class Place:
    """Somebody's place in the turns.

    priority: -PRIORITY_MAX to PRIORITY_MAX; the share of the bytes is 2**priority.
    spent: its account, in bytes times 2**(PRIORITY_MAX - priority). round: the one it is due in.
    """

    priority: int = 0
    spent: int = 0
    round: int = 0
    seated: bool = False


_P = TypeVar("_P", bound=Place)


class Turns(Generic[_P]):
    """Those who have something to hand over, by round and within a round by arrival.

    turn_bytes: what one round allows at priority 0. A write counts as 1 / TURN_WRITES_MAX of
    that at least, for it costs more than its bytes.
    """

    def __init__(self, turn_bytes: int) -> None:
        self._turn = turn_bytes << PRIORITY_MAX
        self._cost_min = max(1, turn_bytes // TURN_WRITES_MAX)
        self._rounds: dict[int, OrderedDict[_P, None]] = {}
        self._order: list[int] = []  # the keys of _rounds, as a heap
        self._served = 1  # above every new account
        self._seated = 0

    def __len__(self) -> int:
        """Those who take part."""
        return self._seated

    def join(self, place: _P) -> None:
        """Take part: from the next round on, or by an account that is not behind. Idempotent."""
        if not place.seated:
            place.seated = True
            if place.spent < self._served * self._turn:
                place.spent = (self._served + 1) * self._turn
            self._seated += 1
            self._line_up(place)

    def leave(self, place: _P) -> None:
        """Take part no more. Idempotent."""
        if place.seated:
            place.seated = False
            self._seated -= 1
            del self._rounds[place.round][place]

    def head(self) -> _P | None:
        """Whose turn it is, None when nobody takes part."""
        while self._order:
            line = self._rounds[self._order[0]]
            if line:
                return next(iter(line))
            del self._rounds[heappop(self._order)]
        return None

    def spend(self, head: _P, size: int) -> None:
        """The head has handed over `size` bytes; its turn lasts while its round allows."""
        self._served = head.round
        head.spent += max(size, self._cost_min) << (PRIORITY_MAX - head.priority)
        if head.spent // self._turn > head.round:
            del self._rounds[head.round][head]
            self._line_up(head)

    def _line_up(self, place: _P) -> None:
        place.round = place.spent // self._turn
        line = self._rounds.get(place.round)
        if line is None:
            line = self._rounds[place.round] = OrderedDict()
            heappush(self._order, place.round)
        line[place] = None
