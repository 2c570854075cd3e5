"""The control network: byte streams between simulated processes, and their faults.

Bytes go out at once, arrive in order after the path's delay, and are read in whatever pieces the
seed likes. A path that is cut holds them until it heals. Two rules: nothing that was sent is
reordered or changed, and a closed or reset end raises exactly what anyio's sockets raise.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import ByteStream

from .loop import NOBODY
from .options import Fault

if TYPE_CHECKING:
    from .loop import SimLoop
    from .options import Options

CAPACITY_BYTES = 64 * 1024  # sent and not yet read; more makes the sender wait
DIAL_TIMEOUT_S = 10.0

Tap = Callable[["Pipe", bytes], None]


class Path:
    """One direction between two processes: how long bytes take, and whether they pass."""

    def __init__(self) -> None:
        self.cut_until_s = 0.0
        self.cut = False
        self.waiting: list[Callable[[], None]] = []

    def when_open(self, act: Callable[[], None]) -> None:
        """Do `act` now, or when the path heals."""
        if self.cut:
            self.waiting.append(act)
        else:
            act()

    def heal(self) -> None:
        self.cut = False
        self.cut_until_s = 0.0
        waiting, self.waiting = self.waiting, []
        for act in waiting:
            act()


class Pipe:
    """One direction of one connection."""

    def __init__(self, internet: Internet, connection: int, source: str, target: str) -> None:
        self.internet = internet
        self.connection = connection
        self.source = source
        self.target = target
        self.flying: deque[bytes] = deque()  # b"" is the end of the stream
        self.arrived = bytearray()
        self.unread = 0
        self.ended = False
        self.sealed = False  # the sender said that no more comes
        self.deaf = False  # what is sent reaches nobody: sends break
        self.broken = False  # reads break
        self.changed: list[asyncio.Future[None]] = []
        self._arrival_s = 0.0

    def put(self, data: bytes) -> None:
        """Send bytes; b"" ends the stream."""
        if not data:
            self.sealed = True
        self.flying.append(data)
        self.unread += len(data)
        loop = self.internet.loop
        delay_s = self.internet.delay_s()
        self._arrival_s = max(self._arrival_s, loop.time() + delay_s)
        path = self.internet.path(self.source, self.target)
        self.internet.later(self._arrival_s - loop.time(), lambda: path.when_open(self._arrive))

    def _arrive(self) -> None:
        if not self.flying:  # a reset came first
            return
        data = self.flying.popleft()
        if data:
            self.arrived += data
        else:
            self.ended = True
        self.wake()

    def take(self, size_max: int) -> bytes:
        """The next piece, of a length that the seed picks."""
        size = self.internet.piece(min(size_max, len(self.arrived)))
        data = bytes(self.arrived[:size])
        del self.arrived[:size]
        self.unread -= size
        self.wake()
        return data

    def reset(self) -> None:
        """Lose what is under way; both ends notice when they next look."""
        self.flying.clear()
        self.arrived.clear()
        self.unread = 0
        self.broken = self.deaf = True
        self.wake()

    def wake(self) -> None:
        changed, self.changed = self.changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)

    async def change(self) -> None:
        """Wait until something about this pipe is different."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.changed.append(future)
        await future


class SimStream(ByteStream):
    """One end of a connection: reads one pipe, writes the other."""

    def __init__(self, inward: Pipe, outward: Pipe) -> None:
        self._inward = inward
        self._outward = outward
        self._closed = False
        self._receiving = False
        self._sending = False

    @property
    def connection(self) -> int:
        return self._inward.connection

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return {}

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self._receiving:
            raise anyio.BusyResourceError("reading from")
        self._receiving = True
        try:
            await asyncio.sleep(0)
            while True:
                if self._closed:
                    raise anyio.ClosedResourceError
                if self._inward.broken:
                    raise anyio.BrokenResourceError
                if self._inward.arrived:
                    return self._inward.take(max_bytes)
                if self._inward.ended:
                    raise anyio.EndOfStream
                await self._inward.change()
        finally:
            self._receiving = False

    async def send(self, item: bytes) -> None:
        if self._sending:
            raise anyio.BusyResourceError("writing to")
        self._sending = True
        try:
            await asyncio.sleep(0)
            self._check_writable()
            if item:
                self._outward.internet.tap(self._outward, bytes(item))
                self._outward.put(bytes(item))
            while self._outward.unread > CAPACITY_BYTES:
                await self._outward.change()
                self._check_writable()
        finally:
            self._sending = False

    def _check_writable(self) -> None:
        if self._closed or self._outward.sealed:
            raise anyio.ClosedResourceError
        if self._outward.deaf:
            raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        await asyncio.sleep(0)
        if not self._closed and not self._outward.sealed and not self._outward.deaf:
            self._outward.put(b"")

    async def aclose(self) -> None:
        self.close()
        await asyncio.sleep(0)

    def close(self) -> None:
        """End of stream for the other side, after what was sent; its later sends break."""
        if self._closed:
            return
        self._closed = True
        if not self._outward.sealed and not self._outward.deaf:
            self._outward.put(b"")
        internet = self._outward.internet
        back = internet.path(self._outward.source, self._outward.target)
        internet.later(internet.delay_s(), lambda: back.when_open(self._inward.reset))
        self._inward.wake()
        self._outward.wake()
        internet.forget(self)

    def reset(self, *, both: bool) -> None:
        """The connection breaks here, and at the other end too when `both`."""
        self._inward.reset()
        if both:
            self._outward.reset()
        else:
            self._outward.deaf = True
            self._outward.wake()

    def end(self) -> None:
        """The other side sees the end of the stream although nobody closed; sends here break."""
        if not self._outward.sealed and not self._outward.deaf:
            self._outward.put(b"")
            self._outward.deaf = True


class SimListener:
    """A bound port; connections wait here until they are accepted."""

    def __init__(self, internet: Internet, owner: str, address: str) -> None:
        self.address = address
        self.owner = owner
        self._internet = internet
        self._backlog: deque[SimStream] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def arrive(self, stream: SimStream) -> None:
        self._backlog.append(stream)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def accept(self) -> ByteStream:
        await asyncio.sleep(0)
        while not self._backlog:
            if self._closed:
                raise anyio.ClosedResourceError
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._backlog.popleft()

    async def aclose(self) -> None:
        self.close()
        await asyncio.sleep(0)

    def close(self) -> None:
        self._closed = True
        self._internet.listeners.pop(self.address, None)
        for stream in self._backlog:
            stream.reset(both=True)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Internet:
    """What all simulated processes are connected by."""

    def __init__(
        self,
        loop: SimLoop,
        prng: random.Random,
        options: Options,
        count: Callable[[Fault], None],
        tap: Tap,
    ) -> None:
        self.loop = loop
        self.prng = prng
        self.options = options
        self.count = count
        self.tap = tap
        self.healed = False
        self.listeners: dict[str, SimListener] = {}
        self.streams: dict[SimStream, str] = {}  # live ends, by owner; in order of birth
        self._paths: dict[tuple[str, str], Path] = {}
        self._connections = 0
        self._ports = 40000

    def path(self, source: str, target: str) -> Path:
        return self._paths.setdefault((source, target), Path())

    def delay_s(self) -> float:
        return self.prng.expovariate(1.0 / self.options.latency_s)

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call `act` after `delay_s`, as nobody's code: no gate holds it."""
        self.loop.call_later(delay_s, act, context=NOBODY)

    def piece(self, size: int) -> int:
        """How many of `size` readable bytes one read gets."""
        if size > 1 and not self.healed and self.prng.random() < self.options.shred:
            self.count(Fault.SHRED)
            return self.prng.randint(1, min(size, self.prng.choice((1, 7, 64, 4096))))
        return size

    def forget(self, stream: SimStream) -> None:
        self.streams.pop(stream, None)

    # ------------------------------------------------------------ dial and listen

    async def dial(self, source: str, address: str) -> ByteStream:
        """Raises ConnectionRefusedError or TimeoutError, both OSError, as a kernel would."""
        await asyncio.sleep(self.delay_s())
        if not self.healed and self.prng.random() < self.options.dial_slow:
            self.count(Fault.DIAL_SLOW)
            await asyncio.sleep(self.prng.uniform(0.1, 4.0))
        if not self.healed and self.prng.random() < self.options.dial_refused:
            self.count(Fault.DIAL_REFUSED)
            raise ConnectionRefusedError(f"simulated: {address} refused")
        listener = self.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(f"simulated: nothing listens on {address}")
        there, back = self.path(source, listener.owner), self.path(listener.owner, source)
        deadline_s = self.loop.time() + DIAL_TIMEOUT_S
        while there.cut or back.cut:
            if self.loop.time() > deadline_s:
                raise TimeoutError(f"simulated: dial of {address} got no answer")
            await asyncio.sleep(0.25)
        if self.listeners.get(address) is not listener:
            raise ConnectionRefusedError(f"simulated: nothing listens on {address} any more")
        self._connections += 1
        outward = Pipe(self, self._connections, source, listener.owner)
        inward = Pipe(self, self._connections, listener.owner, source)
        near, far = SimStream(inward, outward), SimStream(outward, inward)
        self.streams[near] = source
        self.streams[far] = listener.owner
        listener.arrive(far)
        return near

    async def listen(self, owner: str, address: str) -> SimListener:
        """Raises OSError when the address is in use."""
        await asyncio.sleep(0)
        host, _, port = address.rpartition(":")
        if port == "0":
            self._ports += 1
            address = f"{host}:{self._ports}"
        if address in self.listeners:
            raise OSError(f"simulated: {address} is in use")
        self.listeners[address] = SimListener(self, owner, address)
        return self.listeners[address]

    # ------------------------------------------------------------ faults

    def kill(self, owner: str) -> None:
        """A process died: its kernel closes every socket of it."""
        for stream in [s for s, name in self.streams.items() if name == owner]:
            stream.close()
        for listener in [x for x in self.listeners.values() if x.owner == owner]:
            listener.close()

    def cut(self, source: str, target: str, duration_s: float) -> None:
        """Nothing passes from `source` to `target` for a while, and nobody is told."""
        path = self.path(source, target)
        path.cut = True
        path.cut_until_s = max(path.cut_until_s, self.loop.time() + duration_s)
        self.later(duration_s, lambda: self._heal_path(path))

    def _heal_path(self, path: Path) -> None:
        if self.loop.time() >= path.cut_until_s:
            path.heal()

    def open_at(self, source: str, target: str) -> float:
        """When bytes between the two pass both ways, as far as is known now."""
        return max(self.path(source, target).cut_until_s, self.path(target, source).cut_until_s)

    def heal(self) -> None:
        """Every path passes again; no new fault of the network's own."""
        self.healed = True
        self.heal_paths()

    def heal_paths(self) -> None:
        for path in list(self._paths.values()):
            path.heal()


class SimNetwork:
    """The port `Network` of one simulated process."""

    def __init__(self, internet: Internet, owner: str) -> None:
        self._internet = internet
        self._owner = owner

    async def dial(self, address: str) -> ByteStream:
        return await self._internet.dial(self._owner, address)

    async def listen(self, address: str) -> SimListener:
        return await self._internet.listen(self._owner, address)
