"""What is left of ended processes in this process's sockets, with real sockets and processes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvferry.transports.nixl import sockets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SENDER = """
import socket, sys
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
link.setblocking(False)
try:
    while True:
        link.send(bytes(65536))
except BlockingIOError:
    print("full", flush=True)
input()
"""


@pytest.fixture(params=["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def link(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, subprocess.Popen]]:
    """(our end, a process that has sent into it as much as the kernel takes)."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listening:
        if request.param.startswith("::f"):
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(("::" if request.param.startswith("::f") else request.param, 0))
        listening.listen()
        address = "127.0.0.1" if request.param.startswith("::f") else request.param
        sender = subprocess.Popen(
            [sys.executable, "-c", SENDER, address, str(listening.getsockname()[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        ours, _ = listening.accept()
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"full\n"
        yield ours, sender
        ours.close()
        sender.kill()
        sender.communicate()


def read_all(ours: socket.socket) -> None:
    while ours.recv(1 << 20):
        pass


def test_bytes_of_a_living_process_are_not_left_over(link: tuple) -> None:
    assert not sockets.is_left_over()


def test_bytes_of_an_ended_process_are_left_over_until_its_socket_is_closed(link: tuple) -> None:
    ours, sender = link
    sender.kill()
    sender.wait()
    assert sockets.is_left_over(), "its kernel still sends what our kernel had no room for"
    read_all(ours)
    assert sockets.is_left_over(), "all is read, but whoever read it has not closed the socket"
    ours.close()
    assert not sockets.is_left_over()


def test_what_is_not_a_connection_is_not_left_over() -> None:
    with socket.socket() as listening, socket.socket() as unbound:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert unbound.fileno() >= 0
        assert not sockets.is_left_over()


US, PEER = "0100007F:1000", "0100007F:2000"


@pytest.mark.parametrize(
    ("rows", "left_over"),
    [
        ([(US, PEER, "01", "7")], False),  # its other end is on another host
        ([(US, PEER, "01", "7"), (PEER, US, "01", "9")], False),
        ([(US, PEER, "01", "7"), (PEER, US, "01", "0")], True),
        ([(US, PEER, "01", "7"), (PEER, US, "04", "0")], True),
        ([(US, PEER, "08", "7")], True),  # the peer has closed, we have not
        ([(US, PEER, "08", "8")], False),  # somebody else's
        ([(US, PEER, "06", "0")], False),  # was ours
        ([(US, PEER, "02", "7")], False),  # being opened
        ([(US, "00000000:0000", "0A", "7")], False),
    ],
)
def test_ends_of_a_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: list, left_over: bool
) -> None:
    table = tmp_path / "tcp"
    lines = [f"0: {us} {them} {state} - - - - - {inode}" for us, them, state, inode in rows]
    table.write_text("\n".join(["header", *lines]))
    monkeypatch.setattr(sockets, "_TABLES", (str(table),))
    monkeypatch.setattr(sockets, "_own_inodes", lambda: {"7"})
    assert sockets.is_left_over() is left_over


def test_what_can_not_be_read_counts_as_left_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sockets, "_TABLES", (str(tmp_path),))
    assert sockets.is_left_over()


@pytest.mark.asyncio
async def test_waiting_ends_with_the_last_socket(link: tuple) -> None:
    ours, sender = link
    sender.kill()
    sender.wait()
    waiting = asyncio.create_task(sockets.emptied())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    ours.close()
    await asyncio.wait_for(waiting, 10)
