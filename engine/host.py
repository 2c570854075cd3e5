"""The real host: the monotonic clock, the system's randomness, TCP, processes and their ends."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from .errors import UsageError
from .ports import ProcessIdentity

if TYPE_CHECKING:
    from anyio.abc import ByteStream, SocketStream
    from anyio.streams.stapled import MultiListener

    from .ports import Listener, Network, ProcessWatch


class RealHost:
    """The host of production: see `ports.Host`."""

    def __init__(self) -> None:
        self.network: Network = TcpNetwork()

    def now(self) -> int:
        """`time.monotonic_ns`: the clock that transports' runners use too."""
        return time.monotonic_ns()

    def entropy(self, size: int) -> bytes:
        """From the system."""
        return secrets.token_bytes(size)

    def identity(self) -> ProcessIdentity:
        """From /proc; empty fields where it can't be read, which match no peer."""
        return ProcessIdentity(
            boot_id=_read("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_link("/proc/self/ns/pid"),
            net_namespace=_link("/proc/self/ns/net"),
            pid=os.getpid(),
            start_time=_start_time("self"),
        )

    def watch(self, process: ProcessIdentity) -> ProcessWatch | None:
        """By a pidfd, which no later process of the same number can be mistaken for."""
        mine = self.identity()
        places = [(one.boot_id, one.pid_namespace, one.net_namespace) for one in (mine, process)]
        if places[0] != places[1] or not all(places[0]) or not process.start_time:
            return None
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return PidWatch(None)
        except OSError:
            return None
        # The number may have been given to a later process: then the one that is meant has ended.
        started = _start_time(str(process.pid))
        if started != process.start_time:
            os.close(pidfd)
            return PidWatch(None) if started else None
        return PidWatch(pidfd)


class PidWatch:
    """A process that is watched by its pidfd, None when it has ended: see `ports.ProcessWatch`."""

    def __init__(self, pidfd: int | None) -> None:
        self._pidfd = pidfd

    async def ended(self) -> None:
        """When all threads have ended, also while nobody has waited for the process yet."""
        if self._pidfd is None:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._pidfd)

    def close(self) -> None:
        """Idempotent."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class TcpNetwork:
    """Control connections over TCP: see `ports.Network`."""

    async def dial(self, address: str) -> ByteStream:
        """Connect to "host:port". Raises OSError; UsageError for an ill address."""
        host, port = split_address(address)
        return await anyio.connect_tcp(host, port)

    async def listen(self, address: str) -> Listener:
        """Bind "host:port". Raises OSError; UsageError for an ill address."""
        host, port = split_address(address)
        bound = await anyio.create_tcp_listener(
            local_host=host,
            local_port=port,
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        )
        return TcpListener(bound, host)


class TcpListener:
    """A bound port: see `ports.Listener`."""

    def __init__(self, bound: MultiListener[SocketStream], host: str) -> None:
        self._bound = bound
        (self._listener,) = bound.listeners
        port = bound.extra(anyio.abc.SocketAttribute.local_port)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def accept(self) -> ByteStream:
        """The next connection."""
        return await self._listener.accept()  # type: ignore[attr-defined, no-any-return]

    async def aclose(self) -> None:
        """Stop listening."""
        await self._bound.aclose()


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port". Raises UsageError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f'address {address!r} is not "host:port" with a port of 0 to 65535')
    return host.strip("[]") or "0.0.0.0", int(port)


def _start_time(pid: str) -> int:
    """Clock ticks from the system's start to the process's, 0 when it can't be read."""
    # Field 22 of the file, counted after the command name, which may hold spaces.
    stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(stat[19]) if len(stat) > 19 else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
