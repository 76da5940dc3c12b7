"""The suites for an adapter that speaks HTTP: those for `send` and `find` with a hostile server, and what it does to each.

Needs pytest and h11.
"""

import asyncio
import tracemalloc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from dispatchers.delivery import Adapter, CannotTell, Deferred, Delivered, Found, Outcome, Unknown
from dispatchers.pipeline.sender import ABANDON_SECONDS
from dispatchers.testing import hostile_http
from dispatchers.testing.attempts import close, in_a_loop, sent
from dispatchers.testing.conformance import TAGS, UNHURRIED, AdapterSuite, Expected, Scene
from dispatchers.testing.conformance_lookups import LookupSuite
from dispatchers.testing.hostile_http import HostileHttp

REDIRECTS = (301, 302, 303, 307, 308)
QUOTING = (400, 401, 402, 403, 404, 409, 422, 429, 500, 503)
HIDING = (401, 403, 429, 500, 503)  # what is there is not shown
MEMORY_BYTES_MAX = hostile_http.LARGE_BYTES // 2  # half of what a giant answer holds: it was not held whole


class HttpSuite(AdapterSuite):
    """`AdapterSuite` whose far side is a `HostileHttp`; `behaviour` in a scene is one of `dispatchers.testing.hostile_http`.

    success: the status that says that it happened. unreadable: what a success means whose body cannot be read: it
        happened, unless the service tells of failures with that status too; then `Delivered | Unknown`.
    """

    success: int = 200
    unreadable: Expected = Delivered

    def far_side(self) -> AbstractContextManager[HostileHttp]:
        return hostile_http.hostile_http()

    def hostile_scenes(self) -> Sequence[Scene]:
        """Nothing arrived; it arrived and no answer came; an answer came that cannot be read; somebody quotes us."""
        success, unreadable = self.success, self.unreadable
        either = unreadable | Unknown
        return [
            Scene("connection refused", hostile_http.refuse, Deferred, requests=0),
            Scene("closed without an answer", hostile_http.close, Unknown),
            Scene("reset without an answer", hostile_http.reset, Unknown),
            Scene("an answer that is no HTTP", hostile_http.garble, Unknown),
            Scene("hangs before the first byte", hostile_http.hang, Unknown, hangs=True),
            Scene("drips a head", hostile_http.drip_head, Unknown, hangs=True),
            Scene("drips a body", hostile_http.drip_body(success), either, hangs=True),
            Scene("a giant head", hostile_http.giant_head(success), either),
            Scene("a body that is no JSON", hostile_http.answer(success, body=b"<html>\xff\0"), unreadable),
            Scene("a success cut short", hostile_http.cut_short(success), unreadable),
            Scene("a success reset in its body", hostile_http.reset_in_body(success), unreadable),
            Scene("a giant body", hostile_http.giant(success), unreadable),
            Scene("a gzip bomb", hostile_http.gzip_bomb(success), unreadable),
            *(Scene(f"redirect {status}", hostile_http.redirect(status), Unknown) for status in REDIRECTS),
            *(Scene(f"quotes us with {status}", hostile_http.echo(status), Outcome) for status in (success, *QUOTING)),
        ]

    def test_an_answer_without_end_does_not_fill_the_memory(self) -> None:
        for behaviour in (hostile_http.giant(self.success), hostile_http.gzip_bomb(self.success)):
            with self.far_side() as far_side:
                far_side.behave(behaviour)
                adapter = self.adapter(far_side, UNHURRIED)
                tracemalloc.start()
                try:
                    self._run(adapter, self.delivery(adapter))
                    _, peak = tracemalloc.get_traced_memory()
                finally:
                    tracemalloc.stop()

            assert peak < MEMORY_BYTES_MAX, f"{peak} bytes were held of an answer of {hostile_http.LARGE_BYTES}"

    def test_an_answer_that_nobody_asked_for_is_not_the_next_one_s(self) -> None:
        """Left over on a connection that is kept, it would tell of a request that failed that it was delivered."""
        with self.far_side() as far_side:
            adapter = self.adapter(far_side, UNHURRIED)
            far_side.behave(hostile_http.answer_twice(self.success))
            first, second = in_a_loop(lambda: self._before_and_after_a_failure(adapter, far_side), UNHURRIED)

        assert isinstance(first, Delivered), f"to the answer that was asked for: {first!r}"
        assert not isinstance(second, Delivered), f"to a request that failed, by the answer left over: {second!r}"

    def test_closing_it_leaves_no_connection_open(self) -> None:
        with self._service() as far_side:
            adapter = self.adapter(far_side, UNHURRIED)
            still_open = in_a_loop(lambda: self._open_after_closing(adapter, far_side), UNHURRIED)

        assert not still_open, f"{still_open} connections are open after a send and aclose()"

    async def _open_after_closing(self, adapter: Adapter, far_side: HostileHttp) -> int:
        """How many the far side still sees, when it has had the time to see them go."""
        await sent(adapter, self.delivery(adapter))
        await close(adapter)
        until = asyncio.get_running_loop().time() + ABANDON_SECONDS
        while far_side.connected and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110  # another loop's
            await asyncio.sleep(0.01)
        return far_side.connected

    async def _before_and_after_a_failure(self, adapter: Adapter, far_side: HostileHttp) -> tuple[Any, Any]:
        try:
            before = await sent(adapter, self.delivery(adapter, tag=TAGS[0]))
            far_side.behave(hostile_http.answer(500))
            return before, await sent(adapter, self.delivery(adapter, tag=TAGS[1]))
        finally:
            await close(adapter)


class HttpLookupSuite(LookupSuite):
    """`LookupSuite` whose far side is a `HostileHttp`. None of what it does proves absence."""

    def far_side(self) -> AbstractContextManager[HostileHttp]:
        return hostile_http.hostile_http()

    def hostile_scenes(self) -> Sequence[Scene]:
        return [
            Scene("connection refused", hostile_http.refuse, CannotTell),
            Scene("closed without an answer", hostile_http.close, CannotTell),
            Scene("reset without an answer", hostile_http.reset, CannotTell),
            Scene("an answer that is no HTTP", hostile_http.garble, CannotTell),
            Scene("hangs before the first byte", hostile_http.hang, CannotTell, hangs=True),
            Scene("drips a body", hostile_http.drip_body(200), CannotTell | Found, hangs=True),
            Scene("a body that is no JSON", hostile_http.answer(200, body=b"<html>\xff\0"), CannotTell | Found),
            Scene("a success cut short", hostile_http.cut_short(200), CannotTell | Found),
            Scene("a success reset in its body", hostile_http.reset_in_body(200), CannotTell | Found),
            Scene("a giant body", hostile_http.giant(200), CannotTell | Found),
            *(Scene(f"redirect {status}", hostile_http.redirect(status), CannotTell) for status in REDIRECTS),
            *(Scene(f"quotes us with {status}", hostile_http.echo(status), CannotTell) for status in HIDING),
        ]
