"""Breaks things while the safety phase lasts: connections, paths, threads, processes.

Two rules: whatever is stopped is continued, and nothing is broken after `heal`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from .options import Fault

if TYPE_CHECKING:
    from .loop import Gate
    from .world import Life, World

SHORT_S, LONG_S = 0.01, 5.0  # well below and well above the permit's time to live
RESTART_S = (0.05, 2.0)
ENDS_MAX = 2  # processes killed and engines closed, of one seed
AIMED = 0.6  # chance that a stop waits for the most delicate moment, at most AIM_S
AIM_S = 1.0

NETWORK = (Fault.RESET, Fault.HALF_RESET, Fault.EOF, Fault.PARTITION, Fault.PARTITION_ONE_WAY)
PROCESS = (
    Fault.WORKER_PAUSED,
    Fault.PROCESS_PAUSED,
    Fault.PROCESS_CRASHED,
    Fault.ENGINE_CLOSED,
)


class Injector:
    """Two tasks: one for the network's faults, one for the processes'."""

    def __init__(self, world: World, restart: Callable[[Life], Awaitable[None]]) -> None:
        self._world = world
        self._restart = restart
        self._prng = world.child("injector")
        self._ends = 0
        self._stopped: list[tuple[Life, Gate]] = []
        self._restarts: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        options = self._world.options
        for faults, act, every_s in (
            (NETWORK, self._hurt_network, options.network_every_s),
            (PROCESS, self._hurt_process, options.process_every_s),
        ):
            enabled = [fault for fault in faults if options.has(fault)]
            if enabled:
                prng = self._world.child(f"injector/{faults[0].name}")
                task = asyncio.ensure_future(self._repeat(prng, enabled, act, every_s))
                self._tasks.append(task)

    async def heal(self) -> None:
        """No fault from now on; what is stopped continues, what is cut passes."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        for life, gate in self._stopped:
            self._continue(life, gate)
        self._stopped.clear()
        self._world.healed = True
        self._world.internet.heal()
        self._world.courier.healed = True
        self._world.checkers.note(None, "everything is healed")
        await asyncio.gather(*self._restarts)

    async def _repeat(
        self,
        prng: random.Random,
        enabled: list[Fault],
        act: Callable[[random.Random, Fault], Awaitable[None]],
        every_s: float,
    ) -> None:
        while True:
            await asyncio.sleep(prng.expovariate(1.0 / every_s))
            await act(prng, prng.choice(enabled))

    # ------------------------------------------------------------ network

    async def _hurt_network(self, prng: random.Random, fault: Fault) -> None:
        internet = self._world.internet
        if fault in (Fault.PARTITION, Fault.PARTITION_ONE_WAY):
            one, other = prng.sample(list(self._world.latest), 2)
            duration_s = prng.choice((SHORT_S, 1.0, LONG_S)) * prng.uniform(0.5, 1.5)
            self._tell(fault, f"{one} and {other} for {duration_s:.3f} s")
            internet.cut(one, other, duration_s)
            if fault is Fault.PARTITION:
                internet.cut(other, one, duration_s)
            return
        streams = list(internet.streams.items())
        if not streams:
            return
        stream, owner = prng.choice(streams)
        self._tell(fault, f"connection {stream.connection} at {owner}")
        if fault is Fault.EOF:
            stream.end()
        else:
            stream.reset(both=fault is Fault.RESET)

    # ------------------------------------------------------------ processes

    async def _hurt_process(self, prng: random.Random, fault: Fault) -> None:
        world = self._world
        life = world.latest[prng.choice(list(world.latest))]
        if life.over or not life.up.done():
            return
        if fault in (Fault.PROCESS_CRASHED, Fault.ENGINE_CLOSED):
            if self._ends < ENDS_MAX:
                self._ends += 1
                self._tell(fault, life.owner)
                if fault is Fault.PROCESS_CRASHED:
                    world.crash(life)
                again = asyncio.ensure_future(self._begin_again(life, prng.uniform(*RESTART_S)))
                self._restarts.append(again)
                await asyncio.shield(again)
            return
        duration_s = prng.choice((SHORT_S, 1.0, LONG_S)) * prng.uniform(0.5, 1.5)
        if prng.random() < AIMED:
            with suppress(TimeoutError):
                await asyncio.wait_for(life.hands_over(), AIM_S)
            if life.over:
                return
        gate = life.gate if fault is Fault.PROCESS_PAUSED else prng.choice(life.runners).gate
        self._tell(fault, f"{gate.label} for {duration_s:.3f} s")
        gate.closed = True
        life.paused_since = world.loop.time()
        self._stopped.append((life, gate))
        await asyncio.sleep(duration_s)
        self._stopped.remove((life, gate))
        self._continue(life, gate)

    async def _begin_again(self, life: Life, after_s: float) -> None:
        if life.dead:
            await asyncio.sleep(after_s)
        await self._restart(life)

    def _continue(self, life: Life, gate: Gate) -> None:
        if life.paused_since is not None:
            life.paused_s += self._world.loop.time() - life.paused_since
            life.paused_since = None
        self._world.loop.open_gate(gate)
        self._world.checkers.note(None, f"{gate.label} continues")

    def _tell(self, fault: Fault, text: str) -> None:
        self._world.count(fault)
        self._world.checkers.note(None, f"FAULT {fault}: {text}")
