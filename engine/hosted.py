"""One transfer of an `EngineThread`: what it has lent, and the events that its host gets.

Two rules: what callers may do wrong in its present state is found out in their thread, from what
was accepted so far, without asking the loop; the events answer for every slot that was accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from .errors import Busy, Failed, UsageError
from .keys import Key
from .lease import Evidence
from .spans import Span

if TYPE_CHECKING:
    from collections.abc import Callable

    from .effects import Received, Sent
    from .errors import KvferryError
    from .handles import Receive, Send
    from .lease import Slots
    from .ports import CacheFacts


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """The outcome of a transfer, named by its key or request id: `result`, or `error` if not None.

    The errors are those that awaiting `Receive` or `Send` raises.
    """

    transfer: Key | str
    result: Received | Sent | None
    error: KvferryError | None


@dataclass(frozen=True, slots=True, eq=False)
class Released:
    """These slots are back, {group: int64[n]}, with the evidence that they are safe."""

    transfer: Key | str
    slots: Slots
    evidence: str


@dataclass(frozen=True, slots=True, eq=False)
class Quarantined:
    """The engine has closed without evidence for these slots, {group: int64[n]}, ascending.

    They are never released: the other side may still touch their memory.
    """

    transfer: Key | str
    slots: Slots


Event = Ended | Released | Quarantined
Handle = TypeVar("Handle", "Receive", "Send")


class Hosted(Generic[Handle]):
    """What both ends share. Implements `driver.Handle`.

    In the callers' threads, under the host's lock: `lend`. On the loop: everything else.
    tell: queues an event. review: looks whether the transfer, or its name, can be forgotten.
    """

    handle: Handle

    def __init__(
        self,
        name: Key | str,
        tell: Callable[[AnyHosted, Event], None],
        review: Callable[[AnyHosted], None],
    ) -> None:
        self.name = name
        self.told = False  # its `Ended` was drained
        self._tell = tell
        self._review = review
        self._lent: dict[str, Span] = {}
        self._back: list[Slots] = []
        self._slots_back = 0
        self._entered = False
        self._ended = False
        self._fenced = False

    @property
    def over(self) -> bool:
        """True when nothing of it can follow and its host knows its outcome."""
        lent = sum(len(span) for span in self._lent.values())
        return self.told and self._fenced and self._slots_back == lent

    @property
    def name_is_free(self) -> bool:
        """True when its name may stand for another transfer."""
        return self.over

    def lend(self, slots: dict[str, Span]) -> None:
        """Answer for these slots from now on."""
        self._lent = slots

    # ------------------------------------------------------------ the engine's calls

    def on_ended(self, result: Received | Sent | None, error: KvferryError | None) -> None:
        """See `driver.Handle`."""
        self._ended = True
        self._tell(self, Ended(self.name, result, error))

    def on_release(self, slots: Slots, evidence: str) -> None:
        """See `driver.Handle`."""
        self._back.append(slots)
        self._slots_back += sum(len(array) for array in slots.values())
        self._tell(self, Released(self.name, slots, str(evidence)))
        self._review(self)

    def on_fenced(self) -> None:
        """See `driver.Handle`."""
        self._fenced = True
        self._review(self)

    def on_abandoned(self) -> None:
        """See `driver.Handle`. `account` follows, and says which slots that concerns."""

    # ------------------------------------------------------------ the host's calls, on the loop

    def enter(self) -> None:
        """Begin. What the engine refuses ends at once."""
        try:
            self.handle.enter(self)
        except (Busy, Failed, UsageError) as error:  # nothing was started
            self.on_ended(None, error)
            self.on_fenced()
            self._give_back(self._out())
        else:
            self._entered = True

    def cancel(self, reason: str) -> None:
        """End it, in any state."""
        if self._entered:
            self.handle.cancel(reason)

    def account(self) -> None:
        """The engine is no more: answer for what it did not."""
        if not self._ended:
            text = f"the engine of {self.name} has ended by an internal error"
            self.on_ended(None, Failed(text, code="crashed"))
        out = self._out()
        if self._fenced or not self._entered:
            self._give_back(out)
        elif out:
            self._tell(self, Quarantined(self.name, out))

    def _give_back(self, slots: Slots) -> None:
        if slots:
            self.on_release(slots, Evidence.NEVER_EXPOSED)

    def _out(self) -> Slots:
        """The slots that were accepted and are not released."""
        out = {}
        for group, span in self._lent.items():
            back = [slots[group] for slots in self._back if group in slots]
            rest = np.setdiff1d(span.slots(), np.concatenate(back)) if back else span.slots()
            if len(rest):
                out[group] = rest
        return out


AnyHosted = Hosted[Any]


class HostedReceive(Hosted["Receive"]):
    """A receive, named by its key."""


class HostedSend(Hosted["Send"]):
    """A send, named by its request id.

    tokens_ready: how far it was advanced. Only in the callers' threads, under the host's lock.
    """

    tokens_ready = 0
    _sealed = False

    @property
    def name_is_free(self) -> bool:
        """True when its host knows that it has ended: the engine takes the next one then."""
        return self.told

    def facts(self, facts: CacheFacts) -> CacheFacts:
        """The same facts, with the released blocks in events."""
        return _Facts(facts, self)

    def lend(self, slots: dict[str, Span]) -> None:
        """Answer for these blocks too. Raises UsageError as `Send.push`; nothing is changed then.

        As there, no ordinal and no slot can be pushed twice, not even after its release.
        """
        if self._sealed:
            raise UsageError(f"send {self.name}: push after finish")
        lent = dict(self._lent)
        for group, span in slots.items():
            try:
                lent[group] = lent.get(group, Span()).union(span)
            except UsageError as error:
                text = f"send {self.name}: group {group!r} was pushed before: {error}"
                raise UsageError(text) from None
        self._lent = lent

    def seal(self) -> None:
        """Nothing is pushed any more. Raises UsageError the second time."""
        if self._sealed:
            raise UsageError(f"send {self.name}: finished twice")
        self._sealed = True

    def push(self, chunk: dict[str, Span]) -> None:
        """On the loop: hand the blocks to the engine, or back when it refused the send."""
        if self._entered:
            self.handle.push(chunk)
        else:
            self._give_back(self._out())

    def finish(self, aux: bytes) -> None:
        """On the loop: seal."""
        if self._entered:
            self.handle.finish(aux)


class _Facts:
    """A host's facts, whose `released` becomes an event."""

    def __init__(self, facts: CacheFacts, sending: HostedSend) -> None:
        self.tokens = facts.tokens
        self.extract = facts.extract
        self.released = sending.on_release
