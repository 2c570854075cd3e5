"""An abort storm over real NIXL, in two processes: `python -m tests.soak.storm`; prints JSON.

The target keeps its pool full of requests, cancels half of them at random, and gives every slot
that comes back to the next request at once. Free memory is marked, so that a byte that lands in a
slot after its release is seen, whoever has the slot by then: a mark that is damaged when the slot
is taken, or a wrong byte in a request that is done. The source overwrites its blocks as soon as it
gets them back, so that a block that was released too early is seen too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import uvloop

import kvferry as kv
from kvferry.adapters.torch_layout import paged_layout
from kvferry.engine.mover import Mover
from kvferry.engine.transitions import OutcomeEvent

TOKENS: Final = 16
WORDS: Final = 16384  # of 8 bytes: 128 KiB a block
BLOCKS_MAX: Final = 8
SLOTS: Final = 1400  # what some 300 requests need
MATCH_S: Final = 10.0  # a send may be given up before its offer comes
MARK: Final = 0x5EED5EED5EED5EED
REUSED_S: Final = 0.01
SEED: Final = 7


class Slots:
    """A pool whose free slots are marked, and given out again last in, first out."""

    def __init__(self, count: int) -> None:
        self.memory = np.full((count, WORDS), MARK, dtype=np.uint64)
        self.free = list(range(count))
        self.freed_at = np.full(count, -np.inf)
        self.reused = 0  # within REUSED_S of their release
        self.damaged = 0  # words of marks
        self.least_free = count
        self._more = asyncio.Event()

    async def take(self, count: int) -> list[int]:
        while len(self.free) < count:
            self._more.clear()
            await self._more.wait()
        taken = self.free[-count:]
        del self.free[-count:]
        self.least_free = min(self.least_free, len(self.free))
        self.damaged += int((self.memory[taken] != MARK).sum())
        self.reused += int((time.monotonic() - self.freed_at[taken] < REUSED_S).sum())
        return taken

    def give(self, slots: list[int]) -> None:
        self.memory[slots] = MARK
        self.freed_at[slots] = time.monotonic()
        self.free += slots
        self._more.set()

    def engine(self, name: str, **config: Any) -> kv.Engine:
        cache = self.memory.reshape(len(self.memory), TOKENS, -1)
        layout = paged_layout(cache, "block token dim", model="storm")
        return kv.Engine(
            kv.Config(name=name, match_s=MATCH_S, **config),
            layout=layout,
            transport=kv.nixl(),
            owners=[cache],
        )


def pattern(request: int, blocks: int) -> np.ndarray:
    """What belongs into the blocks of a request: uint64[blocks, WORDS]."""
    numbers = np.arange(blocks * WORDS, dtype=np.uint64) + np.uint64(request * BLOCKS_MAX * WORDS)
    return (numbers * np.uint64(0x9E3779B97F4A7C15)).reshape(blocks, WORDS)


# ---------------------------------------------------------------- the source


@dataclass
class CancelsMet:
    """In which states a cancel found the writes of its transfer, at the source."""

    counts: Counter[str] = field(default_factory=Counter)

    def listen(self) -> None:
        """Look at every transfer that is about to be cancelled, from now on."""
        end = Mover.end

        def look(mover: Mover, transfer: Any, event: OutcomeEvent, error: Any, now: int) -> None:
            if event is OutcomeEvent.CANCEL and not transfer.ended:
                line = transfer.pipeline
                states = {str(write.state) for write in line.open_writes()} if line else set()
                if line is not None and line.has_work:
                    states.add("queued")
                self.counts.update(states or {"none"})
            end(mover, transfer, event, error, now)

        Mover.end = look  # type: ignore[method-assign]


async def source() -> None:
    """Send what the lines of the standard input ask for; say at the end what was met."""
    met = CancelsMet()
    met.listen()
    slots, prng = Slots(2 * SLOTS), random.Random(SEED + 1)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with slots.engine("prefill", listen="127.0.0.1:0") as engine:
        print(engine.address, flush=True)
        async with asyncio.TaskGroup() as group:
            while line := await reader.readline():
                number, blocks = (int(word) for word in line.split())
                group.create_task(send(engine, slots, number, blocks, prng.random()))
        engine.check_integrity()
        stats = engine.stats()
    told = {"met": met.counts, "slots": len(slots.memory), "free": len(slots.free)}
    told |= {"writes_open": stats.writes_open, "internal_errors": stats.internal_errors}
    print(json.dumps(told), flush=True)


async def send(engine: kv.Engine, slots: Slots, number: int, blocks: int, chance: float) -> None:
    held = await slots.take(blocks)
    slots.memory[held] = pattern(number, blocks)
    tx = engine.send(
        f"r{number}",
        tokens=blocks * TOKENS,
        on_released=lambda back, _: slots.give([int(slot) for slot in back["full"]]),
    )
    first = round(chance * blocks)
    with contextlib.suppress(kv.KvferryError):
        async with tx:
            if first:
                tx.push({"full": kv.Span.from_slots(held[:first])})
                await asyncio.sleep(chance * 0.004)
            if first < blocks:
                tx.push({"full": kv.Span.from_slots(held[first:], first)})
            if chance > 0.95:
                tx.cancel("the source changed its mind")
            tx.finish()
            await tx
    await tx.released()


# ---------------------------------------------------------------- the target


@dataclass
class Storm:
    """The target's side of every request, and what came of them."""

    engine: kv.Engine
    peer: kv.Peer
    slots: Slots
    ends: Counter[str] = field(default_factory=Counter)
    evidence: Counter[str] = field(default_factory=Counter)
    wrong: int = 0  # words of requests that were done
    in_flight: int = 0
    most_in_flight: int = 0

    async def request(self, number: int, held: list[int], cancel_s: float | None) -> None:
        """Receive into `held`, and cancel after a while if told so; give the slots back."""

        def on_released(back: dict[str, np.ndarray], evidence: str) -> None:
            self.evidence[evidence] += back["full"].size

        rx = self.engine.receive(
            kv.Key(f"r{number}"),
            source=self.peer,
            need={"full": kv.Span.from_slots(held)},
            tokens=len(held) * TOKENS,
            on_released=on_released,
        )
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        end = "done"
        try:
            async with rx:
                if cancel_s is not None:
                    await asyncio.sleep(cancel_s)
                    rx.cancel("the client left")
                await rx
        except kv.KvferryError as error:
            end = type(error).__name__
        await rx.released()
        if end == "done":
            self.wrong += int((self.slots.memory[held] != pattern(number, len(held))).sum())
        self.slots.give(held)
        self.in_flight -= 1
        self.ends[end] += 1


async def target(requests: int, watch_s: float) -> dict[str, Any]:
    """Run the storm; what it showed, for `test_abort_storm` to judge."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.soak.storm", "--source",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    address = (await child.stdout.readline()).decode().strip()
    slots, prng = Slots(SLOTS), random.Random(SEED)
    async with slots.engine("decode") as engine:
        storm = Storm(engine, kv.Peer("prefill", address), slots)
        async with asyncio.TaskGroup() as group:
            for number in range(requests):
                blocks = prng.randint(1, BLOCKS_MAX)
                held = await slots.take(blocks)
                child.stdin.write(f"{number} {blocks}\n".encode())
                cancel_s = prng.expovariate(1 / 0.05) if prng.random() < 0.5 else None
                group.create_task(storm.request(number, held, cancel_s))
                await asyncio.sleep(0)
        await asyncio.sleep(watch_s)  # for what is still to land
        engine.check_integrity()
        stats = engine.stats()
    child.stdin.close()
    told = json.loads(await child.stdout.readline())
    assert await child.wait() == 0
    damaged = slots.damaged + int((slots.memory != MARK).sum())
    return {
        "ends": storm.ends,
        "evidence": storm.evidence,
        "most_in_flight": storm.most_in_flight,
        "least_free": slots.least_free,
        "reused": slots.reused,
        "wrong_words": storm.wrong,
        "damaged_marks": damaged,
        "slots": SLOTS,
        "slots_back": len(slots.free),
        "slots_lent": stats.slots_lent + stats.slots_quarantined,
        "internal_errors": stats.internal_errors,
        "source": told,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", action="store_true", help="be the source's process")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--watch", type=float, default=5.0, help="seconds to look for late bytes")
    options = parser.parse_args()
    if options.source:
        uvloop.run(source())
    else:
        print(json.dumps(uvloop.run(target(options.requests, options.watch)), indent=2))


if __name__ == "__main__":
    main()
