"""The observer's side of a node: start it, command it, stop, continue and kill it.

Two rules: a signal is confirmed before it is relied on (every thread stopped, process reaped);
whatever happens, `end` leaves no process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.truth.shared import Pool

_ROOT = Path(__file__).parents[2]
_COMMAND_S = 60.0


def _plain_environment() -> dict[str, str]:
    """The environment without what would choose lanes or time-outs for the nodes."""
    chosen = ("UCX_", "NIXL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(chosen)}


class NodeDied(Exception):
    """A node ended on its own: `code` is its return code (minus the signal's number)."""

    def __init__(self, name: str, code: int | None) -> None:
        super().__init__(f"{name} died by itself, return code {code}")
        self.name = name
        self.code = code


class Peer:
    """One node process. `prefix` is put before its command (`ip netns exec NAME`)."""

    def __init__(
        self, name: str, size: int, fill: int, env: dict[str, str], prefix: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.pool = Pool.create(size, fill)
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        handles = (theirs.fileno(), self.pool.descriptor)
        words = [*map(str, handles), str(size), name]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.truth.node", *words],
            cwd=_ROOT,
            env=_plain_environment() | env,
            pass_fds=handles,
        )
        theirs.close()
        self._killed = False

    @property
    def died(self) -> bool:
        """Whether the process ended without having been killed by the observer."""
        return not self._killed and self.process.poll() is not None

    def call(self, method: str, *arguments: Any) -> Any:
        """Run one command of the node and return its answer."""
        self.send(method, *arguments)
        return self.answer()

    def send(self, method: str, *arguments: Any) -> None:
        try:
            self._connection.send((method, arguments))
        except OSError:
            raise NodeDied(self.name, self.process.wait(10)) from None

    def answer(self, timeout: float = _COMMAND_S) -> Any:
        try:
            if not self._connection.poll(timeout):
                raise TimeoutError(f"{self.name} did not answer within {timeout} s")
            fine, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise NodeDied(self.name, self.process.wait(10)) from None
        if not fine:
            raise RuntimeError(f"{self.name}: {value}")
        return value

    def stop(self) -> None:
        """SIGSTOP; returns when every thread of the process is stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while any(state != "T" for state in self._thread_states()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} has threads that do not stop")
            time.sleep(0.0002)

    def _thread_states(self) -> list[str]:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [(task / "stat").read_text().rsplit(")", 1)[1].split()[0] for task in tasks]

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when the process is reaped."""
        self._killed = True
        self.process.kill()
        self.process.wait(30)

    def end(self) -> None:
        self.kill()
        self._connection.close()
        self.pool.close()
