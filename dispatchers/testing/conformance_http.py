"""The suites for an adapter that speaks HTTP: those for `send` and `find` with a faulty server, and what it does to each.

Needs pytest and h11.
"""

import asyncio
import tracemalloc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from dispatchers.delivery import Adapter, CannotTell, Deferred, Delivered, Found, Outcome, Unknown
from dispatchers.pipeline.workers import ABANDON_SECONDS
from dispatchers.testing import faulty_http
from dispatchers.testing.attempts import close, in_a_loop, sent
from dispatchers.testing.conformance import AdapterSuite
from dispatchers.testing.conformance_frame import TAGS, UNHURRIED, Expected, Scenario
from dispatchers.testing.conformance_lookups import LookupSuite
from dispatchers.testing.faulty_http import FaultyHttp

REDIRECTS = (301, 302, 303, 307, 308)
QUOTING = (400, 401, 402, 403, 404, 409, 422, 429, 500, 503)
HIDING = (401, 403, 429, 500, 503)  # what is there is not shown
MAX_MEMORY_BYTES = faulty_http.LARGE_BYTES // 2  # half of a giant answer: it was not kept whole in memory


class HttpSuite(AdapterSuite):
    """`AdapterSuite` with a `FaultyHttp`. A scenario's `behaviour` is one of `dispatchers.testing.faulty_http`.

    success: the status of a success.
    unreadable: the outcome of a success whose body cannot be read. By default the effect happened. If the service reports
        failures with this status too, set `Delivered | Unknown`.
    """

    success: int = 200
    unreadable: Expected = Delivered

    def remote(self) -> AbstractContextManager[FaultyHttp]:
        return faulty_http.faulty_http()

    def fault_scenarios(self) -> Sequence[Scenario]:
        """The request did not arrive; there was no answer; the answer is unreadable; or the answer quotes the request."""
        success, unreadable = self.success, self.unreadable
        either = unreadable | Unknown
        return [
            Scenario("connection refused", faulty_http.refuse, Deferred, requests=0),
            Scenario("closed without an answer", faulty_http.close, Unknown),
            Scenario("reset without an answer", faulty_http.reset, Unknown),
            Scenario("an answer that is no HTTP", faulty_http.garble, Unknown),
            Scenario("hangs before the first byte", faulty_http.hang, Unknown, hangs=True),
            Scenario("drips a head", faulty_http.drip_head, Unknown, hangs=True),
            Scenario("drips a body", faulty_http.drip_body(success), either, hangs=True),
            Scenario("a giant head", faulty_http.giant_head(success), either),
            Scenario("a body that is no JSON", faulty_http.answer(success, body=b"<html>\xff\0"), unreadable),
            Scenario("a success cut short", faulty_http.cut_short(success), unreadable),
            Scenario("a success reset in its body", faulty_http.reset_in_body(success), unreadable),
            Scenario("a giant body", faulty_http.giant(success), unreadable),
            Scenario("a gzip bomb", faulty_http.gzip_bomb(success), unreadable),
            *(Scenario(f"redirect {status}", faulty_http.redirect(status), Unknown) for status in REDIRECTS),
            *(
                Scenario(f"quotes us with {status}", faulty_http.echo(status), Outcome)
                for status in (success, *QUOTING)
            ),
        ]

    def test_an_answer_without_end_does_not_fill_the_memory(self) -> None:
        for behaviour in (faulty_http.giant(self.success), faulty_http.gzip_bomb(self.success)):
            with self.remote() as remote:
                remote.behave(behaviour)
                adapter = self.adapter(remote, UNHURRIED)
                tracemalloc.start()
                try:
                    self._run(adapter, self.delivery(adapter))
                    _, peak = tracemalloc.get_traced_memory()
                finally:
                    tracemalloc.stop()

            assert peak < MAX_MEMORY_BYTES, (
                f"the adapter must not keep a large answer in memory, but it used {peak} bytes for an answer of"
                f" {faulty_http.LARGE_BYTES} bytes: limit how much of the body it reads"
            )

    def test_an_answer_that_nobody_asked_for_is_not_the_next_one_s(self) -> None:
        """Such an answer may be on a connection that is kept. Then a failed request would count as delivered."""
        with self.remote() as remote:
            adapter = self.adapter(remote, UNHURRIED)
            remote.behave(faulty_http.answer_twice(self.success))
            first, second = in_a_loop(lambda: self._before_and_after_a_failure(adapter, remote), UNHURRIED)

        assert isinstance(first, Delivered), f"the first request succeeded, so Delivered is expected, but not {first!r}"
        assert not isinstance(second, Delivered), (
            f"the second request failed, but the adapter returned {second!r}: it took the second answer to the first request for"
            " the answer to the second one. Close a connection on which more than one answer came"
        )

    def test_closing_it_leaves_no_connection_open(self) -> None:
        with self._service() as remote:
            adapter = self.adapter(remote, UNHURRIED)
            still_open = in_a_loop(lambda: self._open_after_closing(adapter, remote), UNHURRIED)

        assert not still_open, f"aclose() must close all connections, but {still_open} connections are open after it"

    async def _open_after_closing(self, adapter: Adapter, remote: FaultyHttp) -> int:
        """How many connections the remote service still has, after it had time to notice their end."""
        await sent(adapter, self.delivery(adapter))
        await close(adapter)
        until = asyncio.get_running_loop().time() + ABANDON_SECONDS
        while remote.connected and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110  # another loop's
            await asyncio.sleep(0.01)
        return remote.connected

    async def _before_and_after_a_failure(self, adapter: Adapter, remote: FaultyHttp) -> tuple[Any, Any]:
        try:
            before = await sent(adapter, self.delivery(adapter, tag=TAGS[0]))
            remote.behave(faulty_http.answer(500))
            return before, await sent(adapter, self.delivery(adapter, tag=TAGS[1]))
        finally:
            await close(adapter)


class HttpLookupSuite(LookupSuite):
    """`LookupSuite` with a `FaultyHttp`. None of its faults proves absence."""

    def remote(self) -> AbstractContextManager[FaultyHttp]:
        return faulty_http.faulty_http()

    def fault_scenarios(self) -> Sequence[Scenario]:
        return [
            Scenario("connection refused", faulty_http.refuse, CannotTell),
            Scenario("closed without an answer", faulty_http.close, CannotTell),
            Scenario("reset without an answer", faulty_http.reset, CannotTell),
            Scenario("an answer that is no HTTP", faulty_http.garble, CannotTell),
            Scenario("hangs before the first byte", faulty_http.hang, CannotTell, hangs=True),
            Scenario("drips a body", faulty_http.drip_body(200), CannotTell | Found, hangs=True),
            Scenario("a body that is no JSON", faulty_http.answer(200, body=b"<html>\xff\0"), CannotTell | Found),
            Scenario("a success cut short", faulty_http.cut_short(200), CannotTell | Found),
            Scenario("a success reset in its body", faulty_http.reset_in_body(200), CannotTell | Found),
            Scenario("a giant body", faulty_http.giant(200), CannotTell | Found),
            *(Scenario(f"redirect {status}", faulty_http.redirect(status), CannotTell) for status in REDIRECTS),
            *(Scenario(f"quotes us with {status}", faulty_http.echo(status), CannotTell) for status in HIDING),
        ]
