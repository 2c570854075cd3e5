"""One simulated world: loop, network, memory, processes and checkers, put together from a seed.

Two rules: every concern draws from a PRNG of its own, and a process that died comes back only as
a new life with new memory.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvferry.engine.ports import WriteBounds
from kvferry.transports.memory import Fabric, MemoryBackend
from kvferry.transports.transport import WorkerTransport

from .arena import Arena
from .checkers import Checkers
from .courier import SimCourier
from .geometry import SimGroup
from .host import SimHost, SimRunner
from .loop import Gate, SimLoop
from .network import Internet, Pipe
from .options import Fault, Options
from .wiretap import Message, Wiretap, key_of, parts_of

if TYPE_CHECKING:
    from kvferry.engine.ports import ProcessIdentity
    from kvferry.engine.service import Engine

    from .arena import Space

BOUNDS = WriteBounds(descriptors_max=2, bytes_max=1300)  # small: a transfer has several writes
PERMIT_TTL_S = 1.5

GROUPS = (
    SimGroup("full", 0, layers=(0, 2), kinds=2, heads=1, tokens_per_block=4, dims=32),
    SimGroup("window", 1, layers=(1,), kinds=2, heads=2, tokens_per_block=2, dims=64, window=6),
)  # blocks of 512 bytes, the least that the planner takes unasked

# Worlds where sides have unequal block sizes. Token-major, so that what two blocks share is in
# rows of 512 bytes or more.
UNEQUAL = 0.4
ONE_MACHINE = 0.5  # worlds where all processes are on one, and see each other's end
TOKEN_MAJOR = ("token", "layer", "kind", "head", "dim")
SCALES = (1, 2, 3)


class Starved(Exception):
    """There are too few slots left for a request."""


class Life:
    """One life of one process: its gate, clock, memory, free slots, I/O workers and engine."""

    def __init__(self, world: World, name: str, address: str, number: int) -> None:
        self.world = world
        self.name = name
        self.address = address
        self.number = number
        self.gate = Gate(name)
        self.context = self.gate.context()
        self.prng = world.child(f"life/{name}/{number}")
        self.rate = 1.0 + world.options.drift * self.prng.uniform(-1.0, 1.0)
        machine = "one" if world.one_machine else name
        self.host = SimHost(
            world.loop,
            self.prng,
            world.internet,
            name,
            self.rate,
            machine,
            number + 1,
            world.watch,
        )
        self.owner = f"{name}/{number}"
        groups = tuple(replace(g, padding=self.prng.choice((0, 16, 64))) for g in GROUPS)
        if world.unequal:
            sizes = world.child(f"blocks/{name}/{number}")
            groups = tuple(
                replace(
                    g, order=TOKEN_MAJOR, tokens_per_block=g.tokens_per_block * sizes.choice(SCALES)
                )
                for g in groups
            )
        self.space: Space = world.arena.allocate(
            name, self.owner, groups, {group.name: world.options.slots for group in groups}
        )
        self.free = {g.name: deque(range(world.options.slots)) for g in GROUPS}
        self.runners: list[SimRunner] = []
        self.agents: list[str] = []
        self.engine: Engine | None = None
        self.serving: asyncio.Task[None] | None = None
        self.up: asyncio.Future[None] = world.loop.create_future()
        self.closing = asyncio.Event()
        self.died: asyncio.Future[None] = world.loop.create_future()
        self.dead = False
        self.ended_s: float | None = None
        self.closed = False  # its engine was closed; the process goes on without one
        self._awaited: asyncio.Future[None] | None = None
        self.starved = False
        self._waiting: list[asyncio.Future[None]] = []
        self.paused_s = 0.0
        self.paused_since: float | None = None

    def transport(self) -> WorkerTransport:
        """The real worker and memory backend, stepped by a simulated runner."""
        world = self.world

        def make_backend(name: str, regions: Any) -> MemoryBackend:
            self.agents.append(name)
            return MemoryBackend(
                name, regions, fabric=world.fabric, memory=world.courier, courier=world.courier
            )

        def make_runner(name: str) -> SimRunner:
            runner = SimRunner(world.loop, self.prng, self.gate, self.host.now, self._blocks_s)
            runner.on_wake = self._woken
            self.runners.append(runner)
            return runner

        return WorkerTransport(
            "sim",
            BOUNDS,
            make_backend,
            agents=world.options.agents,
            describe=lambda: "simulated",
            runner_factory=make_runner,
        )

    def _blocks_s(self) -> float:
        """How long the call that an I/O thread just made blocks it."""
        world = self.world
        if world.healed or self.prng.random() >= world.options.worker_blocked:
            return 0.0
        world.count(Fault.WORKER_BLOCKED)
        return self.prng.choice((0.001, 0.05, 2.5)) * self.prng.random()

    def _woken(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    async def hands_over(self) -> None:
        """Wait until the engine hands something to an I/O thread that has not taken it yet."""
        self._awaited = self.world.loop.create_future()
        await self._awaited

    def spawn(self, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `coro` as this process's code."""
        return self.world.loop.create_task(coro, context=self.gate.context())

    @property
    def over(self) -> bool:
        """Nothing new can be asked of it, and its word can't be had any more."""
        return self.dead or self.closed

    def pauses_s(self) -> float:
        """How long this process or one of its threads was stopped so far."""
        now = self.world.loop.time()
        return self.paused_s + (now - self.paused_since if self.paused_since is not None else 0.0)

    # ------------------------------------------------------------ slots

    def allocate(self, wanted: dict[str, int]) -> dict[str, list[int]] | None:
        """Take free slots, the latest released first; None when there are too few.

        Raises Starved when no more will come: quarantine has them.
        """
        if self.starved:
            raise Starved
        if any(len(self.free[group]) < count for group, count in wanted.items()):
            return None
        return {g: [self.free[g].pop() for _ in range(count)] for g, count in wanted.items()}

    def give_back(self, slots: dict[str, list[int]]) -> None:
        """Slots are free: the next transfer takes exactly these."""
        for group, given in slots.items():
            for slot in given:
                self.space.wipe(group, slot)
            self.free[group].extend(given)
        self._wake()

    def starve(self) -> None:
        """Whoever still waits for slots waits for ones that do not come back."""
        self.starved = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def slots_returned(self) -> None:
        """Wait until slots were given back."""
        future: asyncio.Future[None] = self.world.loop.create_future()
        self._waiting.append(future)
        await future


class World:
    """Everything of one seed."""

    def __init__(self, seed: int, options: Options, loop: SimLoop) -> None:
        self.seed = seed
        self.options = options
        self.loop = loop
        self.fired: Counter[Fault] = Counter()
        self.violated: asyncio.Future[None] = loop.create_future()
        self.checkers = Checkers(loop.time, self._stop)
        self.arena = Arena(self.checkers.lands)
        self.wiretap = Wiretap(self._heard)
        self.internet = Internet(loop, self.child("network"), options, self.count, self.wiretap.tap)
        self.courier = SimCourier(
            loop,
            self.child("courier"),
            options,
            self.internet,
            self.arena,
            self.checkers,
            self.count,
        )
        self.fabric = Fabric(loop.now)
        self.courier.fabric = self.fabric
        self.lives: list[Life] = []
        self.latest: dict[str, Life] = {}
        self.addresses: dict[str, str] = {}
        self.one_machine = self.child("machines").random() < ONE_MACHINE
        self.unequal = self.child("blocks").random() < UNEQUAL
        self.sides = 0
        self.healed = False
        if options.disorder:
            self.count(Fault.DISORDER)
        if options.drift:
            self.count(Fault.DRIFT)
        loop.set_exception_handler(self._unhandled)

    def child(self, concern: str) -> random.Random:
        """A PRNG for one concern: a change in one leaves the draws of the others alone."""
        return random.Random(f"{self.seed}/{concern}")

    def count(self, fault: Fault) -> None:
        self.fired[fault] += 1

    def _stop(self) -> None:
        if not self.violated.done():
            self.violated.set_result(None)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.checkers.violate(
            "no error is lost", f"{context.get('message')}: {type(error).__name__}: {error}"
        )

    # ------------------------------------------------------------ processes

    def new_life(self, name: str, address: str) -> Life:
        life = Life(self, name, address, len(self.lives))
        self.lives.append(life)
        self.addresses[name] = address
        self.latest[name] = life
        return life

    def watch(self, process: ProcessIdentity) -> Callable[[], bool]:
        """How to see that a process has ended and nothing that it posted still moves."""
        life = next(one for one in self.lives if one.host.identity() == process)

        def ended() -> bool:
            return life.dead and not self.courier.moves_of(life.owner)

        return ended

    def crash(self, life: Life) -> None:
        """Everything of this process ends at once; what it posted still lands."""
        self.checkers.note(None, f"{life.owner} is killed")
        life.dead = True
        life.ended_s = self.loop.time()
        life.died.set_result(None)
        life.gate.dead = True
        life.space.alive = False
        self.internet.kill(life.name)
        for agent in life.agents:
            self.fabric.leave(agent)

    # ------------------------------------------------------------ the wire

    def _heard(self, pipe: Pipe, message: Message) -> None:
        kind = message.get("t", "?")
        key = key_of(message)
        if kind == "granted":
            target = self.latest[pipe.source]
            until_s = self.loop.time() + message["ttl_ms"] / 1000 / target.rate
            self.checkers.granted(target.owner, self.latest[pipe.target].owner, until_s)
        if key is not None:
            request = int(key[0].removeprefix("r"))
            self.checkers.note(request, f"{pipe.source} -> {pipe.target}: {kind} {message}")
            self.checkers.frame(pipe.connection, kind, key, request)
        elif kind not in ("renew", "granted"):
            keys = [parts_of(key) for key in message.get("keys", ())]
            self.checkers.note(None, f"{pipe.source} -> {pipe.target}: {kind} {keys or ''}")
