"""Cutting control messages into frames, and back. Pure.

A frame is a 7-byte header (body bytes u32, stream u16, flags u8; big-endian) and at most 64 KiB
of a message. Two rules: frames of a small message go ahead of the remaining frames of big ones,
so that a cancel never waits behind an offer of megabytes; and messages of one key never overtake
each other.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import wire
from .limits import FRAME_BYTES_MAX, STREAMS_OPEN_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from .keys import Key

_HEADER = struct.Struct(">IHB")
_MORE = 1
_STREAMS = 2**16
_WHOLE = 0  # the stream of every message that fits one frame


@dataclass(slots=True)
class _Outgoing:
    body: bytes
    key: Key | None
    gate: Callable[[], bool] | None
    stream: int
    sent: int = 0


class Outbox:
    """Messages of one connection that were not yet handed to its socket.

    `gate` of a message is called once, directly before its first frame leaves: False drops it.
    """

    def __init__(self) -> None:
        self._small: deque[_Outgoing] = deque()
        self._big: deque[_Outgoing] = deque()
        self._big_keys: dict[Key, int] = {}
        self._stream = 0
        self.bytes_waiting = 0

    def put(
        self,
        message: wire.Message,
        *,
        key: Key | None = None,
        gate: Callable[[], bool] | None = None,
    ) -> None:
        """Append a message. Raises ValueError when it is over its kind's bound."""
        body = wire.encode(message)
        stream = _WHOLE
        if len(body) > FRAME_BYTES_MAX:
            # Only one big message is half sent at a time, so no id is in use twice.
            stream = self._stream = self._stream % (_STREAMS - 1) + 1
        item = _Outgoing(body, key, gate, stream)
        self.bytes_waiting += len(body)
        if stream != _WHOLE or (key is not None and key in self._big_keys):
            self._big.append(item)
            if key is not None:
                self._big_keys[key] = self._big_keys.get(key, 0) + 1
        else:
            self._small.append(item)

    def take(self, size_max: int) -> bytes:
        """Frames to hand to the socket now, at least one and up to about `size_max` bytes.

        Empty when nothing waits.
        """
        frames: list[bytes] = []
        size = 0
        while size < size_max:
            frame = self._next()
            if frame is None:
                break
            frames.append(frame)
            size += len(frame)
        return b"".join(frames)

    def _next(self) -> bytes | None:
        while True:
            queue = self._small or self._big
            if not queue:
                return None
            item = queue[0]
            if item.sent == 0 and item.gate is not None and not item.gate():
                self._drop(queue)
                continue
            part = item.body[item.sent : item.sent + FRAME_BYTES_MAX]
            item.sent += len(part)
            more = item.sent < len(item.body)
            if not more:
                self._drop(queue)
            return _HEADER.pack(len(part), item.stream, _MORE if more else 0) + part

    def _drop(self, queue: deque[_Outgoing]) -> None:
        item = queue.popleft()
        self.bytes_waiting -= len(item.body)
        if queue is self._big and item.key is not None:
            self._big_keys[item.key] -= 1
            if not self._big_keys[item.key]:
                del self._big_keys[item.key]


class Inbox:
    """Bytes of one connection on their way to being messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._parts: dict[int, bytearray] = {}
        self._bytes_half_sent = 0
        self.unknown = 0

    def feed(self, data: bytes) -> list[wire.AnyMessage]:
        """Take bytes as they came; return the messages that became whole, in order.

        Raises WireError on bad framing or a bad message; the inbox is of no use after that.
        """
        self._buffer += data
        messages: list[wire.AnyMessage] = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            size, stream, flags = _HEADER.unpack_from(self._buffer, start)
            if size > FRAME_BYTES_MAX:
                raise wire.WireError(f"frame of {size} bytes, the bound is {FRAME_BYTES_MAX}")
            if flags & ~_MORE:
                raise wire.WireError(f"frame with unknown flags {flags:#x}")
            stop = start + _HEADER.size + size
            if len(self._buffer) < stop:
                break
            body = self._join(stream, self._buffer[start + _HEADER.size : stop], flags & _MORE)
            start = stop
            if body is None:
                continue
            message = wire.decode(bytes(body))
            if message is None:
                self.unknown += 1
            else:
                messages.append(message)
        del self._buffer[:start]
        return messages

    def _join(self, stream: int, part: bytearray, more: int) -> bytearray | None:
        whole = self._parts.pop(stream, None)
        if whole is None:
            whole = part
        else:
            self._bytes_half_sent -= len(whole)
            whole += part
        if not more:
            return whole
        self._bytes_half_sent += len(whole)
        if self._bytes_half_sent > wire.MESSAGE_BYTES_MAX:
            raise wire.WireError(f"over {wire.MESSAGE_BYTES_MAX} bytes of messages half sent")
        if len(self._parts) >= STREAMS_OPEN_MAX:
            raise wire.WireError(f"more than {STREAMS_OPEN_MAX} messages half sent")
        self._parts[stream] = whole
        return None
