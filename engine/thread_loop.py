"""The thread that an `EngineThread` has, and the event loop that runs its engine there.

Two rules: what is posted under the lock is done on the loop in that order; however the thread
ends, `on_end` is called there, and nothing that was posted is left unanswered by it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from .errors import Failed, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .service import Engine

logger = logging.getLogger("kvferry")


class ThreadLoop:
    """One life of a thread with a loop and an engine in it.

    name: of the engine. loop_factory: makes the loop, None for asyncio's. on_end: called on the
    thread, under the lock, when the engine is no more and nothing is accepted any more.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None,
        on_end: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._name = name
        self._loop_factory = loop_factory
        self._on_end = on_end
        self._thread = threading.Thread(
            target=self._main, name=f"kvferry-engine-{name}", daemon=True
        )
        # Reentrant: a finalizer of the host's may cancel while this very thread holds it.
        self.lock = threading.RLock()
        self._pid = 0  # 0 until it is claimed
        self._loop: asyncio.AbstractEventLoop | None = None  # None until the engine is open
        self._closing = asyncio.Event()
        self._decided = threading.Event()  # the engine is open, or never will be
        self._closed = False  # nothing is accepted any more
        self._gone = False  # `on_end` was called
        self._crash: BaseException | None = None
        self._start_error: BaseException | None = None

    # ------------------------------------------------------------ in the callers' threads

    def claim(self) -> None:
        """Belong to this process. Raises UsageError the second time, and after `close`."""
        with self.lock:
            if self._pid or self._closed:
                raise UsageError(f"engine thread {self._name} was started before, make a new one")
            self._pid = os.getpid()

    def start(self) -> None:
        """Start, and block until the engine is open. Raises what its `start` raises."""
        self._thread.start()
        try:
            self._decided.wait()
        except BaseException:
            self._ask_to_close()
            raise
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error

    def close(self) -> None:
        """Close the engine after what was posted, and block until the thread has ended."""
        self.check_process()
        self._ask_to_close()
        if self._pid:
            self._thread.join()
        self.check_crash()

    def post(self, action: Callable[[], None]) -> None:
        """Have the loop do something. Under the lock, after `check`."""
        assert self._loop is not None
        # A loop that is closed already has crashed, and `on_end` waits for the lock.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._run, action)

    def soon(self, action: Callable[[], None]) -> None:
        """On the loop: do something after what is being done; never, when the loop is closed."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon(action)

    def _ask_to_close(self) -> None:
        with self.lock:
            if not self._closed:
                self._closed = True
                if self._loop is not None:
                    self.post(self._closing.set)

    # ------------------------------------------------------------ checks

    @property
    def crashed(self) -> bool:
        """True when an internal error has ended the thread, and `on_end` was called."""
        return self._gone and self._crash is not None

    def check(self) -> None:
        """Raise UsageError or Failed unless something may be posted, here and now."""
        self.check_started()
        self.check_crash()
        if self._closed:
            raise UsageError(f"engine thread {self._name} is closed", code="closed")

    def check_started(self) -> None:
        """Raise UsageError before the start and in another process."""
        self.check_process()
        if self._loop is None:
            raise UsageError(f"engine thread {self._name} is not started: use it in `with`")

    def check_process(self) -> None:
        """Raise UsageError in a forked child. Before the lock: there, nobody may release it."""
        if self._pid not in (0, os.getpid()):
            raise UsageError(
                f"engine thread {self._name} was started in another process: fork copies no thread"
            )

    def check_crash(self) -> None:
        """Raise Failed when an internal error ends or has ended the thread."""
        if self._crash is not None:
            text = f"engine thread {self._name} ended by an internal error: {self._crash!r}"
            raise Failed(text, code="crashed") from self._crash

    # ------------------------------------------------------------ in its own thread

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._loop_factory) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001  whatever it is, the callers must hear of it
            self._fail(error)
        finally:
            with self.lock:
                self._gone = self._closed = True
                self._on_end()
            self._decided.set()

    async def _serve(self) -> None:
        try:
            await self._engine.start()
            with self.lock:
                self._loop = asyncio.get_running_loop()
                if self._closed:
                    self._closing.set()
            self._decided.set()
            await self._closing.wait()
        finally:
            await self._engine.aclose()

    def _run(self, action: Callable[[], None]) -> None:
        """Do what was posted. The callers' mistakes were caught: what raises here is a bug."""
        if self._crash is not None:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001  a loop would log it and go on
            self._fail(error)
            self._closing.set()

    def _fail(self, error: BaseException) -> None:
        if self._loop is None:
            self._start_error = error
        else:
            self._crash = self._crash or error
            logger.error("internal error in engine thread %s", self._name, exc_info=error)
