"""The scheduler against a slow model, and against what it promises: shares, bounds, no idling."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from math import floor
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from kvferry.engine.limits import PRIORITY_MAX, TURN_WRITES_MAX
from kvferry.engine.scheduler import Bounds, Scheduler
from tests.conftest import HISTORIES

SHARE = 16 * TURN_WRITES_MAX
NARROW = Bounds(4 * SHARE, 4, admitted_max=4, peer_admitted_min=1)
OPEN = Bounds(10_000 * SHARE, 10_000)
PEERS = ("a", "b", "c")

priorities = st.integers(-PRIORITY_MAX, PRIORITY_MAX)
sizes = st.one_of(
    st.integers(1, SHARE), st.integers(1, 6 * SHARE), st.sampled_from((1, SHARE, SHARE + 1))
)


def rounds(size: int, priority: int) -> Fraction:
    """Of how many turns a write is worth, at least what every write costs."""
    return Fraction(max(size, SHARE // TURN_WRITES_MAX), SHARE) / Fraction(2) ** priority


# ---------------------------------------------------------------- a slow model


@dataclass(eq=False)
class Account:
    """Somebody who may take part in turns. spent: in its own turns. came: its place in line."""

    name: Any
    priority: int = 0
    spent: Fraction = Fraction(0)
    came: int = 0


class Line:
    """Turns, by looking at everybody."""

    def __init__(self) -> None:
        self.members: list[Account] = []
        self.served = 1
        self.stamps = 0

    def put(self, account: Account) -> None:
        self.stamps += 1
        account.came = self.stamps

    def set(self, account: Account, member: bool) -> None:
        if member and account not in self.members:
            if account.spent < self.served:
                account.spent = Fraction(self.served + 1)
            self.members.append(account)
            self.put(account)
        elif not member and account in self.members:
            self.members.remove(account)

    def head(self) -> Account | None:
        return min(self.members, key=lambda a: (floor(a.spent), a.came), default=None)

    def spend(self, account: Account, size: int) -> None:
        self.served = floor(account.spent)
        account.spent += rounds(size, account.priority)
        if floor(account.spent) > self.served:
            self.put(account)


@dataclass(eq=False)
class ModelPeer:
    """Everything of one peer."""

    account: Account
    line: Line = field(default_factory=Line)
    known: dict[int, Account] = field(default_factory=dict)
    waiting: list[Account] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)
    refused: Account | None = None
    may_post: bool = False


class Model:
    """The scheduler as its docstrings say, with lists."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.peers = {name: ModelPeer(Account(name)) for name in PEERS}
        self.line = Line()

    def admit(self, peer: ModelPeer) -> None:
        while peer.may_post and peer.waiting:
            admitted = sum(len(other.line.members) for other in self.peers.values())
            if (
                admitted >= self.bounds.admitted_max
                and len(peer.line.members) >= self.bounds.peer_admitted_min
            ):
                return
            first = max(peer.waiting, key=lambda a: a.priority)
            peer.waiting.remove(first)
            peer.line.set(first, True)

    def update(self, peer: ModelPeer) -> None:
        self.admit(peer)
        head = peer.line.head()
        may = peer.may_post and len(peer.posted) < self.bounds.peer_writes_max
        self.line.set(peer.account, may and head is not None and head is not peer.refused)

    def out(self, peer: ModelPeer, account: Account) -> None:
        peer.line.set(account, False)
        peer.waiting = [a for a in peer.waiting if a is not account]
        if peer.refused is account:
            peer.refused = None

    def ready(self, transfer: int, name: str, priority: int) -> None:
        peer = self.peers[name]
        account = peer.known.setdefault(transfer, Account(transfer, priority))
        if account not in peer.line.members and account not in peer.waiting:
            peer.waiting.append(account)
            self.update(peer)

    def idle(self, transfer: int, name: str, *, drop: bool = False) -> None:
        peer = self.peers[name]
        if transfer in peer.known:
            self.out(peer, peer.known[transfer])
            self.update(peer)
            if drop:
                del peer.known[transfer]

    def give_way(self, transfer: int, name: str) -> None:
        peer = self.peers[name]
        account = peer.known[transfer]
        if account in peer.line.members and peer.waiting:
            self.out(peer, account)
            peer.waiting.append(account)
            self.update(peer)

    def pick(self) -> tuple[int, str] | None:
        chosen = self.line.head()
        if chosen is None:
            return None
        head = self.peers[chosen.name].line.head()
        assert head is not None
        return head.name, chosen.name

    def take(self, name: str, size: int) -> bool:
        peer = self.peers[name]
        head = peer.line.head()
        assert head is not None
        fits = (
            not peer.posted
            or size <= SHARE
            or sum(peer.posted) + size <= self.bounds.peer_bytes_max
        )
        if fits:
            peer.posted.append(size)
            peer.line.spend(head, size)
            self.line.spend(peer.account, size)
        else:
            peer.refused = head
        self.update(peer)
        return fits

    def settle(self, name: str, size: int) -> None:
        peer = self.peers[name]
        peer.posted.remove(size)
        peer.refused = None
        self.update(peer)

    def permit(self, name: str, may_post: bool) -> None:
        self.peers[name].may_post = may_post
        self.update(self.peers[name])


OPERATIONS = ("ready", "ready", "idle", "drop", "give way", "settle", "permit", "forbid")
OPERATIONS += 8 * ("take",)
steps = st.tuples(
    st.sampled_from(OPERATIONS), st.sampled_from(PEERS), st.integers(0, 5), priorities, sizes
)


def play(made: Scheduler, model: Model, step: tuple[str, str, int, int, int]) -> None:
    """Do one step in both."""
    what, name, transfer, priority, size = step
    peer = model.peers[name]
    if what == "ready":
        made.ready(transfer, name, priority)
        model.ready(transfer, name, priority)
    elif what == "idle":
        made.idle(transfer, name)
        model.idle(transfer, name)
    elif what == "drop":
        made.drop(transfer, name)
        model.idle(transfer, name, drop=True)
    elif what == "give way" and transfer in peer.known:
        made.give_way(transfer, name)
        model.give_way(transfer, name)
    elif what == "settle" and peer.posted:
        settled = peer.posted[priority % len(peer.posted)]
        made.settle(name, settled)
        model.settle(name, settled)
    elif what in ("permit", "forbid"):
        made.permit(name, may_post=what == "permit")
        model.permit(name, what == "permit")
    elif what == "take" and (turn := model.pick()) is not None:
        assert made.pick() == turn
        granted = made.take(*turn, size)
        assert granted == model.take(turn[1], size)
        event("granted" if granted else "refused")


def check_promises(made: Scheduler, model: Model) -> None:
    """Bounds, credits, and that nobody idles, by what the model knows of either."""
    made.check_integrity()
    admitted = [len(peer.line.members) for peer in model.peers.values()]
    over = sum(max(0, n - model.bounds.peer_admitted_min) for n in admitted)
    assert over <= model.bounds.admitted_max
    for name, peer in model.peers.items():
        assert made.outstanding(name) == len(peer.posted) <= model.bounds.peer_writes_max
        large = [size for size in peer.posted if size > SHARE]
        assert sum(large) <= model.bounds.peer_bytes_max or len(large) == 1
    if made.pick() is None:
        for peer in model.peers.values():
            if peer.may_post and len(peer.posted) < model.bounds.peer_writes_max:
                nobody = not (peer.line.members or peer.waiting)
                assert nobody or (peer.posted and peer.refused in peer.line.members)


@HISTORIES
@given(st.lists(steps, min_size=50, max_size=120))
def test_every_turn_is_that_of_a_slow_model(script: list[tuple[str, str, int, int, int]]) -> None:
    made, model = Scheduler(NARROW), Model(NARROW)
    for name in PEERS:
        play(made, model, ("permit", name, 0, 0, 1))
    for step in script:
        play(made, model, step)
        assert made.pick() == model.pick()
        assert len(made) == sum(len(peer.known) for peer in model.peers.values())
        check_promises(made, model)
    for name, peer in model.peers.items():
        for size in list(peer.posted):
            made.settle(name, size)
            model.settle(name, size)
        made.check_integrity()
        assert made.outstanding(name) == 0
    assert made.pick() == model.pick(), "with every credit back"


# ---------------------------------------------------------------- fair shares


class Shares:
    """How far any two drifted apart while both were always ready, in turns of their own."""

    def __init__(self) -> None:
        self.got: dict[Any, Fraction] = {}
        self.largest: dict[Any, Fraction] = {}
        self._range: dict[tuple[Any, Any], tuple[Fraction, Fraction]] = {}

    def begin(self, who: Any) -> None:
        self.got[who] = self.largest[who] = Fraction(0)

    def count(self, who: Any, turns: Fraction) -> None:
        self.got[who] += turns
        self.largest[who] = max(self.largest[who], turns)
        for one, two in combinations(self.got, 2):
            apart = self.got[one] - self.got[two]
            least, most = self._range.get((one, two), (apart, apart))
            least, most = min(least, apart), max(most, apart)
            self._range[one, two] = least, most
            # Each is within one turn and its largest write of its share, over every window.
            assert most - least <= 2 + self.largest[one] + self.largest[two]


@HISTORIES
@given(
    st.lists(priorities, min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 9), sizes), min_size=20, max_size=150),
    st.sampled_from((NARROW, OPEN)),
)
def test_transfers_get_their_share_of_the_bytes(
    classes: list[int], script: list[tuple[int, int]], bounds: Bounds
) -> None:
    """Whoever else comes, and whether the window is full: so nobody starves, either."""
    made, shares = Scheduler(Bounds(bounds.peer_bytes_max, bounds.peer_writes_max)), Shares()
    made.permit("a", may_post=True)
    posted: list[int] = []
    heads: dict[int, int] = {}  # what is refused is asked for again
    for moment, (chance, size) in enumerate(script):
        if chance < 3 and len(shares.got) < len(classes):
            shares.begin(len(shares.got))
            made.ready(len(shares.got) - 1, "a", classes[len(shares.got) - 1])
        if chance % 2 and posted:
            made.settle("a", posted.pop(moment % len(posted)))
        while (turn := made.pick()) is not None:
            transfer = turn[0]
            size = heads.pop(transfer, size)
            if made.take(*turn, size):
                posted.append(size)
                shares.count(transfer, rounds(size, classes[transfer]))
                break
            heads[transfer] = size


@HISTORIES
@given(st.lists(sizes, min_size=3, max_size=3), st.lists(st.integers(0, 2), max_size=60))
def test_peers_get_their_share_of_the_bytes(largest: list[int], comes: list[int]) -> None:
    made, shares = Scheduler(OPEN), Shares()
    for peer in comes + list(range(3)) * 20:
        name = PEERS[peer]
        if name not in shares.got:
            shares.begin(name)
            made.permit(name, may_post=True)
            made.ready(peer, name, peer)
        turn = made.pick()
        assert turn is not None
        size = largest[turn[0]]
        assert made.take(*turn, size)
        shares.count(turn[1], rounds(size, 0))
