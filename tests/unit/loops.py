"""Runs an async test under asyncio and under uvloop, and holds it to leaving nothing behind."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import TYPE_CHECKING

import pytest
import uvloop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test as two plain ones; fails also for errors that only reached the loop's handler."""
    parameters = list(inspect.signature(test).parameters.values())
    loop_parameter = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(test)
    def run(*, loop: str, **arguments: object) -> None:
        stray: list[object] = []

        async def main() -> None:
            handler = lambda _, context: stray.append(context)  # noqa: E731
            asyncio.get_running_loop().set_exception_handler(handler)
            await test(**arguments)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks were left: {left}"

        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(main())
        assert not stray, stray

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters] + [loop_parameter]
    )
    return pytest.mark.parametrize("loop", list(LOOPS))(run)
