"""The test's side of a node: start it, call it, end it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_ANSWER_S = 40.0  # something hangs, not something is slow
LANES = ("default", "tcp")


class Process:
    """A node process on one lane. Its methods are those of `node.Node`."""

    def __init__(self, lane: str) -> None:
        environ = {name: v for name, v in os.environ.items() if not name.startswith("UCX_")}
        if lane != "default":
            environ["UCX_TLS"] = lane
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.node", str(theirs.fileno())],
            cwd=_ROOT,
            env=environ,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            return self._call(method, arguments, named)

        return call

    def _call(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._connection.send((method, arguments, named))
        if not self._connection.poll(_ANSWER_S):
            self.kill()  # its answers would be taken for those of later calls
            raise TimeoutError(f"no answer to {method}{arguments} in {_ANSWER_S} s")
        fine, value = self._connection.recv()
        if not fine:
            raise RuntimeError(f"{method}: {value}")
        return value

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def exit(self, code: int) -> int:
        """Let it return from its main coroutine and `sys.exit(code)`; return its exit code."""
        self._connection.send(("exit", (code,), {}))
        return self.process.wait(_ANSWER_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()
