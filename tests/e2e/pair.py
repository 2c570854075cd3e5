"""A prefill and a decode engine in two processes, and what tests expect of their pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.e2e.node import TOKENS_PER_BLOCK

if TYPE_CHECKING:
    from tests.e2e.process import Process

SLOTS = 64
POISON = 0xABCD
RANDOM = -1
POSTED_BYTES_MAX = 4 * 2**20  # what can't be called back: a small part of the pool


class Pair:
    """Opened by the fixture; `close` fails a test that left anything behind for good."""

    def __init__(self, prefill: Process, decode: Process) -> None:
        self.prefill = prefill
        self.decode = decode
        self.peer = ("prefill", "")
        self._open: dict[str, Process] = {}

    def open(self, **decode: Any) -> None:
        """Start both engines; `decode`: how the decoder's pool differs, see `Node.open`."""
        listening = {
            "name": "prefill",
            "listen": "127.0.0.1:0",
            "peer_posted_bytes_max": POSTED_BYTES_MAX,
        }
        self.peer = ("prefill", self.prefill.open(SLOTS, RANDOM, listening))
        self.decode.open(SLOTS, POISON, {"name": "decode"}, **decode)
        self._open = {"prefill": self.prefill, "decode": self.decode}

    def forget(self, name: str) -> None:
        """This engine was closed by its test."""
        del self._open[name]

    def close(self) -> None:
        for name in list(self._open):
            self._open[name].drain()
            stats = self._open.pop(name).close()
            assert stats.transfers == 0, (name, stats)
            assert (stats.slots_lent, stats.slots_quarantined, stats.writes_open) == (0, 0, 0)
            assert (stats.internal_errors, stats.callback_errors) == (0, 0), (name, stats)

    # ------------------------------------------------------------ one request

    def receive(self, request: str, slots: Any, **more: Any) -> None:
        """Ask for the whole request into `slots`, ordinal 0 first."""
        tokens = more.pop("tokens", len(slots) * TOKENS_PER_BLOCK)
        peer = more.pop("peer", self.peer)
        self.decode.receive(request, [(0, slots)], tokens, peer, **more)

    def send(self, request: str, slots: Any, *, push: bool = True, **more: Any) -> None:
        """Enter a send of the whole request, and push and seal it unless told otherwise."""
        tokens = more.pop("tokens", len(slots) * TOKENS_PER_BLOCK)
        self.prefill.send(request, tokens, **more)
        if push:
            self.prefill.push(request, [(0, slots)])
            self.prefill.finish(request, b"first tokens")

    def outcomes(self, request: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(of prefill, of decode)."""
        return self.prefill.outcome(request), self.decode.outcome(request)

    def moved(self, *pairs: tuple[Any, Any]) -> None:
        """Assert that exactly these (source slots, target slots) are in place, nothing else."""
        expected = np.full_like(self.decode.pool(), POISON)
        source = self.prefill.pool()
        for source_slots, target_slots in pairs:
            expected[target_slots] = source[source_slots]
        wrong = np.flatnonzero((expected != self.decode.pool()).any(axis=1))
        assert wrong.tolist() == []

    def slots_back(self, side: str, request: str, slots: Any, *evidence: str) -> None:
        """Assert that each slot came back once, under one of these kinds of evidence."""
        process = self.prefill if side == "prefill" else self.decode
        parts = process.released(request)
        assert sorted(slot for part, _ in parts for slot in part) == sorted(slots)
        assert {kind for _, kind in parts} <= set(evidence)


def fragmented(seed: int, count: int, *, of: int = SLOTS) -> list[int]:
    """`count` slots in no order."""
    return [int(slot) for slot in np.random.default_rng(seed).permutation(of)[:count]]
