"""The doctor's self-test: an engine in each of two processes, real NIXL, every byte compared.

Roles, pools and bytes are the demo's; here both are forked from one process that has loaded NIXL
and torch already, since that takes longer than the test. Two rules: first contact is no part of
the measured speed, and no process outlives its lane's time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import traceback
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop

from ..engine.errors import KvferryError, UsageError
from . import demo
from .messages import Checked, Closed, Moved
from .outcome import Outcome
from .probe import ending, last_line, ucx_words
from .workload import Settings, Workload, make_workload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from multiprocessing.connection import Connection

    from .child import Role

    Exchange = Callable[[str], Awaitable[str]]

DEFAULT: Final = ""  # the lane that UCX chooses; others are values of UCX_TLS
LANE_S: Final = 25.0  # for the processes of one lane
_NAMES: Final = ("prefill", "decode")
LOADING_S: Final = 60.0  # NIXL and torch, where nothing is cached
_WARMING: Final = 1  # requests before the measured ones, for first contact
_MEASURED: Final = 8
_MODEL: Final = "Llama-3.1-8B"
_SCALE: Final = 0.18  # requests of some 4 MiB


class Tested(msgspec.Struct, frozen=True):
    """One lane. trouble: empty when every byte is right. tried: False when it could not be run.

    bytes, requests: those that were measured. said: UCX's own warnings and errors.
    """

    trouble: str = ""
    tried: bool = True
    lane: str = ""
    requests: int = 0
    bytes: int = 0
    gb_per_s: float = 0.0
    said: list[str] = []


class Side(msgspec.Struct, frozen=True):
    """What one of the two processes reports: of each round, and of its end."""

    trouble: str = ""
    lane: str = ""
    moved: list[Moved] = []
    checked: list[Checked] = []
    closed: Closed | None = None


def run_selftest(lanes: Sequence[str]) -> list[Tested]:
    """Test each lane, one after the other, in new processes. Never raises for how they end."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, *lanes],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LOADING_S + LANE_S * len(lanes),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return [Tested(f"no result within {error.timeout:g} s")] * len(lanes)
    said = ucx_words(done.stderr)
    try:
        found = msgspec.json.decode(done.stdout, type=list[Tested])
    except msgspec.MsgspecError:
        text = f"its process ended {ending(done.returncode)}{last_line(done.stderr)}"
        found = [Tested(text)] * len(lanes)
    return [msgspec.structs.replace(one, said=said) for one in found]


def judge(settings: Settings, workload: Workload, prefill: Side, decode: Side) -> Tested:
    """What both sides' reports come to."""
    trouble = prefill.trouble or decode.trouble
    if trouble or prefill.closed is None or decode.closed is None:
        return Tested(trouble or "a process ended early and said nothing")
    outcome = Outcome(settings, workload)
    for sent, moved, checked in zip(prefill.moved, decode.moved, decode.checked, strict=True):
        outcome.add_round(sent, moved, checked)
    outcome.close(prefill.closed, decode.closed)
    wrong = outcome.failures + [str(difference) for difference in outcome.differences]
    blocks = sum(workload.blocks(request) for request in range(settings.requests))
    needed = blocks * workload.geometry.block_bytes
    if not wrong and outcome.bytes != needed:
        wrong = [f"{outcome.bytes} bytes were moved, {needed} are needed"]
    measured = decode.moved[-1]
    return Tested(
        wrong[0] if wrong else "",
        lane=decode.lane,
        requests=len(measured.latencies_ms),
        bytes=measured.bytes,
        gb_per_s=measured.bytes / measured.seconds / 1e9 if measured.seconds else 0.0,
    )


# ---------------------------------------------------------------- in the processes


def main() -> None:
    """Test the lanes named by the arguments; print a list of `Tested` as JSON."""
    pipe = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no result
    tested = [_test(lane) for lane in sys.argv[1:]]
    os.write(pipe, msgspec.json.encode(tested))


def _test(lane: str) -> Tested:
    settings = Settings(_MODEL, _SCALE, _WARMING + _MEASURED, seed=0, in_flight=_MEASURED)
    workload = make_workload(settings)
    try:
        demo.check_memory(workload, demo.memory_available())
        from ..transports.nixl import agent
        from . import decode, prefill  # noqa: F401  loads torch, once for all sides

        agent.bindings()
    except (UsageError, ImportError) as error:
        return Tested(str(error), tried=False)
    ends = socket.socketpair()
    sides = [
        _Forked(name, end, other, lane, settings, workload)
        for name, end, other in zip(_NAMES, ends, ends[::-1], strict=True)
    ]
    for end in ends:
        end.close()
    deadline = time.monotonic() + LANE_S
    try:
        reports = [side.report(deadline - time.monotonic()) for side in sides]
    finally:
        for side in sides:
            side.end()
    return judge(settings, workload, *reports)


class _Forked:
    """One of the two processes, seen from the one that has loaded everything."""

    def __init__(
        self,
        name: str,
        end: socket.socket,
        other: socket.socket,
        lane: str,
        settings: Settings,
        workload: Workload,
    ) -> None:
        self._name = name
        fork = multiprocessing.get_context("fork")
        self._reports, theirs = fork.Pipe(duplex=False)
        arguments = (name, end, other, lane, settings, workload, theirs)
        self._process = fork.Process(target=_run_side, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def report(self, timeout_s: float) -> Side:
        """What it reports, or how it ended without."""
        if not self._reports.poll(max(0.0, timeout_s)):
            return Side(f"{self._name}: no result within {LANE_S:g} s")
        try:
            return msgspec.json.decode(self._reports.recv_bytes(), type=Side)
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            return Side(f"the {self._name} process ended {ending(code or 0)}")

    def end(self) -> None:
        """No process is left."""
        self._process.kill()
        self._process.join()


def _run_side(
    name: str,
    end: socket.socket,
    other: socket.socket,
    lane: str,
    settings: Settings,
    workload: Workload,
    reports: Connection,
) -> None:
    other.close()  # inherited; held open, it would hide that its process has ended
    # UCX reads its settings when the agent is created, which has not happened yet.
    if lane != DEFAULT:
        os.environ["UCX_TLS"] = lane
        os.environ.pop("UCX_NET_DEVICES", None)  # it may name devices that this lane can't use
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        side = runner.run(_serve(name, end, settings, workload))
    reports.send_bytes(msgspec.json.encode(side))


async def _serve(name: str, end: socket.socket, settings: Settings, workload: Workload) -> Side:
    from .decode import Decode
    from .prefill import Prefill

    try:
        role: Role
        if name == Prefill.name:
            role = Prefill(settings, workload)
        else:
            role = Decode(settings, workload, lambda _: None)
        reader, writer = await asyncio.open_connection(sock=end)

        async def exchange(text: str) -> str:
            writer.write(text.encode() + b"\n")
            return (await reader.readuntil(b"\n")).decode().strip()

        return await _play(role, settings, exchange)
    except (asyncio.IncompleteReadError, ConnectionError):
        return Side()  # the other process has ended, and its report says why
    except (KvferryError, OSError, ImportError) as error:
        return Side(f"{name}: {type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001  a bug: the doctor says so, stderr says where
        traceback.print_exc()
        return Side(f"{name}: a bug in the self-test: {error!r}")


async def _play(role: Role, settings: Settings, exchange: Exchange) -> Side:
    """Both sides do this in step: what is measured begins when both are ready."""
    opened = await role.open()
    source = await exchange(opened.address)
    moved, checked = [], []
    for first, stop in pairwise((0, _WARMING, settings.requests)):
        await role.prepare(first, stop)
        await exchange("")
        moved.append(await role.move(first, stop, source))
        await exchange("")
        checked.append(await role.check(first, stop))
    await exchange("")
    return Side(lane=opened.lane, moved=moved, checked=checked, closed=await role.close())


if __name__ == "__main__":
    main()
