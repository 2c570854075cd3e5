"""What the kernel still holds of processes that have ended, as far as this process's sockets say.

Bytes that a dead process had sent over tcp wait in socket buffers, its own and ours, and UCX copies
them into registered memory whenever it gets to it. Two rules: only a socket that UCX has closed
says that nothing of it is left; what can't be read counts as a socket that is open.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final, NamedTuple

_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED, _LISTENING, _CONNECTING = "01", "0A", ("02", "03")
_MAPPED: Final = "0000000000000000FFFF0000"  # how an IPv4 address begins in the table of IPv6
_LOOK_S: Final = 0.02


class _Socket(NamedTuple):
    local: str
    remote: str
    state: str
    inode: str  # "0" once no process has it any more


async def emptied() -> None:
    """Return when no socket of this process has a local peer that has ended. See `ports.Transport`.

    Assumes that an ended process left its sockets to no child. Looks again and again, on a thread:
    nobody says when UCX closes a socket.
    """
    while await asyncio.to_thread(is_left_over):  # noqa: ASYNC110  it sets no event
        await asyncio.sleep(_LOOK_S)


def is_left_over() -> bool:
    """Whether a socket of this process is open whose other end, on this host, is closing or gone.

    Only in this network namespace. A peer's end is seen in the same tables as ours: without owner
    when its process has ended, and until all that it had sent was received.
    """
    try:
        mine = _own_inodes()
        sockets = [socket for path in _TABLES for socket in _read(path)]
    except OSError:
        return True
    ends = {(socket.local, socket.remote): socket for socket in sockets}
    for socket in sockets:
        if socket.inode not in mine or socket.state in (_LISTENING, *_CONNECTING):
            continue
        other = ends.get((socket.remote, socket.local))
        if socket.state != _ESTABLISHED:
            return True
        if other is not None and (other.state != _ESTABLISHED or other.inode == "0"):
            return True
    return False


def _own_inodes() -> set[str]:
    """The inodes of this process's sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _read(path: str) -> list[_Socket]:
    if not os.path.exists(path):
        return []  # no IPv6 here
    rows = [line.split() for line in Path(path).read_text().splitlines()[1:]]
    return [_Socket(_plain(row[1]), _plain(row[2]), row[3], row[9]) for row in rows]


def _plain(address: str) -> str:
    """An address as the table of IPv4 has it, where it is one."""
    return address.removeprefix(_MAPPED)
