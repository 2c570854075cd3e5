"""Watching processes: real ones, which end, have ended, or are not the one that is meant."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from kvferry.engine.host import RealHost, _start_time
from kvferry.engine.ports import ProcessIdentity


def start() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def identity(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    mine = RealHost().identity()
    return replace(mine, pid=process.pid, start_time=_start_time(str(process.pid)))


async def ends(identity: ProcessIdentity, seconds: float) -> bool:
    """Whether the watched process is said to have ended within so many seconds."""
    watch = RealHost().watch(identity)
    assert watch is not None
    try:
        async with asyncio.timeout(seconds):
            await watch.ended()
    except TimeoutError:
        return False
    finally:
        watch.close()
        watch.close()
    return True


@pytest.mark.asyncio
async def test_a_process_that_is_killed_has_ended_before_anybody_waits_for_it() -> None:
    process = start()
    try:
        meant = identity(process)
        assert not await ends(meant, 0.1)
        process.kill()
        assert await ends(meant, 10)
        process.wait()
        assert await ends(meant, 0.1), "its number may be gone: it has ended all the same"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.asyncio
async def test_a_later_process_of_the_same_number_is_not_taken_for_it() -> None:
    process = start()
    try:
        meant = identity(process)
        assert await ends(replace(meant, start_time=meant.start_time - 1), 0.1)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "change",
    [
        {"boot_id": "another boot"},
        {"boot_id": ""},
        {"pid_namespace": "pid:[1]"},
        {"net_namespace": "net:[1]"},
        {"net_namespace": ""},
        {"start_time": 0},
    ],
    ids=str,
)
def test_what_can_not_be_seen_from_here_is_not_watched(change: dict) -> None:
    assert RealHost().watch(replace(RealHost().identity(), **change)) is None


def test_two_unreadable_places_are_not_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable = replace(RealHost().identity(), boot_id="")
    monkeypatch.setattr(RealHost, "identity", lambda _: unreadable)
    assert RealHost().watch(unreadable) is None
