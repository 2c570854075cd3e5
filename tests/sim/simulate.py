"""Runs one seed: two phases, then the books are balanced.

Safety: faults and requests together. Liveness: everything is healed, and all transfers must end
and all slots come back within a bounded virtual time. Two rules: the verdict is a function of
the seed and the code, and a failure says how to repeat it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.engine.config import Config
from kvferry.engine.service import Engine

from .callers import run_source, run_target
from .coverage import rows_counted
from .injector import Injector
from .layouts import layout_of
from .loop import Deadlock, SimLoop, run
from .options import Options, draw
from .workload import MATCH_S, STALL_S, TOTAL_S, Request, draw_requests
from .world import PERMIT_TTL_S, World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from contextlib import AbstractContextManager

    from .checkers import Side
    from .world import Life

    Runner = Callable[[World, Life, Request], Awaitable[None]]

STEPS_MAX = 400_000
UP_S = 30.0
SAFETY_S = 12.0
LIVENESS_S = 60.0
NOTICED_S = 10.0  # the longest partition and a permit
SETTLE_S = 5.0
STARVED_S = 25.0
CLOSE_S = 5.0
CLOSED_S = 30.0


@dataclass(slots=True)
class Result:
    """The verdict on one seed. `failure` is empty when it passed.

    trace: hash over every step's time and callback. story_hash: over every call, frame, post,
    fault and log line with its time. transfers: requests; each has one to three attempts.
    """

    seed: int
    failure: str = ""
    story: str = ""
    trace: str = ""
    story_hash: str = ""
    engines: int = 0
    transfers: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        if not self.failure:
            return f"seed {self.seed} passed: {self.steps} steps, {self.virtual_s:.3f} s"
        return (
            f"seed {self.seed} FAILED at step {self.steps}, {self.virtual_s:.6f} s: "
            f"{self.failure}\nstory:\n{self.story}\n"
            f"replay: python -m tests.sim --seeds 1 --start {self.seed}"
        )


class _LogToStory(logging.Handler):
    """What the engines log belongs to the story; an error is a failure by itself."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info is not None and record.exc_info[1] is not None:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        if record.levelno >= logging.ERROR:
            self._world.checkers.violate("no error is lost", text)
        else:
            self._world.checkers.note(None, f"log: {text}")


@contextmanager
def _logged(world: World) -> Iterator[None]:
    logger = logging.getLogger("kvferry")
    handler = _LogToStory(world)
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def simulate(seed: int, plant: AbstractContextManager[None] | None = None) -> Result:
    """Run one seed; `plant` is entered around it, and is how a bug is planted."""
    options = draw(random.Random(f"{seed}/options"))
    loop = SimLoop(
        random.Random(f"{seed}/schedule"), disorder=options.disorder, steps_max=STEPS_MAX
    )
    result = Result(seed)
    worlds: list[World] = []
    with ExitStack() as stack:
        stack.enter_context(rows_counted(result.rows))
        if plant is not None:
            stack.enter_context(plant)
        try:
            run(lambda loop: _main(loop, seed, options, worlds, result, stack), loop)
        except Deadlock as error:
            result.failure = result.failure or f"liveness: {error}"
    world = worlds[0]
    result.faults.update({str(fault): n for fault, n in world.fired.items()})
    result.story = world.checkers.story()
    result.story_hash = world.checkers.story_hash()
    result.engines, result.transfers = options.engines, options.transfers
    return result


async def _main(
    loop: SimLoop,
    seed: int,
    options: Options,
    worlds: list[World],
    result: Result,
    stack: ExitStack,
) -> None:
    world = World(seed, options, loop)
    worlds.append(world)
    stack.enter_context(_logged(world))
    play = asyncio.ensure_future(_play(world, options))
    try:
        await _first(play, world.violated)
        if play.done():
            play.result()
    except _Stuck as error:
        stuck = _unfinished(world) or _owed(world)
        world.checkers.violate("liveness", str(error), stuck[0].request if stuck else None)
    except Exception:  # noqa: BLE001 - an error of the workload itself is told with its seed, too
        world.checkers.violate("no error is lost", traceback.format_exc())
    finally:
        world.checkers.over = True
        result.steps, result.virtual_s = loop.steps, loop.time()
        result.trace = loop.trace_hash()
        if world.checkers.violations:
            result.failure = world.checkers.violations[0]
        for side in _sides(world):
            result.outcomes[side.outcome.partition(":")[0]] += 1


class _Stuck(Exception):
    """Something did not happen within its virtual time."""


async def _play(world: World, options: Options) -> None:
    names = [f"p{n}" for n in range(options.engines)]
    for n, name in enumerate(names):
        _begin_life(world, name, f"127.0.0.{n + 1}:7400")
    for life in list(world.lives):
        await _within(UP_S, life.up, lambda: "a process does not come up")
    callers = asyncio.gather(
        *(
            _call(world, at_s, name, runner, request)
            for request in draw_requests(
                world.child("workload"), world.child("priorities"), options, names
            )
            for at_s, name, runner in (
                (request.target_at_s, request.target, run_target),
                (request.source_at_s, request.source, run_source),
            )
        )
    )
    injector = Injector(world, _restart)
    injector.start()
    watch = asyncio.ensure_future(_watch_integrity(world))
    await _first(callers, asyncio.ensure_future(asyncio.sleep(options.spread_s + SAFETY_S)))
    await injector.heal()
    await _first(callers, asyncio.ensure_future(asyncio.sleep(STARVED_S)))
    for life in world.lives:
        life.starve()
    await _within(LIVENESS_S, callers, lambda: f"these did not end: {_titles(_unfinished(world))}")
    callers.result()
    returned = asyncio.ensure_future(_all_returned(world))
    await _within(LIVENESS_S, returned, lambda: f"slots are not back: {_titles(_owed(world))}")
    await asyncio.sleep(SETTLE_S)  # what is excused but can come back does so
    watch.cancel()
    _balance(world)
    await _close(world)


def _begin_life(world: World, name: str, address: str) -> Life:
    life = world.new_life(name, address)
    life.serving = life.spawn(_serve(life))
    return life


async def _restart(life: Life) -> None:
    """The same process again, with nothing of its former life: closed first unless killed."""
    if not life.dead:
        life.closed = True
        life.closing.set()
        assert life.serving is not None
        await _first(life.serving)
        life.serving.result()
        life.ended_s = life.world.loop.time()
    await _begin_life(life.world, life.name, life.address).up


async def _serve(life: Life) -> None:
    """A process's main: an engine for as long as it lives."""
    options = life.world.options
    config = Config(
        name=life.name,
        listen=life.address,
        match_s=MATCH_S,
        stall_s=STALL_S,
        total_s=TOTAL_S,
        permit_ttl_s=PERMIT_TTL_S,
        dial_s=3.0,
        close_s=CLOSE_S,
        peer_posted_writes_max=options.window,
        peer_posted_bytes_max=options.window_bytes,
        offers_waiting_max=options.offers_max,
        sends_max=options.transfers_max,
        receives_max=options.transfers_max,
    )
    async with Engine(
        config, layout=layout_of(life.space), transport=life.transport(), host=life.host
    ) as engine:
        life.engine = engine
        life.up.set_result(None)
        await life.closing.wait()


async def _call(world: World, at_s: float, name: str, runner: Runner, request: Request) -> None:
    """Have the process that runs as `name` at `at_s` play one side of a request."""
    await asyncio.sleep(at_s)
    while world.latest[name].engine is None or world.latest[name].closed:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    life = world.latest[name]
    if not life.dead:
        task = life.spawn(runner(world, life, request))
        await _first(task, life.died)
        if task.done():
            task.result()


# ---------------------------------------------------------------- judging the end


def _sides(world: World) -> list[Side]:
    return [*world.checkers.receives, *world.checkers.sends]


def _unfinished(world: World) -> list[Side]:
    return [side for side in _sides(world) if side.ended_s is None and side.space.alive]


def _owed(world: World) -> list[Side]:
    """Sides whose slots must come back and are not back: nothing excuses them."""
    open_ = [life.space for life in world.lives if not life.over]
    return [
        side
        for side in _sides(world)
        if side.outstanding and side.space in open_ and not _excused(world, side)
    ]


def _titles(sides: list[Side]) -> str:
    return ", ".join(f"{side.title} ({side.outstanding} slots out)" for side in sides[:5])


def _excused(world: World, side: Side) -> bool:
    """Whether evidence can't be had: the source ended, or a completion is lost for good.

    Of a source that was killed on this machine, its end is evidence for all that it ever had.
    """
    checkers = world.checkers
    sources = [life for life in world.lives if life.name == side.peer and _may_have(life, side)]
    if world.one_machine and sources and all(life.dead for life in sources):
        return False
    if any(write.touches(side) for write in checkers.lost):
        return True
    return bool(side.peer) and (_source_is_over(world, side) or _is_unclean(world, side))


def _is_unclean(world: World, side: Side) -> bool:
    """Whether a write of it ended by an error: what is in buffers may land at any time."""
    return any(
        write.target is side.space and write.touches(side) for write in world.checkers.failed
    )


def _source_is_over(world: World, side: Side) -> bool:
    """Whether its slots may have been offered to a source that ended, before that was noticed."""
    return any(
        life.over and _may_have(life, side) for life in world.lives if life.name == side.peer
    )


def _may_have(life: Life, side: Side) -> bool:
    """Whether this life of a source had not ended, or not noticeably, when `side` began."""
    return life.ended_s is None or life.ended_s >= side.started_s - NOTICED_S


async def _all_returned(world: World) -> None:
    while _owed(world):  # noqa: ASYNC110 - virtual time costs nothing
        await asyncio.sleep(0.1)


def _balance(world: World) -> None:
    """I6: what did not come back is counted by the engine that lent it, slot by slot."""
    for life in world.lives:
        if life.over or life.engine is None:
            continue
        stats = life.engine.stats()
        receives = [s for s in world.checkers.receives if s.space is life.space]
        owed = sum(side.outstanding for side in receives)
        stranded = sum(
            side.outstanding
            for side in receives
            if not any(write.touches(side) for write in world.checkers.lost)
        )
        if not (owed == stats.slots_lent and stranded <= stats.slots_quarantined <= owed):
            world.checkers.violate(
                "I6", f"{life.owner}: {owed} slots are out, {stranded} for good; it says {stats}"
            )
        owed = sum(s.outstanding for s in world.checkers.sends if s.space is life.space)
        if bool(owed) != bool(stats.writes_open):
            world.checkers.violate("I6", f"{life.owner}: {owed} blocks are out; it says {stats}")


async def _watch_integrity(world: World) -> None:
    """The engine's own bookkeeping contradicts itself at no time."""
    while True:
        await asyncio.sleep(0.2)
        for life in world.lives:
            if life.engine is not None and not life.over:
                _check_engine(world, life)


def _check_engine(world: World, life: Life) -> None:
    assert life.engine is not None
    stats = life.engine.stats()
    if stats.internal_errors or stats.callback_errors:
        world.checkers.violate("no error is lost", f"{life.owner}: {stats}")
    try:
        life.engine.check_integrity()
    except AssertionError as error:
        world.checkers.violate("integrity", f"{life.owner}: {error}")


async def _close(world: World) -> None:
    """Every engine closes in bounded time and leaves no task behind."""
    for life in world.lives:
        if not life.over:
            life.closed = True
            life.closing.set()
    for life in world.lives:
        if not life.dead and life.serving is not None:
            await _within(CLOSED_S, life.serving, lambda: "an engine does not close")
            life.serving.result()
    left = sorted(
        task.get_name()
        for task in asyncio.all_tasks()
        if (gate := world.loop.gate_of(task)) is not None and not gate.is_dead
    )
    if left:
        world.checkers.violate("I7", f"tasks are left after closing: {left}")


# ---------------------------------------------------------------- waiting


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; unlike `asyncio.wait`, without sets."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(future: asyncio.Future[Any]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    for future in futures:
        future.add_done_callback(wake)
    try:
        await waiter
    finally:
        for future in futures:
            future.remove_done_callback(wake)


async def _within(limit_s: float, future: asyncio.Future[Any], what: Callable[[], str]) -> None:
    """Wait for `future` at most `limit_s` of virtual time. Raises _Stuck."""
    timer = asyncio.ensure_future(asyncio.sleep(limit_s))
    await _first(future, timer)
    timer.cancel()
    if not future.done():
        raise _Stuck(f"{what()} within {limit_s} s of virtual time")
