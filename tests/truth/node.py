"""One process of a truth-table pair: a NIXL agent over one pool, told what to do by the observer.

Started as `python -m tests.truth.node` with the environment that its agent shall see. Two rules:
nothing of kvferry is imported, since the table says what NIXL does, not what kvferry makes of it;
and one thread drives the operation to its end, while commands are answered by another.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.truth.shared import ENDED, PENDING, POSTING, Pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.0005
_POLL_FAST_S = 0.00005
_CLOSED_S = 30


def open_agent(name: str) -> Any:
    """A NIXL agent as kvferry makes it: UCX, a sleeping progress thread, read-write locking.

    Source: NIXL 1.5.1 `_api.py` sets `pthrDelay = 0` (a progress thread that never sleeps) with no
    parameter to choose otherwise, so the configuration class is replaced by one that holds 1 ms.
    """
    from nixl import _api

    plain = _api.nixlBind.nixlAgentConfig

    class Pinned(plain):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            plain.pthrDelay.__set__(self, 1000)

        pthrDelay = property(plain.pthrDelay.__get__, lambda _self, _value: None)  # noqa: N815

    _api.nixlBind.nixlAgentConfig = Pinned
    try:
        sync = _api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        return _api.nixl_agent(name, _api.nixl_agent_config(backends=["UCX"], sync_mode=sync))
    finally:
        _api.nixlBind.nixlAgentConfig = plain


def own_sockets() -> dict[int, tuple[str, str, str]]:
    """This process's connected TCP sockets: descriptor -> (local, remote, inode).

    Source: proc(5), `/proc/net/tcp`: addresses in hexadecimal, host byte order; state 0A listens.
    """
    table = {}
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *rest = line.split()
        if state != "0A":
            table[rest[5]] = (_readable(local), _readable(remote))
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        inode = target.removeprefix("socket:[").removesuffix("]")
        if target.startswith("socket:[") and inode in table:
            found[int(entry)] = (*table[inode], inode)
    return found


def _readable(text: str) -> str:
    address, port = text.split(":")
    return f"{socket.inet_ntoa(struct.pack('<I', int(address, 16)))}:{int(port, 16)}"


def _attempt(check: Callable[[Any], str], handle: Any) -> str:
    """NIXL's state, which it returns or raises: one exception class for each status."""
    try:
        return check(handle)
    except Exception as error:  # noqa: BLE001
        return str(error) or type(error).__name__


class Node:
    """Commands of the observer; every public method is one."""

    def __init__(self, name: str, pool: Pool) -> None:
        self.name = name
        self.pool = pool
        self._agent: Any = None
        self._region: Any = None
        self._handle: Any = None
        self._driver: threading.Thread | None = None
        self._abandon = threading.Event()

    def open(self) -> tuple[bytes, int]:
        """Create the agent and register the pool; (metadata, pool address)."""
        self._agent = open_agent(self.name)
        self._region = self._agent.register_memory(
            [(self.pool.address, self.pool.size, 0, "")], "DRAM"
        )
        return self._agent.get_agent_metadata(), self.pool.address

    def connect(self, metadata: bytes, peer: str, address: int) -> None:
        """Load the peer's metadata and move one byte each way, so that connections exist."""
        self._agent.add_remote_agent(metadata)
        for operation in ("WRITE", "READ"):
            if (state := self.probe(operation, peer, address)) != "DONE":
                raise RuntimeError(f"first {operation} to {peer}: {state}")

    def probe(self, operation: str, peer: str, address: int) -> str:
        """Move one byte; what NIXL said in the end."""
        first = np.zeros(1, dtype=np.int64)
        handle = self._prepare(operation, peer, address, first, first, block=1)
        state = _attempt(self._agent.transfer, handle)
        while state == "PROC":
            time.sleep(_POLL_S)
            state = _attempt(self._agent.check_xfer_state, handle)
        handle.release()
        return state

    def start(self, operation: str, peer: str, address: int, block: int) -> None:
        """Begin to move the whole pool as one NIXL operation; its thread reports on the board."""
        offsets = np.arange(0, self.pool.size, block)
        self._handle = self._prepare(operation, peer, address, offsets, offsets, block)
        self._driver = threading.Thread(target=self._drive, args=(self._handle,), daemon=True)
        self._driver.start()

    def _prepare(
        self,
        operation: str,
        peer: str,
        address: int,
        mine: NDArray[np.int64],
        theirs: NDArray[np.int64],
        block: int,
    ) -> Any:
        """A NIXL handle for `block` bytes at each of two int64[n] lists of pool offsets."""

        def descriptors(addresses: NDArray[np.int64]) -> Any:
            columns = (addresses, np.full_like(addresses, block), np.zeros_like(addresses))
            return self._agent.get_xfer_descs(np.stack(columns, axis=1), "DRAM")

        here, there = descriptors(self.pool.address + mine), descriptors(address + theirs)
        return self._agent.initialize_xfer(operation, here, there, peer)

    def prepare(self, *arguments: Any) -> None:
        """Make the operation that `repeat` posts; arguments as of `_prepare`."""
        self._handle = self._prepare(*arguments)

    def repeat(self, times: int) -> list[tuple[float, float]]:
        """Post the prepared operation again and again: seconds (inside the post, until done)."""
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            state = self._agent.transfer(self._handle)
            posted = time.perf_counter()
            while state == "PROC":
                time.sleep(_POLL_FAST_S)
                state = self._agent.check_xfer_state(self._handle)
            taken.append((posted - began, time.perf_counter() - began))
        return taken

    def cpu_s(self) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()

    def _drive(self, handle: Any) -> None:
        board = self.pool.board
        board["began"], board["phase"] = time.monotonic_ns(), POSTING
        check = self._agent.transfer
        while True:
            state = _attempt(check, handle)
            if state != "PROC":
                break
            if check == self._agent.transfer:
                board["posted"], board["phase"] = time.monotonic_ns(), PENDING
                check = self._agent.check_xfer_state
            if self._abandon.wait(_POLL_S):
                return
        board["state"], board["ended"] = state.encode()[:160], time.monotonic_ns()
        board["phase"] = ENDED

    def stop_polling(self) -> None:
        """Give up the operation thread; returns when it is gone (a post in progress ends first)."""
        self._abandon.set()
        if self._driver is not None:
            self._driver.join()

    def release(self) -> str:
        """Release the operation's handle, whatever its state; what NIXL said."""
        try:
            self._handle.release()
        except Exception as error:  # noqa: BLE001
            return str(error)
        return "released"

    def end_agent(self, keep_handle: bool = False) -> int:
        """Destroy the agent; how many connected sockets this process then still has.

        Python handles hold the C++ agent, even released ones: with `keep_handle` the sockets stay.
        """
        self.stop_polling()
        self._driver = None
        if self._handle is not None:
            self.release()
            if not keep_handle:
                self._handle = None
        self._agent.deregister_memory(self._region)
        self._region = self._agent = None
        gc.collect()
        return len(own_sockets())

    def local_ends(self) -> list[str]:
        """The local ends of this process's sockets: by these its peer knows its own sockets."""
        return [local for local, _, _ in own_sockets().values()]

    def count_sockets(self, ends: list[str]) -> int:
        """How many sockets of this process have their remote end in `ends`."""
        return len(self._sockets_to(ends))

    def _sockets_to(self, ends: list[str]) -> dict[int, str]:
        return {fd: inode for fd, (_, remote, inode) in own_sockets().items() if remote in ends}

    def shut_sockets(self, ends: list[str]) -> int:
        """Shut down every socket whose remote end is in `ends`, wait until UCX closed them all.

        Returns how many there were. Shutting down alone is not enough: what the kernel has
        received can still be read from the socket. A descriptor may be closed and used again
        between listing and shutting, so a duplicate is compared by inode first.
        """
        shut: set[str] = set()
        while mine := self._sockets_to(ends):
            for fd, inode in mine.items():
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
                    if os.fstat(duplicate.fileno()).st_ino == int(inode):
                        duplicate.shutdown(socket.SHUT_RDWR)
            shut.update(mine.values())
            time.sleep(_POLL_S)
        return len(shut)

    def wait_closed(self, ends: list[str]) -> float:
        """Wait until no socket of this process has its remote end in `ends`; seconds."""
        began = time.monotonic()
        while self._sockets_to(ends):
            if time.monotonic() - began > _CLOSED_S:
                raise TimeoutError(f"sockets of the peer are still open after {_CLOSED_S} s")
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def protect(self, offset: int, size: int) -> None:
        """Make a part of the pool inaccessible to this process: touching it is then an error."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self.pool.address + offset), ctypes.c_size_t(size), 0):
            raise OSError(ctypes.get_errno(), "mprotect")


def main() -> None:
    """Serve commands until the observer hangs up. Ends without destructors, as a killed one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    control, memory, size, name = sys.argv[1:]
    connection = Connection(int(control))
    node = Node(name, Pool(int(memory), int(size)))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            reply = (True, getattr(node, method)(*arguments))
        except Exception:  # noqa: BLE001  (told to the observer, who raises it)
            reply = (False, traceback.format_exc())
        connection.send(reply)


if __name__ == "__main__":
    main()
