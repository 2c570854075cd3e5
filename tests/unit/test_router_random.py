"""Routers under random callers, networks, workers and losses, judged at every step. About 6 s.

The judge is `pair.Pair`: a slot comes back once, and never while a write of it is open; a write is
handed over only into slots that are lent. At the end the world heals: every transfer has ended
exactly once, and every slot is back.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvferry.engine.errors import Busy, UsageError
from kvferry.engine.keys import Key
from kvferry.engine.limits import PERMIT_LINGER_S
from tests.unit.pair import SLOTS, End, Handle, Pair

SEEDS = 150
STEPS = 600
seen: Counter[str] = Counter()


class Chaos:
    """One run: a source, two targets that compete for its sends, and everything that can happen."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.pair = pair = Pair(
            permit_ttl_s=rng.choice([1.0, 10.0]),
            sends_max=rng.choice([4, 100]),
            receives_max=rng.choice([4, 100]),
            offers_waiting_max=rng.choice([1, 3, 100]),
            peer_posted_writes_max=rng.choice([1, 3, 32]),
        )
        self.targets = [pair.decode, pair.add("rival", permit_ttl_s=rng.choice([0.5, 10.0]))]
        self.losses = rng.choice([0.0, 0.01, 0.04])
        self.doubts = rng.choice([0.0, 0.05])
        self.attempts: Counter[str] = Counter()
        self.open_sends: dict[Handle, list[int]] = {}  # next ordinal, and where it ends
        for end in pair.ends:
            end.worker.prompt = False

    # ------------------------------------------------------------ callers

    def free(self, end: End) -> list[int]:
        held = {slot for h in end.handles.values() if not h.fenced for _, slot in h.owned}
        return [slot for slot in range(SLOTS) if slot not in held]

    def deadlines(self) -> tuple[float | None, float | None, float | None]:
        hurry = self.rng.random() < 0.15
        match, stall, total = (
            self.rng.choice([None, 0.5, 3.0]) if hurry else None for _ in range(3)
        )
        return match, stall, total

    def receive(self) -> None:
        end, rng = self.rng.choice(self.targets), self.rng
        request = f"r{rng.randrange(6)}"
        self.attempts[request] += rng.random() < 0.7
        attempt = self.attempts[request] - (rng.random() < 0.1)
        free = self.free(end)
        slots = rng.sample(free, min(len(free), rng.randrange(1, 9)))
        least = rng.choice([0, 0, 0, None])
        try:
            end.receive(
                Key(request, max(0, attempt)),
                self.pair.prefill,
                slots,
                min_tokens=least,
                deadlines_s=self.deadlines(),
            )
        except (Busy, UsageError) as error:
            seen[f"receive {error.code}"] += 1

    def send(self) -> None:
        tokens = self.rng.choice([4, 16, 32])
        try:
            handle = self.pair.prefill.send(f"r{self.rng.randrange(6)}", tokens, self.deadlines())
        except (Busy, UsageError) as error:
            seen[f"send {error.code}"] += 1
        else:
            self.open_sends[handle] = [0, tokens // 4]

    def push(self) -> None:
        """The next blocks of a send, now and then a wrong one; sealed when all are pushed."""
        end, rng = self.pair.prefill, self.rng
        if not self.open_sends:
            return
        handle = rng.choice(list(self.open_sends))
        first, stop = self.open_sends[handle]
        if rng.random() < 0.05:
            first = rng.randrange(8)
        free = self.free(end)
        count = min(len(free), rng.randrange(1, 5), max(1, stop - first))
        try:
            end.push(handle, rng.sample(free, count), first=first)
        except UsageError:
            seen["push refused"] += 1
            return
        self.open_sends[handle][0] = max(self.open_sends[handle][0], first + count)
        if self.open_sends[handle][0] >= stop or rng.random() < 0.05:
            del self.open_sends[handle]
            end.finish(handle, b"aux")

    def cancel(self) -> None:
        end = self.rng.choice(self.pair.ends)
        if alive := [h for h in end.handles.values() if not h.fenced]:
            end.cancel(self.rng.choice(alive))

    # ------------------------------------------------------------ the world

    def carry(self) -> None:
        for _ in range(self.rng.randrange(4)):
            if self.pair.cables:
                cable = self.rng.choice(self.pair.cables)
                self.pair.carry(cable, self.rng.choice(cable.ends))

    def connect(self) -> None:
        if self.pair.dials and self.rng.random() < 0.1:
            self.pair.refuse_dial(*self.pair.dials.popleft())
        else:
            self.pair.connect()

    def lose(self) -> None:
        if self.pair.cables and self.rng.random() < self.losses * 20:
            self.pair.lose(self.rng.choice(self.pair.cables))
            seen["loss"] += 1

    def lose_one_sided(self) -> None:
        """One side notices that the connection is gone; the other will only when it is cut."""
        if self.pair.cables and self.rng.random() < self.losses * 10:
            cable = self.rng.choice(self.pair.cables)
            end = self.rng.choice(cable.ends)
            if end not in cable.finishing:
                cable.finishing.add(end)
                end.router.lost(cable.numbers[end], "reset", self.pair.now)
                end.act()
                seen["one-sided loss"] += 1

    def work(self) -> None:
        worker, rng = self.pair.prefill.worker, self.rng
        worker.step(self.pair.now)
        if worker.queued and rng.random() < 0.6:
            late = rng.random() < 0.1
            write = rng.choice(list(worker.queued))
            worker.post(write, 2**62 if late else self.pair.now)
            seen["expired" if late else "posted"] += 1
        if worker.posted and rng.random() < 0.6:
            write = rng.choice(list(worker.posted))
            if rng.random() < self.doubts:
                worker.doubt(write)
                seen["doubt"] += 1
            else:
                worker.settle(write, rng.choice(["done"] * 99 + ["failed"]))
        if worker.doubtful and rng.random() < 0.1:
            worker.settle(rng.choice(list(worker.doubtful)), rng.choice(["done"] * 9 + ["failed"]))
        for end in self.pair.ends:
            end.work()

    def wait(self) -> None:
        self.pair.wait(self.rng.choice([0.001, 0.01, 0.01, 0.1, 0.1, 0.4, 2.0]), quiet=True)

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        actions = [
            (self.receive, 6),
            (self.send, 6),
            (self.push, 20),
            (self.cancel, 1),
            (self.carry, 60),
            (self.connect, 6),
            (self.lose, 1),
            (self.lose_one_sided, 1),
            (self.work, 40),
            (self.wait, 3),
        ]
        calls, weights = zip(*actions, strict=True)
        for action in self.rng.choices(calls, weights, k=STEPS):
            action()
        self.heal()

    def heal(self) -> None:
        """Callers stop, nothing is lost any more, and every write settles."""
        pair, worker = self.pair, self.pair.prefill.worker
        for cable in [c for c in pair.cables if c.finishing]:
            pair.lose(cable)
        for end in pair.ends:
            for handle in end.handles.values():
                end.cancel(handle)
        worker.prompt = True
        for write in list(worker.doubtful):
            worker.settle(write)
        pair.roundtrip()
        pair.wait(15)
        pair.check_over()
        pair.wait(PERMIT_LINGER_S + 20)
        for end in pair.ends:
            for handle in end.handles.values():
                seen["done" if handle.done else type(handle.error).__name__] += 1
            for evidence in {e for h in end.handles.values() for e in h.evidence}:
                seen[evidence] += 1


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_every_transfer_ends_once_and_every_slot_comes_back_once(first: int) -> None:
    for seed in range(first, first + 10):
        chaos = Chaos(seed)
        try:
            chaos.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_runs_were_worth_something() -> None:
    """Counts what the runs above met; runs them itself when it is called alone."""
    if not seen["done"]:
        for seed in range(SEEDS):
            Chaos(seed).run()
    kinds = ["done", "Cancelled", "PeerLost", "TimedOut", "Refused", "Failed"]
    events = ["posted", "expired", "doubt", "loss", "one-sided loss", "drained", "settled"]
    events += ["never-exposed", "receive busy", "send busy", "push refused"]
    assert {name: seen[name] for name in kinds + events if seen[name] < 5} == {}
