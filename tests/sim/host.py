"""A simulated process: its clock, its chance, its identity, and who drives its I/O worker.

Two rules: a process shares nothing with another but the network and the memory, and a stopped or
dead process runs nothing, not even the callback that is due.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.engine.ports import Event, ProcessIdentity, Steps

from .loop import Gate
from .network import SimNetwork

if TYPE_CHECKING:
    from .loop import SimLoop
    from .network import Internet

WAKE_S = (5e-6, 2e-4)  # from `wake` to the step
DELIVER_S = (0.0, 0.0, 1e-4, 5e-3)  # from the thread to a loop that is more or less busy
IDLE_S_MAX = 0.02  # steps that find nothing to report grow rarer up to this
PID_BASE = 5_000_000  # above every kernel's pid_max: no real process can be meant


class SimHost:
    """The port `Host` of one process.

    rate: how fast its clock runs; honest clocks differ by less than 1%.
    """

    def __init__(
        self,
        loop: SimLoop,
        prng: random.Random,
        internet: Internet,
        name: str,
        rate: float,
        machine: str,
        number: int,
        ended: Callable[[ProcessIdentity], Callable[[], bool]],
    ) -> None:
        """`machine`: processes of one see each other's end; `ended` makes the test for that.

        number: of this life; no two are alike.
        """
        self.network = SimNetwork(internet, name)
        self._loop = loop
        self._prng = prng
        self._rate = rate
        self._ended = ended
        self._identity = ProcessIdentity(
            boot_id=f"boot of {machine}",
            pid_namespace=f"pids of {machine}",
            net_namespace=f"net of {machine}",
            pid=PID_BASE + prng.randrange(10_000),
            start_time=number,
        )

    def now(self) -> int:
        return round(self._loop.now() * self._rate)

    def entropy(self, size: int) -> bytes:
        return self._prng.randbytes(size)

    def identity(self) -> ProcessIdentity:
        return self._identity

    def watch(self, process: ProcessIdentity) -> SimWatch | None:
        if process.boot_id != self._identity.boot_id:
            return None
        return SimWatch(self._ended(process))


class SimWatch:
    """Looks now and then whether a process has ended and all that it had sent has landed."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self._ended = ended

    async def ended(self) -> None:
        while not self._ended():  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(0.05)

    def close(self) -> None:
        pass


class SimRunner:
    """The port `Runner`: steps one worker by timers, as a thread would at its own pace.

    The worker has a gate of its own below its process's: an I/O thread can be stopped alone.
    blocks_s: drawn after each step, how long the call that it made blocks the thread.
    on_wake: called when commands were submitted and before they are taken.
    """

    def __init__(
        self,
        loop: SimLoop,
        prng: random.Random,
        process: Gate,
        now: Callable[[], int],
        blocks_s: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._prng = prng
        self._now = now
        self._process = process.context()
        self.gate = Gate(f"{process.label} I/O", process)
        self._thread = self.gate.context()
        self._worker: Steps | None = None
        self._deliver: Callable[[list[Event]], None] | None = None
        self._events: list[Event] = []
        self._timer: asyncio.TimerHandle | None = None
        self._idle = 0
        self._blocks_s = blocks_s
        self._free_at_s = 0.0
        self.on_wake: Callable[[], None] = lambda: None

    def start(self, worker: Steps, deliver: Callable[[list[Event]], None]) -> None:
        self._worker = worker
        self._deliver = deliver
        self.wake()

    def wake(self) -> None:
        self._idle = 0
        self._arm(self._prng.uniform(*WAKE_S))
        self.on_wake()

    def _arm(self, delay_s: float) -> None:
        delay_s = max(delay_s, self._free_at_s - self._loop.time())
        if self._timer is not None and not self._timer.cancelled():
            if self._timer.when() <= self._loop.time() + delay_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._step, context=self._thread)

    def _step(self) -> None:
        assert self._worker is not None
        self._timer = None
        now = self._now()
        when = self._worker.step(now)
        events = self._worker.take_events()
        if events:
            self._idle = 0
            if not self._events:
                delay_s = self._prng.choice(DELIVER_S) * self._prng.random()
                self._loop.call_later(delay_s, self._drain, context=self._process)
            self._events += events
        else:
            self._idle += 1
        self._free_at_s = self._loop.time() + self._blocks_s()
        if when is not None and not self._worker.stopped:
            rest_s = min(IDLE_S_MAX, 2e-5 * 1.5 ** min(self._idle, 30))
            self._arm(max((when - now) / 1e9, 0.0) + self._prng.uniform(0.5, 1.0) * rest_s)

    def _drain(self) -> None:
        assert self._deliver is not None
        events, self._events = self._events, []
        self._deliver(events)


def child(prng_seed: int | str, concern: str) -> random.Random:
    """A PRNG for one concern, so that a change in one leaves the draws of the others alone."""
    return random.Random(f"{prng_seed}/{concern}")
