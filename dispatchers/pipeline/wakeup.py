"""Wakes the claim loops when apps have committed entries, and decides how long the loops may rest while hints arrive.

Hints only save time: polling finds every entry without them. The dispatcher tests its connection: it sends a hint to itself
over an ordinary connection. It relies on hints only while these tests succeed.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

from dispatchers.pipeline.signals import Signal
from dispatchers.store.connections.listener import CannotListen, Listener
from outbox.sql.postgresql.hint_messages import Due, Hint, merged, process_token

log = logging.getLogger("outbox.dispatcher")

POLLS_RESTED = 5  # with hints, the time between two polls is multiplied by this: by default 1.25 s
HELPERS_REST = 10  # the other loops rest this many times longer than the first one
PROBE_SECONDS = 30.0  # between two tests of a connection that listens
ECHO_SECONDS = 5.0  # after this time a test has failed
RETRY_SECONDS = (1.0, 60.0)  # until the next try to listen: the first value, then doubled up to the second
APART_SECONDS = 0.02  # between two claims after hints, if the earlier one brought no entry


_NOTHING: Due = frozenset()


class Heard(NamedTuple):
    """The hints since the last `take`. destinations: None for any destination."""

    destinations: frozenset[str] | None


class Wakeup:
    """Receives hints, and decides when the claim loops poll.

    hinted: set when there is a hint that `take` has not returned yet.

    listener: None if hints are off. serves: whether this dispatcher serves an operation.
    poll: how long an idle dispatcher rests without hints.
    """

    def __init__(
        self, listener: Listener | None, *, serves: Callable[[str], bool], poll: float, clock: Callable[[], float]
    ) -> None:
        self._serves = serves
        self._listener = listener
        self._poll = poll
        self._clock = clock
        self._due: Due = _NOTHING
        self._echo = asyncio.Event()
        self._token = ""
        self._woken = ""  # no token
        self._tests = 0
        self._is_silent = self._is_followed = False
        self._quiet_until, self._poll_at = -math.inf, math.inf
        self.hinted = Signal()
        self.is_listening = False

    def begin(self) -> None:
        """Prepare for this event loop."""
        self.hinted, self._echo = Signal(), asyncio.Event()
        self._due, self.is_listening = _NOTHING, False

    # --- for the claim loops

    @property
    def rest_seconds(self) -> float:
        """How long an idle dispatcher rests between two polls."""
        return self._poll * POLLS_RESTED if self.is_listening else self._poll

    def polls_at(self, jitter: float, *, is_first: bool) -> float:
        """When a resting loop polls. Claims for hints do not delay the first loop's poll. jitter: from 0 to 1."""
        least = 0.75 if self.is_listening else 0.5  # without hints a poll may come sooner
        resting = self.rest_seconds * (least + jitter / 2)
        if not is_first:
            return self._clock() + (resting * HELPERS_REST if self.is_listening else resting)
        self._poll_at = min(self._poll_at, self._clock() + resting)
        return self._poll_at

    def polled(self) -> None:
        """Note that the first loop polls now."""
        self._poll_at = math.inf

    def take(self) -> Heard | None:
        self.hinted.clear()
        due, self._due = self._due, _NOTHING
        self._is_followed = due is not _NOTHING
        if not self._is_followed:
            return None
        return Heard(None if due is None else frozenset([destination for destination, _ in due]))

    def asked(self, claimed: int) -> None:
        """Note how many entries a claim has brought. If a claim after a hint brings none, other dispatchers were faster. Then
        hints are collected for a moment, so that not every dispatcher claims for every single entry.
        """
        if self._is_followed and not claimed:
            self._quiet_until = self._clock() + APART_SECONDS
        self._is_followed = False

    def hint_again_in(self, seconds: float) -> None:
        """Repeat a hint for any destination after this time, because it came too early."""
        asyncio.get_running_loop().call_later(seconds, self._follow, None)

    # --- received hints

    def _hear(self, hint: Hint) -> None:
        if hint.probe is not None:
            if hint.probe == self._token:
                self._echo.set()
        elif hint.woken != self._woken:
            self._follow(hint.due)

    def _follow(self, due: Due) -> None:
        """Follow a hint, unless only other dispatchers serve the operation: a claim here would only delay them."""
        if due is not None:
            due = frozenset([pair for pair in due if self._serves(pair[1])])
            if not due:
                return
        if self._due is not _NOTHING:
            self._due = merged(self._due, due)
            return
        self._due = due
        wait = self._quiet_until - self._clock()
        if wait > 0:
            asyncio.get_running_loop().call_later(min(wait, APART_SECONDS), self.hinted.set)
        else:
            self.hinted.set()

    # --- listening

    async def pump(self, stopping: asyncio.Event) -> None:
        """Listen until `stopping` is set."""
        if self._listener is None:
            return
        loop = asyncio.get_running_loop()

        def heard_here(due: Due) -> None:
            with suppress(RuntimeError):  # the event loop was closed just now
                loop.call_soon_threadsafe(self._follow, due)

        with self._listener.heard_here(heard_here) as self._woken:
            try:
                await until_set(stopping, self._listen_again_and_again(self._listener))
            finally:
                self.is_listening = False

    async def _listen_again_and_again(self, listener: Listener) -> None:
        if not listener.can_listen:
            await asyncio.Event().wait()  # no listener: only hints of this process arrive
        first, most = RETRY_SECONDS
        tries = 0
        while True:
            try:
                await self._listen(listener)
            except Exception as error:
                tries = 0 if self.is_listening else tries + 1
                self.is_listening = False
                self._report_silence(error)
                self._follow(None)  # hints were lost meanwhile, so check all destinations
            await asyncio.sleep(min(first * 2 ** min(tries, 10), most))

    async def _listen(self, listener: Listener) -> None:
        """Listen until the connection is lost or a test hint does not come back. It ends with an exception in both cases."""
        async with listener.listening(self._hear) as lost:
            while True:
                await self._prove(listener, lost)
                if not self.is_listening:
                    self.is_listening = True
                    self._report_arrival()
                    self._follow(None)
                await asyncio.wait([lost], timeout=PROBE_SECONDS)

    async def _prove(self, listener: Listener, lost: "asyncio.Future[None]") -> None:
        self._echo.clear()
        self._tests += 1
        self._token = f"{process_token()} {id(self)} {self._tests}"
        await listener.probe(self._token)
        echo: asyncio.Future[Any] = asyncio.ensure_future(self._echo.wait())
        try:
            await asyncio.wait([echo, lost], timeout=ECHO_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            echo.cancel()
        if lost.done():
            lost.result()
        if not self._echo.is_set():
            raise CannotListen(f"this dispatcher's own test notification has not arrived within {ECHO_SECONDS:g} s")

    def _report_arrival(self) -> None:
        if self._is_silent:
            log.warning("hints arrive again: entries are claimed as soon as they are committed")
        self._is_silent = False

    def _report_silence(self, error: Exception) -> None:
        if not self._is_silent:
            reason = str(error) if isinstance(error, CannotListen) else type(error).__name__
            log.warning(
                "hints from the apps do not arrive (%s): this dispatcher polls the database every %g s, and tries to listen"
                " again",
                reason,
                self._poll,
            )
        self._is_silent = True


async def until_set(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, and cancel it when `stopping` is set."""
    tasks = [asyncio.ensure_future(each) for each in (work, stopping.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
