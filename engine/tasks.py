"""Tasks with an owner: none is forgotten, none fails unheard, all can be ended in their order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Tasks:
    """The tasks of one engine. `on_error` hears what a task raised."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_error = on_error
        self._tasks: dict[asyncio.Task[None], None] = {}  # ordered, so that ending them is too

    def __len__(self) -> int:
        """Tasks that have not ended."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Start a task that this owns."""
        task = self._loop.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    async def cancel(self) -> None:
        """Cancel every task, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
