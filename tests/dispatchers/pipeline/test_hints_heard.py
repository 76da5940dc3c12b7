"""What a dispatcher makes of the hints that it hears, without a database: which wake it, and when it does not rely on them."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import pytest
from support.entries import until_true

from dispatchers.pipeline import wakeup
from dispatchers.pipeline.wakeup import Wakeup
from outbox.sql.postgresql.hint_messages import Due, Hint, decode


class FakeListener:
    """Echoes what a dispatcher sends to itself, while `echoes` is true; or cannot listen at all."""

    can_listen = True

    def __init__(self) -> None:
        self.echoes = True
        self.lost: asyncio.Future[None] | None = None
        self.hear: Callable[[Hint], None] = lambda hint: None

    def heard_here(self, hear: Callable[[Due], None]) -> AbstractContextManager[str]:
        return nullcontext("")

    async def probe(self, token: str) -> None:
        if self.echoes:
            self.hear(Hint(probe=token))

    @asynccontextmanager
    async def listening(self, hear: Callable[[Hint], None]) -> AsyncIterator["asyncio.Future[None]"]:
        self.hear, self.lost = hear, asyncio.get_running_loop().create_future()
        yield self.lost


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(wakeup, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(wakeup, "ECHO_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_listener_that_hears_nothing_is_not_relied_on(caplog: pytest.LogCaptureFixture) -> None:
    listener = FakeListener()

    async def main() -> None:
        woken = Wakeup(listener, serves=bool, poll=0.25, clock=asyncio.get_running_loop().time)  # type: ignore[arg-type]
        stopping = asyncio.Event()
        pump = asyncio.create_task(woken.pump(stopping))
        await until_true(lambda: woken.is_listening)
        assert woken.rest_seconds == 1.25
        for _ in range(2):
            listener.echoes = False
            await until_true(lambda: not woken.is_listening)
            assert woken.rest_seconds == 0.25
            listener.echoes = True
            await until_true(lambda: woken.is_listening)
        stopping.set()
        await pump

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())

    warnings = [record.getMessage().partition(" (")[0].partition(":")[0] for record in caplog.records]
    assert warnings == ["hints from the apps do not arrive", "hints arrive again"] * 2


CRM, MAIL = frozenset({("crm", "crm.upsert")}), frozenset({("mail", "mail.send")})


def test_a_hint_without_result_makes_the_next_ones_wait_for_each_other() -> None:
    async def main() -> None:
        now = 100.0
        woken = Wakeup(None, serves=lambda operation: True, poll=1.0, clock=lambda: now)
        woken.begin()
        woken._hear(Hint(CRM))
        assert woken.hinted.is_set()
        assert woken.take() == (frozenset({"crm"}),)
        woken.asked(claimed=0)

        woken._hear(Hint(CRM))
        woken._hear(Hint(MAIL))
        assert not woken.hinted.is_set()
        await asyncio.wait_for(woken.hinted.wait(), 60)

        assert woken.take() == (frozenset({"crm", "mail"}),)
        woken.asked(claimed=1)
        now += 1
        woken._hear(Hint(CRM))
        assert woken.hinted.is_set()

    asyncio.run(main())


def test_a_hint_of_what_others_serve_wakes_no_dispatcher_here() -> None:
    async def main() -> None:
        woken = Wakeup(None, serves=lambda operation: operation == "crm.upsert", poll=1.0, clock=lambda: 0.0)
        woken.begin()

        woken._hear(Hint(MAIL))
        assert not woken.hinted.is_set()
        woken._hear(Hint(CRM | MAIL))

        assert woken.take() == (frozenset({"crm"}),)

    asyncio.run(main())


def named(destination: str, operation: str) -> str:
    return json.dumps({"due": [[destination, operation]], "woken": None, "probe": None})


@pytest.mark.parametrize(
    "payload", ["", "{}", "[]", "1", '{"due": 1, "woken": 2, "probe": 3}', "\x00", '{"due": [1]', "[" * 7999]
)
def test_what_others_send_on_the_channel_is_a_hint_at_most(payload: str) -> None:
    assert decode(payload) == Hint()


@pytest.mark.parametrize("payload", [named("\0", "crm"), named("\ud800", "crm"), named("crm", "\0"), named("", "crm")])
def test_a_hint_for_names_that_no_entry_has_is_ignored(payload: str) -> None:
    """A claim for such a destination would fail, and for all others too."""
    assert decode(payload) == Hint(frozenset())
