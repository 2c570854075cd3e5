"""Two routers joined in memory: no sockets, no event loop, an integer clock.

What a driver does with effects is done here at once and in order; what a network and an I/O
thread do happens only when a test says so. The pair also judges: it knows every write that is
open and every slot that is lent, and raises when a slot comes back too early, twice or never.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.engine import wire
from kvferry.engine.config import Config
from kvferry.engine.context import Context
from kvferry.engine.effects import (
    Dial,
    Ended,
    Fenced,
    HangUp,
    Release,
    Report,
    Submit,
    Transmit,
    Unwatch,
    Watch,
)
from kvferry.engine.frames import Inbox, Outbox
from kvferry.engine.keys import Key, Peer
from kvferry.engine.layout import Group, Layout, Pool
from kvferry.engine.ports import (
    Close,
    Connect,
    Connected,
    ConnectFailed,
    Disconnect,
    InDoubt,
    Post,
    Posted,
    ProcessIdentity,
    Settled,
    Stopped,
    Withdraw,
    WriteBounds,
)
from kvferry.engine.router import Router
from kvferry.engine.spans import Span
from kvferry.engine.tensors import Axis, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvferry.engine.effects import Effect, Received, Sent
    from kvferry.engine.errors import KvferryError
    from kvferry.engine.ports import Command, Event

MS = 1_000_000
S = 1_000_000_000
BLOCK_BYTES = 1024
TOKENS_PER_BLOCK = 4
SLOTS = 64
ADDRESSES = {"full": 0x100_0000, "side": 0x200_0000}


def make_layout(base: int, *, model: str = "m", groups: Sequence[str] = ("full", "side")) -> Layout:
    """Dense blocks of 1 KiB: a block is one fragment, and neighbours join."""
    pools, made = [], []
    for name in groups:
        pools.append(Pool(name, base + ADDRESSES[name], BLOCK_BYTES, SLOTS))
        axes = (
            Axis("token", 0, TOKENS_PER_BLOCK, BLOCK_BYTES // TOKENS_PER_BLOCK),
            Axis("dim", 0, BLOCK_BYTES // TOKENS_PER_BLOCK, 1),
        )
        tensor = Tensor("kv", name, 0, axes, 1, "u8")
        made.append(Group(name, "full", TOKENS_PER_BLOCK, (tensor,)))
    return Layout(tuple(pools), tuple(made), model).check()


def slots_of(addresses: Iterable[int], lengths: Iterable[int], base: int) -> set[tuple[str, int]]:
    """Which (group, slot) some byte ranges touch."""
    touched = set()
    for address, length in zip(addresses, lengths, strict=True):
        for name, start in ADDRESSES.items():
            first = (address - base - start) // BLOCK_BYTES
            if 0 <= first < SLOTS:
                last = (address + length - 1 - base - start) // BLOCK_BYTES
                touched |= {(name, slot) for slot in range(first, last + 1)}
    return touched


@dataclass(eq=False)
class Handle:
    """What the router said of one transfer."""

    number: int
    owned: set[tuple[str, int]] = field(default_factory=set)
    ended: list[tuple[Received | Sent | None, KvferryError | None]] = field(default_factory=list)
    released: list[tuple[tuple[str, int], str]] = field(default_factory=list)
    fenced: int = 0
    key: Key | None = None

    @property
    def error(self) -> KvferryError | None:
        """The one error; the transfer must have ended."""
        ((_, error),) = self.ended
        return error

    @property
    def done(self) -> bool:
        return bool(self.ended) and self.error is None

    @property
    def code(self) -> str:
        error = self.error
        return "done" if error is None else error.code

    @property
    def evidence(self) -> set[str]:
        return {evidence for _, evidence in self.released}


class FakeWorker:
    """An I/O thread that does what it is told to: nothing settles by itself unless `prompt`.

    queued, posted, doubtful: writes by number. `Connect` is answered by `step`.
    """

    def __init__(self) -> None:
        self.prompt = True
        self.connects = True
        self.commands: deque[Command] = deque()
        self.events: list[Event] = []
        self.queued: dict[int, Post] = {}
        self.posted: dict[int, Post] = {}
        self.doubtful: dict[int, Post] = {}
        self.residue: list[Post] = []  # ended by an error: what was sent may still land
        self.log: list[Command] = []
        self.peers: set[str] = set()
        self.stopped = False

    @property
    def open(self) -> dict[int, Post]:
        """Every write that has not settled, also those whose command was not read yet."""
        unread = {c.write: c for c in self.commands if isinstance(c, Post)}
        return {**self.queued, **self.posted, **self.doubtful, **unread}

    def step(self, now: int) -> None:
        """Read the commands; with `prompt`, post and settle everything."""
        while self.commands and not self.stopped:
            command = self.commands.popleft()
            self.log.append(command)
            match command:
                case Connect():
                    if self.connects:
                        self.peers.add(command.peer)
                        self.events.append(Connected(command.peer))
                    else:
                        self.events.append(ConnectFailed(command.peer, "ill metadata"))
                case Disconnect():
                    self.peers.discard(command.peer)
                case Post():
                    self.queued[command.write] = command
                case Withdraw():
                    if self.queued.pop(command.write, None) is not None:
                        self.events.append(Settled(command.write, "withdrawn"))
                case Close():
                    pass
        if self.prompt and not self.stopped:
            for write in list(self.queued):
                self.post(write, now)
            for write in list(self.posted):
                self.settle(write)

    def post(self, write: int, now: int) -> None:
        """Post one queued write, or find it expired."""
        post = self.queued.pop(write)
        if now >= post.not_after:
            self.events.append(Settled(write, "expired"))
        else:
            self.posted[write] = post
            self.events.append(Posted(write))

    def settle(self, write: int, result: str = "done") -> None:
        """A posted or doubtful write ends."""
        post = self.posted.pop(write, None) or self.doubtful.pop(write)
        if result == "failed":
            self.residue.append(post)
        self.events.append(Settled(write, result, "" if result == "done" else "link error"))

    def doubt(self, write: int) -> None:
        """A posted write fails without a proof that it ended."""
        self.doubtful[write] = self.posted.pop(write)
        self.events.append(InDoubt(write, "timed out"))

    def stop(self, text: str) -> None:
        """The agent ends; what it has not read is never posted and gets no answer."""
        self.stopped = True
        for write in self.queued:
            self.events.append(Settled(write, "withdrawn", text))
        self.queued.clear()
        self.commands.clear()
        self.events.append(Stopped(text, (*self.posted, *self.doubtful)))


@dataclass(eq=False)
class Cable:
    """One connection. Everything is indexed by the end that sends."""

    ends: tuple[End, End]
    numbers: dict[End, int]
    outboxes: dict[End, Outbox]
    inboxes: dict[End, Inbox]
    finishing: set[End] = field(default_factory=set)
    cut: bool = False

    def other(self, end: End) -> End:
        return self.ends[1] if end is self.ends[0] else self.ends[0]


class End:
    """One engine without its shell."""

    def __init__(self, pair: Pair, name: str, base: int, layout: Layout, config: Config) -> None:
        self.pair = pair
        self.name = name
        self.base = base
        self.layout = layout
        self.config = config
        self.worker = FakeWorker()
        self.handles: dict[int, Handle] = {}
        self.cables: dict[int, Cable] = {}
        self.reports: list[Report] = []
        self.sent: list[wire.Message] = []
        self.heard: list[wire.AnyMessage] = []
        self._connections = 0
        self.lives = 0
        self.start()

    def start(self) -> None:
        """A new incarnation, with a fresh router."""
        self.lives += 1
        self.watched: dict[str, ProcessIdentity] = {}
        seed = random.Random(f"{self.name}/{self.lives}")
        self.context = Context(
            self.config,
            self.layout,
            seed.randbytes(16).hex(),
            "memory",
            WriteBounds(descriptors_max=4, bytes_max=2 * BLOCK_BYTES),
            [f"metadata of {self.name}".encode()],
            ProcessIdentity("boot", "pids", "net", 1, self.lives),
            seed.randbytes,
        )
        self.router = Router(self.context)
        self.peer = Peer(self.name, f"{self.name}:1")

    # ------------------------------------------------------------ the driver's work

    def act(self) -> None:
        """Pump and carry out effects until there is nothing to do."""
        more = True
        while more or self.context.effects:
            more = self.router.pump(self.pair.now)
            while (effect := self.router.next_effect()) is not None:
                self._perform(effect)
        self.router.check_integrity()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Transmit():
                cable = self.cables.get(effect.connection)
                if cable is not None and self not in cable.finishing:
                    self.sent.append(effect.message)
                    cable.outboxes[self].put(effect.message, key=effect.key, gate=effect.gate)
            case Dial():
                self.pair.dials.append((self, effect))
            case HangUp():
                cable = self.cables.get(effect.connection)
                if cable is not None:
                    cable.finishing.add(self)
            case Submit():
                self.worker.commands.append(effect.command)
                if isinstance(effect.command, Post):
                    self.pair.judge_post(self, effect.command)
            case Ended():
                self.handles[effect.transfer].ended.append((effect.result, effect.error))
            case Release():
                self.pair.judge_release(self, effect)
            case Fenced():
                self.pair.judge_fence(self, self.handles[effect.transfer])
            case Watch():
                assert effect.incarnation not in self.watched, "watched twice"
                self.watched[effect.incarnation] = effect.process
            case Unwatch():
                del self.watched[effect.incarnation]
            case Report():
                self.reports.append(effect)

    def process_ended(self, incarnation: str) -> None:
        """A watched process has ended, and left nothing on its way."""
        del self.watched[incarnation]
        self.do(lambda router, now: router.process_ended(incarnation, now))

    def work(self) -> None:
        """Let the worker step and hand its events over."""
        self.worker.step(self.pair.now)
        events, self.worker.events = self.worker.events, []
        if events:
            self.pair.worker_events(self, events)
            self.act()

    def hear(self, message: wire.AnyMessage, cable: Cable | None = None) -> None:
        """A message arrives, by default on the newest connection, as if the peer had sent it."""
        number = cable.numbers[self] if cable is not None else max(self.cables)
        self.heard.append(message)
        self.router.received(number, message, self.pair.now)
        self.act()

    # ------------------------------------------------------------ the callers' work

    def do(self, action: Callable[[Router, int], object]) -> object:
        try:
            return action(self.router, self.pair.now)
        finally:
            self.act()

    def receive(
        self,
        key: Key,
        source: End,
        slots: Sequence[int],
        *,
        first: int = 0,
        tokens: int | None = None,
        min_tokens: int | None = None,
        group: str = "full",
        deadlines_s: tuple[float | None, float | None, float | None] = (None, None, None),
        priority: int = 0,
    ) -> Handle:
        need = {group: Span.from_slots(slots, first)}
        wanted = (first + len(slots)) * TOKENS_PER_BLOCK if tokens is None else tokens
        transfer = self.router.target.receive(
            key,
            source.peer,
            need,
            wanted,
            wanted if min_tokens is None else min_tokens,
            self.router.deadlines(*deadlines_s),
            priority,
            self.pair.now,
        )
        handle = Handle(transfer.number, {(group, slot) for slot in slots}, key=key)
        self.handles[transfer.number] = handle
        self.act()
        return handle

    def send(
        self,
        request: str,
        tokens: int,
        deadlines_s: tuple[float | None, float | None, float | None] = (None, None, None),
    ) -> Handle:
        transfer = self.router.source.send(
            request, tokens, self.router.deadlines(*deadlines_s), self.pair.now
        )
        handle = self.handles[transfer.number] = Handle(transfer.number)
        self.act()
        return handle

    def push(
        self, handle: Handle, slots: Sequence[int], first: int = 0, group: str = "full"
    ) -> bool:
        """Push blocks; those that were taken are owed to the caller."""
        chunk = {group: Span.from_slots(slots, first)}

        def push(router: Router, now: int) -> bool:
            taken = router.source.push(handle.number, chunk, now)
            if taken:
                handle.owned |= {(group, slot) for slot in slots}
            return taken

        return bool(self.do(push))

    def finish(self, handle: Handle, aux: bytes = b"") -> None:
        self.do(lambda router, now: router.source.finish(handle.number, aux, now))

    def cancel(self, handle: Handle, reason: str = "test") -> None:
        def cancel(router: Router, now: int) -> None:
            router.target.cancel(handle.number, reason, now)
            router.source.cancel(handle.number, reason, now)

        self.do(cancel)


class Pair:
    """A prefill and a decode engine, any number of more ends, and the world between them."""

    def __init__(self, *, target_layout: Layout | None = None, **config: object) -> None:
        self.now = S
        self.dials: deque[tuple[End, Dial]] = deque()
        self.dialling = True
        self.cables: list[Cable] = []
        self.ends: list[End] = []
        self.config = config
        self.prefill = self.add("prefill")
        self.decode = self.add("decode", layout=target_layout)

    def add(self, name: str, *, layout: Layout | None = None, **config: object) -> End:
        base = (len(self.ends) + 1) << 32
        settings = Config(name=name, **{**self.config, **config})  # type: ignore[arg-type]
        end = End(self, name, base, layout or make_layout(base), settings)
        self.ends.append(end)
        return end

    # ------------------------------------------------------------ the network

    def connect(self) -> bool:
        """Answer one dial; False when there is none."""
        if not self.dials or not self.dialling:
            return False
        end, dial = self.dials.popleft()
        other = next((e for e in self.ends if e.peer.address == dial.peer.address), None)
        if other is None:
            self.refuse_dial(end, dial)
            return True
        numbers = {}
        for side in (end, other):
            side._connections += 1
            numbers[side] = side._connections
        cable = Cable(
            (end, other),
            numbers,
            {end: Outbox(), other: Outbox()},
            {end: Inbox(), other: Inbox()},
        )
        self.cables.append(cable)
        for side in (end, other):
            side.cables[numbers[side]] = cable
        end.router.dialled(dial.link, numbers[end], self.now)
        end.act()
        other.router.accepted(numbers[other], self.now)
        other.act()
        return True

    def refuse_dial(self, end: End, dial: Dial) -> None:
        end.router.dial_failed(dial.link, "refused", self.now)
        end.act()

    def carry(self, cable: Cable, sender: End, size_max: int = 1) -> bool:
        """Carry at least one frame; False when there is none. A finished side then closes."""
        receiver = cable.other(sender)
        data = cable.outboxes[sender].take(size_max)
        if data:
            for message in cable.inboxes[receiver].feed(data):
                receiver.heard.append(message)
                receiver.router.received(cable.numbers[receiver], message, self.now)
                receiver.act()
            return True
        if sender in cable.finishing and not cable.cut:
            self.lose(cable, "the peer closed the connection")
            return True
        return False

    def lose(self, cable: Cable | None = None, text: str = "connection reset") -> None:
        """A connection ends; both sides learn of it. What was queued on it is lost."""
        cable = cable or self.cables[-1]
        if cable.cut:
            return
        cable.cut = True
        self.cables.remove(cable)
        for end in cable.ends:
            del end.cables[cable.numbers[end]]
            end.router.lost(cable.numbers[end], text, self.now)
            end.act()

    def deliver(self) -> bool:
        """Carry everything that is queued; False when nothing was."""
        moved = False
        for cable in list(self.cables):
            for end in cable.ends:
                while not cable.cut and self.carry(cable, end):
                    moved = True
        return moved

    def worker_events(self, end: End, events: list[Event]) -> None:
        for event in events:
            end.router.worker_event(0, event, self.now)

    def roundtrip(self) -> None:
        """Let network and workers go on until nothing moves. Time stands still."""
        for _ in range(10_000):
            moved = self.connect()
            moved = self.deliver() or moved
            for end in self.ends:
                busy = bool(end.worker.commands) and not end.worker.stopped
                if busy or end.worker.events or (end.worker.prompt and end.worker.open):
                    end.work()
                    moved = True
            if not moved:
                return
        raise AssertionError("the pair never comes to rest")

    # ------------------------------------------------------------ time

    def wait(self, seconds: float, *, quiet: bool = False) -> None:
        """Pass time, from timer to timer. `quiet`: nothing arrives meanwhile."""
        until = self.now + int(seconds * S)
        for _ in range(100_000):
            due = [(e.router.wake_at, i) for i, e in enumerate(self.ends) if e.router.wake_at]
            at, index = min(due, default=(until + 1, 0))
            if at > until:
                self.now = until
                return
            before = self.now
            self.now = max(self.now, at)
            end = self.ends[index]
            end.router.tick(self.now)
            after = end.router.wake_at
            assert after is None or after > before, f"{end.name} ticks without getting anywhere"
            end.act()
            if not quiet:
                self.roundtrip()
        raise AssertionError("too many timers")

    # ------------------------------------------------------------ judging

    def judge_post(self, source: End, post: Post) -> None:
        """A write may only be handed over into slots that are lent for it."""
        addresses = post.target.tolist(), post.lengths.tolist()
        for end in self.ends:
            touched = slots_of(*addresses, end.base)
            if not touched:
                continue
            lent = {
                place
                for handle in end.handles.values()
                if handle.key is not None and not handle.fenced
                for place in handle.owned
            }
            assert touched <= lent, f"write {post.write} into {touched - lent}, which nobody lends"

    def judge_release(self, end: End, effect: Release) -> None:
        """Slots come back once, to whom they belong, and while no write of them is open."""
        handle = self.handles_of(end)[effect.transfer]
        places = [(g, int(s)) for g, slots in effect.slots.items() for s in slots]
        assert len(set(places)) == len(places), f"{places} released twice at once"
        before = {place for place, _ in handle.released}
        assert not before & set(places), f"{before & set(places)} released again"
        for other in self.ends:
            for post in other.worker.open.values():
                read = slots_of(post.source.tolist(), post.lengths.tolist(), end.base)
                written = slots_of(post.target.tolist(), post.lengths.tolist(), end.base)
                touched = (read | written) & set(places)
                assert not touched, (
                    f"{end.name} releases {touched} with {effect.evidence}, "
                    f"while write {post.write} of them is open"
                )
        assert not self.residue_of(end) & set(places), (
            f"{end.name} releases {places} with {effect.evidence}: a write to them had failed"
        )
        handle.released += [(place, str(effect.evidence)) for place in places]

    def judge_fence(self, end: End, handle: Handle) -> None:
        handle.fenced += 1
        assert handle.fenced == 1, "fenced twice"
        assert len(handle.ended) == 1, f"fenced after {len(handle.ended)} endings"
        returned = {place for place, _ in handle.released}
        assert returned == handle.owned, f"never came back: {handle.owned - returned}"

    def residue_of(self, end: End) -> set[tuple[str, int]]:
        """The slots of a target that bytes of a failed write may still land in."""
        return {
            place
            for other in self.ends
            for post in other.worker.residue
            for place in slots_of(post.target.tolist(), post.lengths.tolist(), end.base)
        }

    def handles_of(self, end: End) -> dict[int, Handle]:
        return end.handles

    def check_over(self) -> None:
        """Everything has ended exactly once, and every slot is back or has a reason not to."""
        for end in self.ends:
            for handle in end.handles.values():
                assert len(handle.ended) == 1, f"{end.name}: {len(handle.ended)} endings"
                kept = handle.key is not None and handle.owned & self.residue_of(end)
                assert handle.fenced or kept, f"{end.name}: not fenced"
                assert handle.fenced or not handle.released, f"{end.name}: released in part"
            assert not end.worker.open
            target, source = end.router.target, end.router.source
            held = sum(len(h.owned) for h in end.handles.values() if not h.fenced)
            assert target.slots_lent == target.slots_quarantined == held
            assert source.mover.writes_open == len(source.mover) == 0


def tags(messages: Sequence[wire.Message], key: Key | None = None) -> list[str]:
    """The kinds of messages, in order; of one key only, if given."""
    return [
        str(type(message).__struct_config__.tag)
        for message in messages
        if key is None or getattr(message, "key", None) == key
    ]
