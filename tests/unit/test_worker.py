"""The I/O worker over a scripted backend: every answer it owes, and none that it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.engine.ports import (
    BackendError,
    Close,
    Connect,
    Connected,
    ConnectFailed,
    Disconnect,
    InDoubt,
    NotPosted,
    Opened,
    Post,
    Posted,
    Revoke,
    Revoked,
    Settled,
    Stopped,
    Withdraw,
)
from kvferry.transports.worker import (
    DOUBT_POLL_MAX_NS,
    DOUBT_POLL_MIN_NS,
    POLL_MAX_NS,
    POLL_MIN_NS,
    Worker,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.engine.ports import Command, Event, ProgressKind

FOREVER = 2**62


class ScriptedBackend:
    """Answers as told: `answers[write]` is what post gives, then what each poll gives."""

    def __init__(self) -> None:
        self.answers: dict[int, list[ProgressKind | Exception]] = {}
        self.calls: list[tuple[str, object]] = []
        self.broken: dict[str, Exception] = {}

    def _call(self, name: str, argument: object = None) -> None:
        self.calls.append((name, argument))
        if name in self.broken:
            raise self.broken[name]

    def _answer(self, write: int) -> tuple[ProgressKind, str]:
        script = self.answers.get(write, ["done"])
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, Exception):
            raise answer
        return answer, f"{write} is {answer}"

    def open(self) -> bytes:
        self._call("open")
        return b"metadata"

    def connect(self, peer: str, metadata: bytes) -> None:
        self._call("connect", peer)

    def disconnect(self, peer: str) -> None:
        self._call("disconnect", peer)

    def post(self, post: Post) -> tuple[object, ProgressKind, str]:
        self._call("post", post.write)
        return post.write, *self._answer(post.write)

    def poll(self, handle: object) -> tuple[ProgressKind, str]:
        assert isinstance(handle, int)
        self._call("poll", handle)
        return self._answer(handle)

    def release(self, handle: object) -> None:
        self._call("release", handle)

    def revoke(self, peer: str) -> tuple[bool, str]:
        self._call("revoke", peer)
        return True, "cut"

    def close(self, unsettled: Sequence[object]) -> None:
        self._call("close", tuple(unsettled))

    def named(self, name: str) -> list[object]:
        return [argument for called, argument in self.calls if called == name]


class Bench:
    """A worker, its backend, a clock that the test moves, and every event so far."""

    def __init__(self, *peers: str) -> None:
        self.backend = ScriptedBackend()
        self.worker = Worker(self.backend)
        self.now = 1_000_000_000
        self.events: list[Event] = []
        self.do(*(Connect(peer, b"m") for peer in peers))
        self.events.clear()
        self.backend.calls.clear()

    def do(self, *commands: Command) -> int | None:
        """Submit, then step without moving the clock until it wants to wait."""
        self.worker.submit(commands)
        for _ in range(1000):
            due = self.step()
            if due is None or due > self.now:
                return due
        pytest.fail("the worker never rests")

    def step(self) -> int | None:
        due = self.worker.step(self.now)
        self.events += self.worker.take_events()
        return due

    def wait(self, due: int | None) -> int | None:
        """Move the clock to `due` and go on."""
        assert due is not None
        self.now = due
        return self.do()

    def until_rest(self, due: int | None, limit: int = 100) -> None:
        for _ in range(limit):
            if due is None:
                return
            due = self.wait(due)
        pytest.fail(f"still something to do: {self.events}")


def post(write: int, peer: str = "p", not_after: int = FOREVER) -> Post:
    one = np.ones(1, dtype=np.int64)
    return Post(write, peer, one, one, one, not_after)


def settled(events: list[Event]) -> list[tuple[int, str]]:
    return [(event.write, event.result) for event in events if isinstance(event, Settled)]


def test_the_first_step_opens() -> None:
    bench = Bench()
    assert bench.worker.step(0) is None
    worker = Worker(ScriptedBackend())
    worker.step(0)
    assert worker.take_events() == [Opened(b"metadata")]


def test_a_backend_that_cannot_open_stops_the_worker_and_withdraws_what_came() -> None:
    backend = ScriptedBackend()
    backend.broken["open"] = BackendError("no device")
    worker = Worker(backend)
    worker.submit([post(1)])
    assert worker.step(0) is None
    assert worker.stopped
    *first, last = worker.take_events()
    assert settled(first) == [(1, "withdrawn")]
    assert isinstance(last, Stopped)
    assert "no device" in last.text
    assert worker.step(1) is None
    assert worker.take_events() == []


def test_a_write_done_at_once_settles_without_posted() -> None:
    bench = Bench("p")
    assert bench.do(post(1)) is None
    assert settled(bench.events) == [(1, "done")]
    assert not any(isinstance(event, Posted) for event in bench.events)
    assert bench.backend.named("release") == [1]


def test_a_pending_write_is_posted_then_settled_and_released_once() -> None:
    bench = Bench("p")
    bench.backend.answers[1] = ["pending", "pending", "done"]
    bench.until_rest(bench.do(post(1)))
    assert bench.events == [Posted(1), Settled(1, "done", "1 is done")]
    assert bench.backend.named("release") == [1]


@pytest.mark.parametrize("when", ["at the post", "at a poll"])
def test_a_write_that_the_transport_ended_has_failed(when: str) -> None:
    bench = Bench("p")
    bench.backend.answers[1] = ["failed"] if when == "at the post" else ["pending", "failed"]
    bench.until_rest(bench.do(post(1)))
    assert settled(bench.events) == [(1, "failed")]
    assert bench.backend.named("release") == [1]


@pytest.mark.parametrize("when", ["at the post", "at a poll"])
def test_doubt_is_told_once_and_polled_until_it_settles(when: str) -> None:
    bench = Bench("p")
    bench.backend.answers[1] = (
        (["pending"] if when == "at a poll" else []) + ["doubt"] * 5 + ["done"]
    )
    bench.until_rest(bench.do(post(1)))
    kinds = [type(event) for event in bench.events]
    assert kinds == [Posted, InDoubt, Settled]
    assert bench.backend.named("release") == [1]


def test_polling_backs_off_from_100_us_to_1_ms_and_doubt_from_1_to_100_ms() -> None:
    bench = Bench("p")
    bench.backend.answers[1] = ["pending"]
    due = bench.do(post(1))
    gaps = []
    for _ in range(10):
        assert due is not None
        gaps.append(due - bench.now)
        due = bench.wait(due)
    assert gaps[:3] == [POLL_MIN_NS, POLL_MIN_NS * 3 // 2, POLL_MIN_NS * 9 // 4]
    assert gaps[-1] == POLL_MAX_NS
    bench.backend.answers[1] = ["doubt"]
    due = bench.wait(due)
    gaps = []
    for _ in range(15):
        assert due is not None
        gaps.append(due - bench.now)
        due = bench.wait(due)
    assert gaps[0] == DOUBT_POLL_MIN_NS
    assert gaps[-1] == DOUBT_POLL_MAX_NS


def test_posting_one_after_another_does_not_put_polls_off() -> None:
    bench = Bench("p")
    bench.backend.answers = {write: ["pending"] for write in range(100)}
    bench.worker.submit([post(write) for write in range(100)])
    for _ in range(50):
        bench.step()
        bench.now += POLL_MIN_NS // 2
    assert len(bench.backend.named("post")) == 50
    assert bench.backend.named("poll").count(0) >= 10


def test_at_most_one_write_is_posted_per_step() -> None:
    bench = Bench("p")
    bench.worker.submit([post(1), post(2), post(3)])
    for posts in (1, 2, 3):
        bench.step()
        assert len(bench.backend.named("post")) == posts


def test_no_write_is_posted_in_a_step_whose_now_a_command_made_old() -> None:
    bench = Bench("p")
    for command in (Connect("q", b"m"), Revoke("p"), Disconnect("q")):
        bench.backend.calls.clear()
        bench.worker.submit([command, post(len(bench.events) + 100)])
        bench.step()
        assert bench.backend.named("post") == []
        bench.do()
        assert len(bench.backend.named("post")) == 1


@pytest.mark.parametrize(("late", "result"), [(-1, "done"), (0, "expired"), (1, "expired")])
def test_not_after_is_compared_with_now_at_the_post(late: int, result: str) -> None:
    bench = Bench("p")
    bench.do(post(1, not_after=bench.now - late))
    assert settled(bench.events) == [(1, result)]
    assert len(bench.backend.named("post")) == (1 if result == "done" else 0)


def test_a_write_expires_while_it_is_queued_behind_others() -> None:
    bench = Bench("p")
    bench.worker.submit([post(1), post(2, not_after=bench.now + 5)])
    bench.step()
    bench.now += 5
    bench.step()
    assert settled(bench.events) == [(1, "done"), (2, "expired")]
    assert bench.backend.named("post") == [1]


def test_peers_take_turns() -> None:
    bench = Bench("p", "q")
    bench.do(*(post(write) for write in range(4)), post(10, "q"), post(11, "q"))
    assert bench.backend.named("post") == [0, 10, 1, 11, 2, 3]


def test_posting_to_an_unconnected_peer_is_refused_and_the_rest_goes_on() -> None:
    bench = Bench("p")
    bench.do(post(1, "stranger"), post(2))
    assert settled(bench.events) == [(1, "refused"), (2, "done")]
    assert bench.backend.named("post") == [2]


def test_what_was_not_posted_is_refused_and_has_no_handle_to_release() -> None:
    bench = Bench("p")
    bench.backend.answers[1] = [NotPosted("no such region")]
    bench.do(post(1))
    assert settled(bench.events) == [(1, "refused")]
    assert bench.backend.named("release") == []


def test_withdraw_of_queued_writes_is_answered_once() -> None:
    bench = Bench("p")
    bench.do(post(1), post(2), post(3), Withdraw(2), Withdraw(2), Withdraw(1), Withdraw(3))
    assert sorted(settled(bench.events)) == [(1, "withdrawn"), (2, "withdrawn"), (3, "withdrawn")]
    assert bench.backend.named("post") == []
    bench.do(post(4))
    assert settled(bench.events)[-1] == (4, "done")


def test_withdraw_of_posted_settled_and_unknown_writes_is_ignored() -> None:
    bench = Bench("p")
    bench.backend.answers[1] = ["pending", "pending", "done"]
    due = bench.do(post(1))
    bench.do(Withdraw(1), Withdraw(99))
    bench.until_rest(due)
    bench.do(Withdraw(1))
    assert settled(bench.events) == [(1, "done")]


def test_a_post_that_breaks_is_in_doubt_for_good_and_the_rest_goes_on() -> None:
    bench = Bench("p")
    bench.backend.answers[1] = [RuntimeError("bug")]
    bench.do(post(1), post(2))
    assert bench.events[:2] == [Posted(1), InDoubt(1, "the post broke: RuntimeError: bug")]
    assert settled(bench.events) == [(2, "done")]
    due = bench.do(Close(bench.now + 10_000_000))
    bench.until_rest(due)
    assert bench.events[-1] == Stopped("", (1,))
    (given_up,) = bench.backend.named("close")
    assert isinstance(given_up, tuple)
    assert len(given_up) == 1


def test_a_poll_that_breaks_is_a_doubt() -> None:
    bench = Bench("p")
    bench.backend.answers[1] = ["pending", RuntimeError("bug"), "done"]
    bench.until_rest(bench.do(post(1)))
    assert [type(event) for event in bench.events] == [Posted, InDoubt, Settled]


def test_a_release_that_breaks_changes_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench("p")
    bench.backend.broken["release"] = BackendError("busy")
    bench.do(post(1), post(2))
    assert settled(bench.events) == [(1, "done"), (2, "done")]
    assert "busy" in caplog.text


def test_connect_failing_touches_nothing_else() -> None:
    bench = Bench("p")
    bench.backend.broken["connect"] = RuntimeError("garbage")
    bench.do(Connect("q", b"?"), post(1), post(2, "q"))
    assert bench.events[0] == ConnectFailed("q", "RuntimeError: garbage")
    assert settled(bench.events) == [(1, "done"), (2, "refused")]


def test_disconnect_withdraws_what_is_queued_and_waits_for_what_is_posted() -> None:
    bench = Bench("p")
    bench.backend.answers[1] = ["pending", "pending", "doubt", "done"]
    bench.worker.submit([post(1)])
    due = bench.step()
    bench.do(post(2), Disconnect("p"))
    assert settled(bench.events) == [(2, "withdrawn")]
    assert bench.backend.named("disconnect") == []
    bench.until_rest(bench.do() or due)
    assert settled(bench.events) == [(2, "withdrawn"), (1, "done")]
    assert bench.backend.named("disconnect") == ["p"]
    names = [name for name, _ in bench.backend.calls]
    assert names.index("disconnect") > names.index("release")
    bench.do(post(3))
    assert settled(bench.events)[-1] == (3, "refused")


def test_a_leaving_peer_comes_back_by_the_same_metadata_only() -> None:
    bench = Bench("p")
    bench.backend.answers[1] = ["pending"]
    bench.do(post(1))
    bench.do(Disconnect("p"), Connect("p", b"other"))
    assert isinstance(bench.events[-1], ConnectFailed)
    bench.do(Connect("p", b"m"))
    assert bench.events[-1] == Connected("p")
    bench.backend.answers[1] = ["done"]
    bench.until_rest(bench.do(post(2)))
    assert sorted(settled(bench.events)) == [(1, "done"), (2, "done")]
    assert bench.backend.named("disconnect") == []
    assert bench.backend.named("connect") == []


def test_connecting_anew_after_disconnect_reaches_the_backend() -> None:
    bench = Bench("p")
    bench.do(Disconnect("p"), Connect("p", b"other"), Disconnect("nobody"))
    assert bench.events == [Connected("p")]
    assert [name for name, _ in bench.backend.calls] == ["disconnect", "connect"]


def test_revoke_is_answered_and_a_broken_one_proves_nothing() -> None:
    bench = Bench("p")
    bench.do(Revoke("p"))
    bench.backend.broken["revoke"] = RuntimeError("no")
    bench.do(Revoke("p"))
    assert bench.events == [Revoked("p", True, "cut"), Revoked("p", False, "RuntimeError: no")]


def test_close_with_nothing_posted_withdraws_the_queue_and_stops() -> None:
    bench = Bench("p")
    assert bench.do(post(1), Close(bench.now + 10), post(2)) is None
    assert settled(bench.events) == [(1, "withdrawn"), (2, "withdrawn")]
    assert bench.events[-1] == Stopped("", ())
    assert bench.backend.named("close") == [()]
    assert bench.worker.stopped


def test_close_waits_for_posted_writes() -> None:
    bench = Bench("p")
    bench.backend.answers[1] = ["pending"] * 5 + ["done"]
    due = bench.do(post(1))
    bench.do(Close(FOREVER))
    bench.until_rest(bench.do() or due)
    assert settled(bench.events) == [(1, "done")]
    assert bench.events[-1] == Stopped("", ())


def test_close_gives_up_at_its_time_which_a_second_close_can_only_bring_nearer() -> None:
    bench = Bench("p")
    bench.backend.answers = {1: ["pending"], 2: ["doubt"]}
    bench.do(post(1), post(2))
    end = bench.now + 7_000_000
    bench.do(Close(end))
    due = bench.do(Close(FOREVER))
    bench.until_rest(due)
    assert bench.now == end
    assert bench.events[-1] == Stopped("", (1, 2))
    assert bench.backend.named("close") == [(1, 2)]
    assert bench.backend.named("release") == []


def test_a_close_that_breaks_is_told() -> None:
    bench = Bench("p")
    bench.backend.broken["close"] = RuntimeError("stuck")
    bench.do(Close(bench.now))
    assert bench.events == [Stopped("closing the transport failed: RuntimeError: stuck", ())]


def test_an_id_used_twice_stops_the_worker_and_hides_nothing() -> None:
    bench = Bench("p")
    bench.backend.answers[1] = ["pending"]
    bench.do(post(1))
    bench.do(post(5), post(1), post(6))
    assert bench.worker.stopped
    last = bench.events[-1]
    assert isinstance(last, Stopped)
    assert "write 1 was submitted twice" in last.text
    assert last.unsettled == (1,)
    assert settled(bench.events) == [(5, "withdrawn"), (6, "withdrawn")]
    assert bench.backend.named("close") == [(1,)]
