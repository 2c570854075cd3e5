"""Memory that a node process and the observer both see: a pool, and a board of what happens.

The observer reads and refills a pool through its own mapping, so a stopped, busy or dead node
needs no cooperation. Two rules: only a node's operation thread writes the board; the observer
counts bytes exactly before it states an amount, and samples only to choose its moment.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

import numpy as np

MIB: Final = 1 << 20
PAGE: Final = 4096

# Phases of the one operation that a node drives. "Inside the post" is its own phase: the
# same-host lane copies there and nowhere else.
IDLE, POSTING, PENDING, ENDED = range(4)

_BOARD: Final = np.dtype(
    [("phase", "u1"), ("began", "<i8"), ("posted", "<i8"), ("ended", "<i8"), ("state", "S160")]
)


class Pool:
    """`size` bytes of memory behind a file descriptor, with one page of board in front."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._map = mmap.mmap(descriptor, PAGE + size, flags=mmap.MAP_SHARED)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self.bytes = whole[PAGE:]
        self.board = whole[: _BOARD.itemsize].view(_BOARD)

    @classmethod
    def create(cls, size: int, fill: int) -> Pool:
        descriptor = os.memfd_create("kvferry-truth", 0)
        os.ftruncate(descriptor, PAGE + size)
        pool = cls(descriptor, size)
        pool.bytes[:] = fill
        return pool

    @property
    def address(self) -> int:
        """Where the pool lies in the calling process."""
        return int(self.bytes.ctypes.data)

    def landed(self, value: int) -> float:
        """About which fraction of the pool holds `value`: one byte in each page is read."""
        return float((self.bytes[::PAGE] == value).mean())

    def foreign(self, value: int) -> int:
        """Exactly how many bytes differ from `value`."""
        return self.size - int(np.count_nonzero(self.bytes == value))

    def close(self) -> None:
        os.close(self.descriptor)  # the mapping goes with the last array that refers to it
