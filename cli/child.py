"""One of the demo's two processes, seen from inside: its pipe to the parent, its life and end.

Two rules: the process never outlives its parent, whatever that died of; and what it has to say
goes over the pipe, so that stray output of libraries can't be mistaken for it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import uvloop

from ..engine.errors import KvferryError
from .messages import Command, Prepared, Trouble
from .workload import Settings, make_workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from .messages import Checked, Closed, Message, Moved, Opened

    Report = Callable[[Message], None]

_PR_SET_PDEATHSIG: Final = 1  # Source: linux/prctl.h


class Role(Protocol):
    """What the two processes do differently, step by step. first, stop: the round's requests."""

    async def open(self) -> Opened:
        """Make pool and engine, and start it."""
        ...

    async def prepare(self, first: int, stop: int) -> None:
        """Take the round's slots and fill them."""
        ...

    async def move(self, first: int, stop: int, source: str) -> Moved:
        """Run the round's transfers; return when they have ended on this side."""
        ...

    async def check(self, first: int, stop: int) -> Checked:
        """Compare the pool with what it must hold after the round."""
        ...

    async def close(self) -> Closed:
        """Close the engine."""
        ...


def main() -> None:
    """Serve the parent until it says close or is gone.

    Started as `python -m kvferry.cli.child ROLE PARENT_PID SETTINGS`.
    """
    _, name, parent, settings = sys.argv
    _die_with_parent(int(parent))
    # Only this pipe goes to the parent; whatever a library prints goes to stderr.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def report(message: Message) -> None:
        pipe.write(msgspec.json.encode(message) + b"\n")
        pipe.flush()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(_serve(name, msgspec.json.decode(settings, type=Settings), report)))


def _die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, and end if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


async def _serve(name: str, settings: Settings, report: Report) -> int:
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    try:
        role = _make_role(name, settings, report)
        while line := await commands.readline():
            command = msgspec.json.decode(line, type=Command)
            report(await _answer(role, command))
            if command.step == "close":
                return 0
    except (KvferryError, OSError, ImportError) as error:
        report(Trouble(f"{type(error).__name__}: {error}"))
    except Exception as error:  # noqa: BLE001  a bug: the parent says so, stderr says where
        traceback.print_exc()
        report(Trouble(f"a bug in the demo: {error!r}"))
    return 1


def _make_role(name: str, settings: Settings, report: Report) -> Role:
    # Imported here, after this process was bound to its parent: torch takes seconds to load.
    from .decode import Decode
    from .prefill import Prefill

    workload = make_workload(settings)
    if name == Prefill.name:
        return Prefill(settings, workload)
    return Decode(settings, workload, report)


async def _answer(role: Role, command: Command) -> Opened | Prepared | Moved | Checked | Closed:
    match command.step:
        case "open":
            return await role.open()
        case "prepare":
            await role.prepare(command.first, command.stop)
            return Prepared()
        case "move":
            return await role.move(command.first, command.stop, command.source)
        case "check":
            return await role.check(command.first, command.stop)
        case "close":
            return await role.close()


if __name__ == "__main__":
    main()
