"""The simulated loop: same seed, same schedule; virtual time; gates; no threads."""

from __future__ import annotations

import asyncio
import random
import threading

import anyio
import anyio.to_thread
import pytest

from tests.sim.loop import STEP_S, Deadlock, Gate, SimLoop, run


def make(seed: int = 0, disorder: float = 0.0, steps_max: int = 10_000) -> SimLoop:
    return SimLoop(random.Random(seed), disorder=disorder, steps_max=steps_max)


def order_of_three(seed: int, disorder: float) -> tuple[list[int], str]:
    """In which order three tasks of ten rounds ran, and the trace hash."""
    order: list[int] = []

    async def rounds(me: int) -> None:
        for _ in range(10):
            order.append(me)
            await asyncio.sleep(0)

    async def main(loop: SimLoop) -> None:
        await asyncio.gather(*(rounds(me) for me in range(3)))

    loop = make(seed, disorder)
    run(main, loop)
    return order, loop.trace_hash()


def test_no_disorder_is_first_in_first_out() -> None:
    assert order_of_three(seed=5, disorder=0.0)[0] == [0, 1, 2] * 10


def test_schedule_and_trace_follow_the_seed() -> None:
    runs = {seed: order_of_three(seed, disorder=1.0) for seed in range(5)}
    for seed, (order, trace) in runs.items():
        assert order_of_three(seed, disorder=1.0) == (order, trace)
    assert len({tuple(order) for order, _ in runs.values()}) == 5
    assert len({trace for _, trace in runs.values()}) == 5


def test_clock_jumps_and_every_step_costs_a_little() -> None:
    async def main(loop: SimLoop) -> float:
        await asyncio.sleep(3600.0)
        return loop.time()

    assert 3600.0 <= run(main, make()) < 3600.001


def test_a_busy_loop_does_not_stop_time() -> None:
    async def main(loop: SimLoop) -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return loop.time()

    assert run(main, make()) > 500 * STEP_S


def test_deadlock_is_an_error() -> None:
    async def main(loop: SimLoop) -> None:
        await loop.create_future()

    with pytest.raises(Deadlock, match="nothing can run any more"):
        run(main, make())


def test_livelock_is_an_error() -> None:
    async def main(loop: SimLoop) -> None:
        while True:  # noqa: ASYNC110 - that is the point
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="100 steps used up"):
        run(main, make(steps_max=100))


@pytest.mark.parametrize(
    "start", [asyncio.to_thread, anyio.to_thread.run_sync], ids=["asyncio", "anyio"]
)
def test_threads_are_refused(start: object) -> None:
    async def main(loop: SimLoop) -> None:
        with pytest.raises(RuntimeError, match="threads are not simulated"):
            await start(threading.get_ident)  # type: ignore[operator]

    run(main, make())


def test_anyio_scopes_and_groups_work_in_any_order() -> None:
    async def main(loop: SimLoop) -> list[str]:
        told: list[str] = []
        with anyio.move_on_after(1.0) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep, 100.0)
                try:
                    await anyio.sleep(50.0)
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(0.5)
                        told.append("cleaned up")
        assert scope.cancelled_caught
        assert loop.time() < 2.0
        return told

    for seed in range(20):
        assert run(main, make(seed, disorder=1.0)) == ["cleaned up"]


def test_a_closed_gate_withholds_and_a_dead_one_drops() -> None:
    async def main(loop: SimLoop) -> list[str]:
        log: list[str] = []
        process = Gate("a")
        thread = Gate("a I/O", process)

        async def tick(name: str) -> None:
            while True:
                await asyncio.sleep(1.0)
                log.append(name)

        tasks = [
            loop.create_task(tick("process"), context=process.context()),
            loop.create_task(tick("thread"), context=thread.context()),
        ]
        await asyncio.sleep(1.5)
        thread.closed = True
        await asyncio.sleep(1.0)
        process.closed = True
        await asyncio.sleep(5.0)
        log.append("continue")
        loop.open_gate(process)
        await asyncio.sleep(0.2)
        loop.open_gate(thread)
        await asyncio.sleep(0.2)
        log.append("kill")
        process.dead = True
        await asyncio.sleep(5.0)
        assert not any(task.done() for task in tasks)
        return log

    assert run(main, make()) == [
        *("process", "thread", "process"),
        *("continue", "process", "thread", "kill"),
    ]
