"""The demo's two processes, seen from the parent.

Two rules: whatever ends the parent ends them, and a process that died is told apart from one that
answers with trouble.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from .messages import Answer, Command, Message, Progress, Trouble

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from .workload import Settings

ANSWER_S: Final = 120.0  # a step that takes longer hangs
A = TypeVar("A", bound=Answer)
_LINE_BYTES_MAX: Final = 64 * 1024 * 1024  # latencies of a long run are one line


class DemoError(Exception):
    """The demo could not be run to its end; the text is for the user."""


class Child:
    """One of the two processes. Made by `running`."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, on_progress: Callable[[int], None]
    ) -> None:
        self.name = name
        self._process = process
        self._on_progress = on_progress

    async def ask(self, kind: type[A], command: Command) -> A:
        """Do one step; return its answer. Raises DemoError when there is none."""
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._ask(command)
        except TimeoutError:
            raise DemoError(f"{self.name}: no answer to {command.step!r} in {ANSWER_S} s") from None
        assert isinstance(answer, kind)
        return answer

    async def _ask(self, command: Command) -> Answer:
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        pipe.write(msgspec.json.encode(command) + b"\n")
        while line := await answers.readline():
            message: Message = msgspec.json.decode(line, type=Message)
            if isinstance(message, Progress):
                self._on_progress(message.done)
            elif isinstance(message, Trouble):
                raise DemoError(f"{self.name}: {message.text}")
            else:
                return message
        code = await self._process.wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise DemoError(f"the {self.name} process ended {how} while it was to {command.step}")


@asynccontextmanager
async def running(
    names: Sequence[str], settings: Settings, on_progress: Callable[[int], None]
) -> AsyncIterator[list[Child]]:
    """Start a process per name; kill them all when the scope is left."""
    processes: dict[str, asyncio.subprocess.Process] = {}
    # A Ctrl-C goes to the whole foreground process group. Children inherit this mask, so only the
    # parent gets it, and it ends them; it waits here for the moment that starting them takes.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        try:
            for name in names:
                processes[name] = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # as the command itself: not what lies in the current folder
                    "-m",
                    f"{__package__}.child",
                    name,
                    str(os.getpid()),
                    msgspec.json.encode(settings).decode(),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=_LINE_BYTES_MAX,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield [Child(name, process, on_progress) for name, process in processes.items()]
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.kill()
        for process in processes.values():
            await process.wait()
