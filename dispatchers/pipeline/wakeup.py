"""Wakes the claim loops when apps have committed entries, and says how long they may rest while hints arrive.

Hints only save time: with or without them every entry is found by asking the database. They are believed to arrive after one
that this dispatcher sent to itself, over an ordinary connection, has come back; and for as long as the next ones do.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

from dispatchers.store.listener import CannotListen, Listener
from outbox.sql.hint_messages import Due, Hint, merged, process_token

log = logging.getLogger("outbox.dispatcher")

POLLS_RESTED = 4  # an idle dispatcher that hears hints asks so much more seldom: by default once a second
HELPERS_REST = 10  # how much longer than the first loop the others then rest before they ask
PROBE_SECONDS = 30.0  # between two tests of a connection that listens
ECHO_SECONDS = 5.0  # until a test has failed
RETRY_SECONDS = (1.0, 60.0)  # until the next try to listen, doubling up to the second
APART_SECONDS = 0.02  # between two hints that are followed, if the earlier one brought no entry


_NOTHING: Due = frozenset()


class Heard(NamedTuple):
    """What the hints since the last look were about. destinations: None for "anywhere"."""

    destinations: frozenset[str] | None


class Wakeup:
    """hinted: set when there is a hint that `take` has not returned yet.

    listener: None where there is nothing to listen to. serves: whether this dispatcher serves an operation.
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
        self._tests = 0
        self._is_silent = self._is_followed = False
        self._quiet_until, self._poll_at = -math.inf, math.inf
        self.hinted = asyncio.Event()
        self.is_listening = False

    def begin(self) -> None:
        """Start on this event loop."""
        self.hinted, self._echo = asyncio.Event(), asyncio.Event()
        self._due, self.is_listening = _NOTHING, False

    # --- for the claim loops

    @property
    def rest_seconds(self) -> float:
        """How long an idle dispatcher rests before it asks by itself."""
        return self._poll * POLLS_RESTED if self.is_listening else self._poll

    def polls_at(self, jitter: float, *, is_first: bool) -> float:
        """When a loop that rests asks for everything by itself. What the first loop asks for hints does not put that off.

        jitter: from 0 to 1.
        """
        least = 0.75 if self.is_listening else 0.5  # polls without hints are rather too soon than too late
        resting = self.rest_seconds * (least + jitter / 2)
        if not is_first:
            return self._clock() + (resting * HELPERS_REST if self.is_listening else resting)
        self._poll_at = min(self._poll_at, self._clock() + resting)
        return self._poll_at

    def polled(self) -> None:
        """The first loop has begun to ask for everything."""
        self._poll_at = math.inf

    def take(self) -> Heard | None:
        self.hinted.clear()
        due, self._due = self._due, _NOTHING
        self._is_followed = due is not _NOTHING
        if not self._is_followed:
            return None
        return Heard(None if due is None else frozenset([destination for destination, _ in due]))

    def asked(self, claimed: int) -> None:
        """A claim has brought so much. One after a hint that brought nothing: others were faster, and hints are collected for
        a moment, so that many dispatchers do not ask for each entry of one.
        """
        if self._is_followed and not claimed:
            self._quiet_until = self._clock() + APART_SECONDS
        self._is_followed = False

    def hint_again_in(self, seconds: float) -> None:
        """A hint of anything came too early to be followed."""
        asyncio.get_running_loop().call_later(seconds, self._follow, None)

    # --- what is heard

    def _hear(self, hint: Hint) -> None:
        if hint.probe is not None:
            if hint.probe == self._token:
                self._echo.set()
        elif hint.woken != process_token():
            self._follow(hint.due)

    def _follow(self, due: Due) -> None:
        """What is served elsewhere is left to those who are woken there: to claim it first would only keep them from it."""
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
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(self._follow, due)

        with self._listener.heard_here(heard_here):
            try:
                await until_set(stopping, self._listen_again_and_again(self._listener))
            finally:
                self.is_listening = False

    async def _listen_again_and_again(self, listener: Listener) -> None:
        if not listener.can_listen:
            await asyncio.Event().wait()  # only this process's own hints are heard
        first, most = RETRY_SECONDS
        tries = 0
        while True:
            try:
                await self._listen(listener)
            except Exception as error:
                tries = 0 if self.is_listening else tries + 1
                self.is_listening = False
                self._report_silence(error)
                self._follow(None)  # what was hinted at meanwhile was not heard
            await asyncio.sleep(min(first * 2 ** min(tries, 10), most))

    async def _listen(self, listener: Listener) -> None:
        """Listen until the connection is lost, or a hint of our own does not come back. Raises either way."""
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


async def first_set(*events: asyncio.Event, seconds: float) -> None:
    """Wait for one of them, but so long at most; infinity for as long as it takes."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=None if seconds == math.inf else seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
