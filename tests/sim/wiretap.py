"""Reads the control frames that pass the simulated network, without the engine's own decoder.

Two rules: messages become plain dicts, and what can't be read is told, never skipped.

    frame: body bytes u32, stream u16, flags u8 (1: more follows); big-endian, then the body
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from .network import Pipe

_HEADER = struct.Struct(">IHB")

Message = dict[str, Any]


class Wiretap:
    """Calls `heard(pipe, message)` for every message whose last frame was sent."""

    def __init__(self, heard: Callable[[Pipe, Message], None]) -> None:
        self._heard = heard
        self._buffers: dict[tuple[int, str], bytearray] = {}
        self._parts: dict[tuple[int, str, int], bytes] = {}

    def tap(self, pipe: Pipe, data: bytes) -> None:
        """Bytes were handed to one direction of a connection."""
        direction = (pipe.connection, pipe.source)
        buffer = self._buffers.setdefault(direction, bytearray())
        buffer += data
        while len(buffer) >= _HEADER.size:
            size, stream, flags = _HEADER.unpack_from(buffer)
            if len(buffer) < _HEADER.size + size:
                return
            body = bytes(buffer[_HEADER.size : _HEADER.size + size])
            del buffer[: _HEADER.size + size]
            whole = self._parts.pop((*direction, stream), b"") + body
            if flags & 1:
                self._parts[*direction, stream] = whole
            else:
                self._heard(pipe, msgspec.msgpack.decode(whole))


def key_of(message: Message) -> tuple[str, int, int] | None:
    """(request, attempt, branch) that a message is about."""
    key = message.get("key")
    return None if key is None else parts_of(key)


def parts_of(key: Message) -> tuple[str, int, int]:
    """A key's fields; defaults are not on the wire."""
    return key["request"], key.get("attempt", 0), key.get("branch", 0)
