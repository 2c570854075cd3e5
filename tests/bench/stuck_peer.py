"""What does one stuck peer cost seven healthy ones? Three processes, real NIXL over tcp.

    python -m tests.bench.stuck_peer [--rounds 2] [--writes 1000] [--quick]

The source writes to eight peers round robin; seven are agents of one process, the eighth is a
process of its own, which is stopped (SIGSTOP) in the stuck runs and healthy in the control runs
between them. Varied: agents of the source, descriptors per post (16 KiB each), and how a post is
made: `initialize` (one request from address arrays, what the product does) or `prepared` (lists
made once, indices per post). Printed: p50 and p99 of the healthy peers' writes from submit to
settled, the source loop's lag, and stuck/control ratios. It decides the descriptor cap and the
default number of agents; the decision stands in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import signal
import time
from collections import deque

os.environ.setdefault("UCX_TLS", "tcp")  # cma copies with the source's CPU: a peer can't be stuck

import numpy as np

from kvferry.engine.ports import (
    Close,
    Connect,
    Connected,
    InDoubt,
    Opened,
    Post,
    Region,
    Settled,
    Stopped,
)
from kvferry.transports.nixl import nixl
from kvferry.transports.nixl.backend import NixlBackend

BLOCK = 16 * 1024
PEERS = 8
WINDOW = 4  # posted at once to a healthy peer
STUCK_WINDOW = 32  # the scheduler's bound of one peer: as much as can be stuck
POOL = 512 * BLOCK


class PreparedBackend(NixlBackend):
    """Posts by lists that were prepared once per peer, choosing their entries by index.

    bases: where the source's pool begins, and each peer's.
    """

    def __init__(self, name, regions, bases):
        super().__init__(name, regions, progress_delay_us=1000)
        self._here, self._there = bases
        self._lists = {}

    def _prepare(self, agent, base):
        rows = base + np.arange(POOL // BLOCK, dtype=np.int64) * BLOCK
        sizes = np.full(len(rows), BLOCK, dtype=np.int64)
        return self._agent.prepXferDlist(
            agent, self._descriptors("dram", rows, sizes, 0), self._ucx
        )

    def post(self, post):
        base = self._there[post.peer]
        if post.peer not in self._lists:
            ours = self._prepare(self._nixl.NIXL_INIT_AGENT, self._here)
            self._lists[post.peer] = ours, self._prepare(self._peers[post.peer], base)
        ours, theirs = self._lists[post.peer]
        i = ((post.source - self._here) // BLOCK).astype(np.int32)
        j = ((post.target - base) // BLOCK).astype(np.int32)
        handle = self._agent.makeXferReq(
            self._nixl.NIXL_WRITE, ours, i, theirs, j, b"", self._ucx, False
        )
        progress, text = self._progress(self._agent.postXferReq, handle, b"")
        return handle, progress, text


def target_process(pipe, count):
    """`count` agents in one process, each with a pool of its own."""
    pools = [np.zeros(POOL, dtype=np.uint8) for _ in range(count)]
    backends = [
        NixlBackend(f"{os.getpid()}-{i}", [Region(pool.ctypes.data, POOL)], progress_delay_us=1000)
        for i, pool in enumerate(pools)
    ]
    pipe.send([(b.open(), p.ctypes.data) for b, p in zip(backends, pools, strict=True)])
    pipe.recv()
    os._exit(0)


async def measure(options, agents, descriptors, method, *, stuck):
    loop = asyncio.get_running_loop()
    spawn = multiprocessing.get_context("spawn")
    children = []
    for count in (PEERS - 1, 1):
        ours, theirs = spawn.Pipe()
        child = spawn.Process(target=target_process, args=(theirs, count), daemon=True)
        child.start()
        children.append((child, ours))
    told = [entry for _, pipe in children for entry in await asyncio.to_thread(pipe.recv)]
    source = np.ones(POOL, dtype=np.uint8)
    transport = nixl(agents=agents)
    if method == "prepared":
        bases = source.ctypes.data, {str(peer): base for peer, (_, base) in enumerate(told)}
        transport._make_backend = lambda name, regions: PreparedBackend(name, regions, bases)
    opened, connected, stopped = set(), set(), set()
    sent, took, posted = {}, [], [0] * PEERS
    changed = asyncio.Event()

    def deliver(agent, events):
        for event in events:
            match event:
                case Opened():
                    opened.add(agent)
                case Connected():
                    connected.add(event.peer)
                case InDoubt():
                    raise SystemExit(f"write in doubt: {event}")
                case Settled():
                    peer, at = sent.pop(event.write)
                    posted[peer] -= 1
                    if event.result != "done" and not stuck:
                        raise SystemExit(f"write failed: {event}")
                    if peer != PEERS - 1:
                        took.append(time.perf_counter() - at)
                case Stopped():
                    stopped.add(agent)
        changed.set()

    async def until(condition):
        while not condition():
            changed.clear()
            await asyncio.wait_for(changed.wait(), 60)

    transport.start(f"source-{time.monotonic_ns()}", [Region(source.ctypes.data, POOL)], deliver)
    await until(lambda: len(opened) == agents)
    for peer, (metadata, _) in enumerate(told):
        transport.submit(peer % agents, [Connect(str(peer), metadata)])
    await until(lambda: len(connected) == PEERS)
    numbers = itertools.count()
    rng = np.random.default_rng(1)
    sizes = np.full(descriptors, BLOCK, dtype=np.int64)

    def post(peer):
        number = next(numbers)
        sent[number] = (peer, time.perf_counter())
        posted[peer] += 1
        # Scattered on both sides, so that nothing can be merged.
        blocks = np.sort(rng.permutation(POOL // BLOCK)[:descriptors]) * BLOCK
        there = rng.permutation(POOL // BLOCK)[:descriptors].astype(np.int64) * BLOCK
        write = Post(
            number, str(peer), source.ctypes.data + blocks, told[peer][1] + there, sizes, 2**62
        )
        transport.submit(peer % agents, [write])

    for peer in range(PEERS):
        post(peer)
    await until(lambda: not sent)
    took.clear()
    if stuck:
        os.kill(children[1][0].pid, signal.SIGSTOP)
    lag = []

    async def tick():
        while True:
            at = loop.time()
            await asyncio.sleep(0.001)
            lag.append(loop.time() - at - 0.001)

    ticker = asyncio.create_task(tick())
    due = deque(peer % PEERS for peer in range(options.writes))
    healthy = sum(peer != PEERS - 1 for peer in due)
    began = time.perf_counter()
    while len(took) < healthy:
        for _ in range(len(due)):
            peer = due.popleft()
            if posted[peer] < (WINDOW if peer != PEERS - 1 else STUCK_WINDOW):
                post(peer)
            elif peer != PEERS - 1 or not stuck:
                due.append(peer)
        changed.clear()
        if len(took) < healthy:
            await asyncio.wait_for(changed.wait(), 60)
    seconds = time.perf_counter() - began
    ticker.cancel()
    if stuck:
        os.kill(children[1][0].pid, signal.SIGCONT)
    await until(lambda: not sent)
    for agent in range(agents):
        transport.submit(agent, [Close(time.monotonic_ns() + 5_000_000_000)])
    await until(lambda: len(stopped) == agents)
    for child, pipe in children:
        pipe.send("end")
        child.join(10)
    took_ms, lag_ms = np.array(took) * 1e3, np.array(lag) * 1e3
    return {
        "agents": agents,
        "descriptors": descriptors,
        "method": method,
        "stuck": stuck,
        "p50_ms": round(float(np.percentile(took_ms, 50)), 2),
        "p99_ms": round(float(np.percentile(took_ms, 99)), 2),
        "lag_p99_ms": round(float(np.percentile(lag_ms, 99)), 2),
        "lag_max_ms": round(float(lag_ms.max()), 2),
        "GBps": round(healthy * descriptors * BLOCK / seconds / 1e9, 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--writes", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="one small configuration")
    options = parser.parse_args()
    grid = list(itertools.product((1, 2, 4), (64, 128, 512), ("initialize", "prepared")))
    rows = []
    for agents, descriptors, method in grid[:1] if options.quick else grid:
        for _ in range(options.rounds):
            for stuck in (False, True):
                row = asyncio.run(measure(options, agents, descriptors, method, stuck=stuck))
                print(json.dumps(row), flush=True)
                rows.append(row)
    print(
        "\n| agents | descriptors | method | control p99 ms | stuck p99 ms | ratio | lag p99 ms |"
    )
    print("|---|---|---|---|---|---|---|")
    for agents, descriptors, method in dict.fromkeys(
        (r["agents"], r["descriptors"], r["method"]) for r in rows
    ):
        of = [
            r
            for r in rows
            if (r["agents"], r["descriptors"], r["method"]) == (agents, descriptors, method)
        ]
        control, stuck = (
            float(np.median([r["p99_ms"] for r in of if r["stuck"] is state]))
            for state in (False, True)
        )
        lag = max(r["lag_p99_ms"] for r in of)
        print(
            f"| {agents} | {descriptors} | {method} | {control:.1f} | {stuck:.1f} | "
            f"{stuck / control:.2f} | {lag:.1f} |"
        )


if __name__ == "__main__":
    main()
