"""An asyncio event loop with a virtual clock, whose schedule is a function of a seed.

One ready callback runs per step. With the seed's *disorder* rate the step takes any of the ready
ones instead of the oldest; when nothing is ready, the clock jumps to the next timer. Two rules:
nothing here reads a real clock or waits, and every step is hashed into the trace.

Source: `BaseEventLoop._run_once`, `_ready` and `_scheduled` of CPython 3.11 to 3.13 (private;
test_loop.py notices when they change).
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import random
import threading
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any
from weakref import WeakKeyDictionary

TAKE_DOWN_ROUNDS = 5
TAKE_DOWN_STEPS = 20_000
STEP_S = 1e-6  # what a step costs on the virtual clock: a busy loop can't stop time


class Deadlock(AssertionError):
    """Every task waits and no timer is armed, or the step budget is used up."""


class Gate:
    """Whether the callbacks of a simulated process (or of one of its threads) may run.

    Callbacks belong to the gate of the context that they were scheduled in. A closed gate
    withholds them until it opens again; a dead one drops them for good.
    """

    def __init__(self, label: str, parent: Gate | None = None) -> None:
        self.label = label
        self.parent = parent
        self.closed = False
        self.dead = False

    @property
    def is_dead(self) -> bool:
        return self.dead or (self.parent is not None and self.parent.is_dead)

    @property
    def is_closed(self) -> bool:
        return self.closed or (self.parent is not None and self.parent.is_closed)

    def context(self) -> Context:
        """A fresh context whose callbacks belong to this gate."""
        context = copy_context()
        context.run(_gate.set, self)
        return context


_gate: ContextVar[Gate | None] = ContextVar("gate", default=None)
NOBODY = Context()  # of callbacks that no process owns: the network's, the memory's, the test's


def current_gate() -> Gate | None:
    """The gate of the running callback."""
    return _gate.get()


class SimLoop(base_events.BaseEventLoop):
    """A loop without files, threads and real time.

    prng: decides the schedule, and nothing else does.
    disorder: 0 runs callbacks first in, first out, as asyncio does; 1 always picks any.
    """

    def __init__(self, prng: random.Random, *, disorder: float = 0.0, steps_max: int) -> None:
        super().__init__()
        self._now_s = 0.0
        self._prng = prng
        self._disorder = disorder
        self._trace = hashlib.blake2b(digest_size=16)
        self._tasks_made = 0
        self._gates: WeakKeyDictionary[asyncio.Task[Any], Gate | None] = WeakKeyDictionary()
        self._withheld: deque[events.Handle] = deque()
        self._dropped: list[events.Handle] = []
        self._taking_down = False
        self.steps = 0
        self.steps_max = steps_max
        self.set_task_factory(self._make_task)

    # ------------------------------------------------------------ time and trace

    def time(self) -> float:
        return self._now_s

    def now(self) -> int:
        """Virtual nanoseconds."""
        return round(self._now_s * 1e9)

    def trace_hash(self) -> str:
        """Hash over (virtual time, label) of every step so far."""
        return self._trace.hexdigest()

    # ------------------------------------------------------------ what asyncio asks for

    def _process_events(self, event_list: object) -> None:
        raise AssertionError("a simulated loop has no selector")

    def _write_to_self(self) -> None:
        """There is no other thread to be woken from."""

    def run_in_executor(self, *args: object) -> Any:
        raise RuntimeError("threads are not simulated: run_in_executor was called")

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **kwargs: Any
    ) -> asyncio.Task[Any]:
        """Name tasks by what they run and a count of this loop: the default counts globally."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **kwargs)
        self._tasks_made += 1
        context = kwargs.get("context")
        self._gates[task] = _gate.get() if context is None else context.get(_gate)
        if kwargs.get("name") is None:
            task.set_name(f"{getattr(coro, '__qualname__', '?')}-{self._tasks_made}")
        return task

    def _run_once(self) -> None:
        self._collect_timers()
        handle = self._pick()
        if handle is None:
            return
        self.steps += 1
        if self.steps > self.steps_max:
            raise Deadlock(
                f"{self.steps_max} steps used up at {self._now_s:.6f} s: a loop that never rests?"
            )
        self._now_s += STEP_S
        if not self._taking_down:
            self._trace.update(f"{self._now_s:.9f} {label_of(handle)}\n".encode())
        handle._run()

    def _collect_timers(self) -> None:
        """Move due timers to the ready callbacks; jump to the next one when nothing is ready."""
        timers = self._scheduled  # type: ignore[attr-defined]
        ready = self._ready  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not timers:
                raise Deadlock(f"nothing can run any more at {self._now_s:.6f} s")
            self._now_s = max(self._now_s, timers[0]._when)
        while timers and timers[0]._when <= self._now_s:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            ready.append(handle)

    def _pick(self) -> events.Handle | None:
        """Take one callback that may run; put aside those whose gate is closed."""
        ready: deque[events.Handle] = self._ready  # type: ignore[attr-defined]
        while ready:
            index = 0
            if len(ready) > 1 and self._disorder and self._prng.random() < self._disorder:
                index = self._prng.randrange(len(ready))
            handle = ready[index]
            del ready[index]
            if handle._cancelled:
                continue
            gate = handle._context.get(_gate)  # type: ignore[attr-defined]
            if gate is None or self._taking_down:
                return handle
            if gate.is_dead:
                self._dropped.append(handle)  # kept: its task must not be collected in mid-run
            elif gate.is_closed:
                self._withheld.append(handle)
            else:
                return handle
        return None

    def gate_of(self, task: asyncio.Task[Any]) -> Gate | None:
        """The gate whose code a task is."""
        return self._gates[task]

    def open_gate(self, gate: Gate) -> None:
        """Let `gate`'s callbacks run again, in the order in which they became due."""
        gate.closed = False
        self._ready.extend(self._withheld)  # type: ignore[attr-defined]
        self._withheld.clear()

    def take_down(self) -> None:
        """End every task, those of dead processes too, and close. Nothing of it is traced."""
        self._taking_down = True
        self._disorder = 0.0
        self.set_exception_handler(lambda loop, context: None)
        self._ready.extend([*self._withheld, *self._dropped])  # type: ignore[attr-defined]
        for _ in range(TAKE_DOWN_ROUNDS):
            tasks = sorted(asyncio.all_tasks(self), key=asyncio.Task.get_name)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.steps_max = self.steps + TAKE_DOWN_STEPS
            with suppress(Exception):
                self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.close()


def label_of(handle: events.Handle) -> str:
    """What a callback is, as text that does not differ between runs."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    while hasattr(callback, "func"):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return owner.get_name()
    return getattr(callback, "__qualname__", type(callback).__name__)


@contextmanager
def threads_refused() -> Iterator[None]:
    """Raise when anything starts a thread: its steps would not be in the trace."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError(f"threads are not simulated: {thread.name} was started")

    start: Callable[[threading.Thread], None] = threading.Thread.start
    threading.Thread.start = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def run(main: Callable[[SimLoop], Coroutine[Any, Any, Any]], loop: SimLoop) -> Any:
    """Run `main(loop)` to its end on `loop`, then take down whatever still runs there."""
    with threads_refused():
        try:
            return loop.run_until_complete(loop.create_task(main(loop)))
        finally:
            loop.take_down()
