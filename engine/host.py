"""The real host: the monotonic clock, the system's randomness, TCP, this process's identity."""

from __future__ import annotations

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

    from .ports import Listener, Network


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
        # Field 22 of /proc/self/stat, counted after the command name, which may hold spaces.
        stat = _read("/proc/self/stat").rpartition(")")[2].split()
        return ProcessIdentity(
            boot_id=_read("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_link("/proc/self/ns/pid"),
            pid=os.getpid(),
            start_time=int(stat[19]) if len(stat) > 19 else 0,
        )


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
