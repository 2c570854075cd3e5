"""What the callers of the engines do: the decode and the prefill side of one request.

Two rules: slots are used again the moment they are back, and a caller uses nothing but the public
API.
"""

from __future__ import annotations

import asyncio
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvferry.engine.errors import KvferryError
from kvferry.engine.keys import Key, Peer
from kvferry.engine.spans import Span

from .checkers import Side
from .workload import MATCH_S, TOTAL_S, Manner
from .world import Starved

if TYPE_CHECKING:
    from collections.abc import Callable

    from .workload import Request
    from .world import Life, World

LENT = -1  # in place of a slot that the engine has


class Slots:
    """Slots on their way back to their process: free once the caller knows its outcome too."""

    def __init__(self, world: World, life: Life, side: Side) -> None:
        self.nested: Callable[[str], None] | None = None
        self._world = world
        self._life = life
        self._side = side
        self._waiting: list[dict[str, list[int]]] = []
        self._judged = False

    def on_released(self, slots: dict[str, Any], evidence: str) -> None:
        """The engine's callback; `nested` calls the engine from inside."""
        if self.nested is not None:
            self.nested("cancelled from a callback")
        plain = self._world.checkers.releases(self._side, slots, evidence)
        if self._judged:
            self._life.give_back(plain)
        else:
            self._waiting.append(plain)

    def outcome_known(self) -> None:
        """What came back before may be used again now."""
        self._judged = True
        for plain in self._waiting:
            self._life.give_back(plain)
        self._waiting.clear()


# ---------------------------------------------------------------- the decode side


async def run_target(world: World, life: Life, request: Request) -> None:
    """Every try of one request on its target; with `overlap` the next does not wait."""
    if request.target_manner is Manner.ABSENT:
        return
    tries: list[asyncio.Task[str]] = []
    for attempt in range(1, request.tries + 1):
        task = life.spawn(_receive(world, life, request, attempt))
        tries.append(task)
        if request.overlap:
            await asyncio.sleep(request.target_moment_s)
        elif await task == "done":
            break
    await asyncio.gather(*tries)


async def _receive(world: World, life: Life, request: Request, attempt: int) -> str:
    groups = life.space.groups
    needed = {name: group.needed(request.target_tokens) for name, group in groups.items()}
    try:
        taken = await _take(life, {name: len(ordinals) for name, ordinals in needed.items()})
    except Starved:
        return "starved"
    blocks = {name: dict(zip(needed[name], taken[name], strict=True)) for name in needed}
    title = f"receive r{request.number}#{attempt}"
    side = _side(world, life, request, attempt, title, blocks, peer=request.source)
    slots = Slots(world, life, side)
    manner = request.target_manner if attempt == 1 else Manner.GOOD
    if life.over:
        life.give_back(taken)
        return "too late"
    assert life.engine is not None
    rx = life.engine.receive(
        Key(request.name, attempt),
        source=Peer(request.source, world.addresses[request.source]),
        need={name: span_of(held) for name, held in blocks.items()},
        tokens=request.target_tokens,
        min_tokens=request.min_tokens,
        on_released=slots.on_released,
        priority=request.priority,
    )

    ends: list[asyncio.Task[str]] = []

    async def use() -> Any:
        world.checkers.receive_begins(side)
        async with rx:
            ends.append(life.spawn(_hear_received(world, side, rx, request)))
            if manner is Manner.LEAVES:
                await asyncio.sleep(request.target_moment_s)
                return None
            return await rx

    if request.nested:
        slots.nested = rx.cancel
    user = life.spawn(use())
    await _misbehave(manner, request.target_moment_s, user, ends, rx.cancel)
    await _until_over(world, side, user)
    if not ends:
        world.checkers.never_begins(side)
        life.give_back(taken)
        return "never began"
    outcome = await ends[0]
    world.checkers.ends(side, await _outcome(rx))
    slots.outcome_known()
    await _until_released(world, side, rx)
    return outcome


# ---------------------------------------------------------------- the prefill side


async def run_source(world: World, life: Life, request: Request) -> None:
    """Every try of one request on its source."""
    if request.source_manner is Manner.ABSENT:
        return
    for attempt in range(1, request.tries + 1):
        if await _send(world, life, request, attempt) == "done":
            return


async def _send(world: World, life: Life, request: Request, attempt: int) -> str:
    groups = life.space.groups
    manner = request.source_manner if attempt == 1 else Manner.GOOD
    held = {name: group.blocks(request.tokens) for name, group in groups.items()}
    try:
        taken = await _take(life, held)
    except Starved:
        return "starved"
    for name, given in taken.items():
        for ordinal, slot in enumerate(given):
            life.space.compute(name, slot, request.number, ordinal)
    side = _side(world, life, request, attempt, f"send r{request.number} try {attempt}", {})
    slots = Slots(world, life, side)
    slots.outcome_known()  # a source uses blocks again as soon as they are back
    if life.over:
        life.give_back(taken)
        return "too late"
    assert life.engine is not None
    facts = Facts(world, side, slots, request, taken)
    if request.advances:
        tx = life.engine.send(request.name, facts)
    else:
        tx = life.engine.send(request.name, tokens=request.tokens, on_released=facts.released)

    ends: list[asyncio.Task[str]] = []

    async def use() -> Any:
        world.checkers.send_begins(side)
        async with tx:
            ends.append(life.spawn(_hear_end(world, side, tx)))
            for tokens in _steps(request, manner):
                await asyncio.sleep(request.gap_s)
                if request.advances:
                    tx.advance(tokens)
                else:
                    tx.push(facts.up_to(tokens))
            if manner is Manner.LEAVES:
                await asyncio.sleep(request.source_moment_s)
                return None
            tx.finish(aux=aux_of(request))
            return None if manner is Manner.SEALS else await tx

    user = life.spawn(use())
    await _misbehave(manner, request.source_moment_s, user, ends, tx.cancel)
    await _until_over(world, side, user)
    outcome = "never began"
    if ends:
        outcome = await ends[0]
        world.checkers.ends(side, await _outcome(tx))
    else:
        world.checkers.never_begins(side)
    life.give_back({name: [s for s in given if s != LENT] for name, given in taken.items()})
    return outcome


def _steps(request: Request, manner: Manner) -> list[int]:
    """Up to which token each of the chunks goes; SHORT leaves the last one out."""
    steps = [request.tokens * n // request.chunks for n in range(1, request.chunks + 1)]
    return steps[:-1] if manner is Manner.SHORT else steps


class Facts:
    """The port `CacheFacts` over the blocks of one request, and how a caller without one pushes.

    Lent slots leave `taken`: what is still there at the end was never the engine's.
    """

    def __init__(
        self,
        world: World,
        side: Side,
        slots: Slots,
        request: Request,
        taken: dict[str, list[int]],
    ) -> None:
        self.tokens = request.tokens
        self._world = world
        self._side = side
        self._slots = slots
        self._taken = taken
        self._pushed = dict.fromkeys(taken, 0)

    def extract(self, group: str, first: int, stop: int) -> Span:
        """See the port."""
        blocks = {ordinal: self._taken[group][ordinal] for ordinal in range(first, stop)}
        self._world.checkers.pushes(self._side, {group: blocks})
        for ordinal in blocks:
            self._taken[group][ordinal] = LENT
        return span_of(blocks)

    def released(self, slots: dict[str, Any], evidence: str) -> None:
        """See the port."""
        self._slots.on_released(slots, evidence)

    def up_to(self, tokens: int) -> dict[str, Span]:
        """The next chunk: whole blocks, and the last one with the last token."""
        chunk = {}
        for name, group in self._side.space.groups.items():
            stop = tokens // group.tokens_per_block
            if tokens == self.tokens:
                stop = group.blocks(tokens)
            if stop > self._pushed[name]:
                chunk[name] = self.extract(name, self._pushed[name], stop)
                self._pushed[name] = stop
        return chunk


# ---------------------------------------------------------------- shared


def span_of(blocks: dict[int, int]) -> Span:
    """{ordinal: slot} as a span."""
    runs: list[tuple[int, list[int]]] = []
    for ordinal, slot in sorted(blocks.items()):
        if runs and ordinal == runs[-1][0] + len(runs[-1][1]):
            runs[-1][1].append(slot)
        else:
            runs.append((ordinal, [slot]))
    return Span.from_runs(runs)


def aux_of(request: Request) -> bytes:
    return f"aux of {request.name} ".encode().ljust(request.aux_bytes, b".")[: request.aux_bytes]


def _side(
    world: World,
    life: Life,
    request: Request,
    attempt: int,
    title: str,
    blocks: dict[str, dict[int, int]],
    peer: str = "",
) -> Side:
    before_s = life.pauses_s()
    world.sides += 1
    return Side(
        number=world.sides,
        title=f"{life.owner} {title}",
        request=request.number,
        attempt=attempt,
        peer=peer,
        space=life.space,
        blocks=blocks,
        started_s=world.loop.time(),
        match_s=MATCH_S,
        total_s=TOTAL_S,
        pauses_s=lambda: life.pauses_s() - before_s,
    )


async def _take(life: Life, wanted: dict[str, int]) -> dict[str, list[int]]:
    """Wait until there are enough free slots, and take them."""
    while True:
        taken = life.allocate(wanted)
        if taken is not None:
            return taken
        await life.slots_returned()


async def _misbehave(
    manner: Manner,
    moment_s: float,
    user: asyncio.Task[Any],
    entered: list[asyncio.Task[str]],
    cancel: Callable[[str], None],
) -> None:
    """Do to a running transfer what `manner` says, `moment_s` from now."""
    if manner is Manner.CANCELS:
        await asyncio.sleep(moment_s)
        for reason in ("the client left", "the client left again"):
            if entered:
                cancel(reason)
            await asyncio.sleep(0)
    elif manner is Manner.DIES:
        await asyncio.sleep(moment_s)
        user.cancel()


async def _until_over(world: World, side: Side, user: asyncio.Task[Any]) -> None:
    """Wait for the caller's code; only a transfer's outcome or a full engine may stop it."""
    (result,) = await asyncio.gather(user, return_exceptions=True)
    if not isinstance(result, BaseException) or isinstance(result, asyncio.CancelledError):
        return
    if not isinstance(result, KvferryError) or result.code in ("usage", "internalerror"):
        text = "".join(traceback.format_exception(result))
        world.checkers.violate("no error is lost", f"{side.title}: {text}", side.request)


async def _hear_end(world: World, side: Side, handle: Any) -> str:
    """Wait for the outcome beside whatever the caller does meanwhile."""
    outcome = await _outcome(handle)
    world.checkers.ends(side, outcome)
    return outcome


async def _hear_received(world: World, side: Side, rx: Any, request: Request) -> str:
    """As `_hear_end`; what is done is judged the moment that it is heard."""
    outcome = await _hear_end(world, side, rx)
    if outcome == "done":
        got = await rx
        world.checkers.is_done(side, got.tokens)
        if got.aux != aux_of(request):
            world.checkers.violate("I3", f"{side.title}: aux is {got.aux!r}", request.number)
    return outcome


async def _until_released(world: World, side: Side, handle: Any) -> None:
    """Wait a little for the fence: when `released` returns, every slot must be back."""
    with suppress(TimeoutError):
        await asyncio.wait_for(handle.released(), 0.02)
        if side.outstanding:
            world.checkers.violate(
                "I6", f"{side.title}: released() returned, {side.outstanding} slots are out"
            )


async def _outcome(handle: Any) -> str:
    """How a transfer ended, as awaiting it says."""
    try:
        await handle
    except KvferryError as error:
        return f"{type(error).__name__} {error.code}: {error}"
    return "done"
