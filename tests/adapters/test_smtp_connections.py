"""SmtpAdapter's connections: kept for the next mail, replaced when stale, closed when out of step."""

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest
from support.mail_servers import CLOSE, HANG, RESET, Faulty, against, send

from dispatchers.adapters import SmtpAdapter
from dispatchers.delivery import Deferred, Delivered, Outcome, Unknown

pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")  # a connection left to the garbage collector


def twice(adapter: SmtpAdapter) -> Any:
    async def work() -> list[Outcome]:
        return [await send(adapter), await send(adapter)]

    return work()


def test_a_connection_is_kept_and_reset_before_the_next_mail() -> None:
    faulty = Faulty()

    outcomes = against(faulty, twice)

    assert all(isinstance(outcome, Delivered) for outcome in outcomes)
    assert faulty.connections == 1
    verbs = [command.split()[0] for command in faulty.commands]
    assert verbs == ["EHLO", "MAIL", "RCPT", "DATA", "RSET", "MAIL", "RCPT", "DATA", "QUIT"]


@pytest.mark.parametrize("breaking", [CLOSE, RESET, "421 idle for too long", "hello?"])
def test_a_kept_connection_that_went_stale_is_replaced_within_the_send(breaking: str) -> None:
    faulty = Faulty(at={"RSET": breaking})

    outcomes = against(faulty, twice)

    assert all(isinstance(outcome, Delivered) for outcome in outcomes)
    assert faulty.connections == 2


def test_a_connection_that_idled_too_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatchers.adapters.email.adapter.MAX_IDLE_SECONDS", 0.0)
    faulty = Faulty(at={"RSET": HANG})

    assert all(isinstance(outcome, Delivered) for outcome in against(faulty, twice))


@pytest.mark.parametrize(
    ("point", "reply"), [("MAIL", "550 no"), ("RCPT", "550 no"), ("RCPT", "450 no"), ("DATA", "554 no")]
)
def test_a_connection_outlives_a_refusal_in_due_form(point: str, reply: str) -> None:
    faulty = Faulty(at={point: reply})

    against(faulty, twice)

    assert faulty.connections == 1


@pytest.mark.parametrize(
    ("point", "reply"), [("MAIL", "hello?"), ("DATA", "250 ok"), ("dot", "hello?"), ("dot", "354 go")]
)
def test_a_connection_out_of_step_is_not_used_again(point: str, reply: str) -> None:
    faulty = Faulty(at={point: reply})

    against(faulty, twice)

    assert faulty.connections == 2
    assert "RSET" not in faulty.commands


@pytest.mark.parametrize(("most", "connections"), [(10, 2), (1, 1)])
def test_mails_at_once_have_a_connection_each_up_to_the_limit(most: int, connections: int) -> None:
    faulty = Faulty()

    async def work(adapter: SmtpAdapter) -> list[Outcome]:
        return await asyncio.gather(send(adapter), send(adapter))

    outcomes = against(faulty, work, max_connections=most)

    assert all(isinstance(outcome, Delivered) for outcome in outcomes)
    assert faulty.connections == connections


def test_a_mail_that_gets_no_connection_in_time_is_deferred() -> None:
    faulty = Faulty(at={"dot": HANG})

    async def work(adapter: SmtpAdapter) -> list[Outcome]:
        return await asyncio.gather(send(adapter), send(adapter))

    first, second = against(faulty, work, max_connections=1, timeout=timedelta(seconds=3))

    assert isinstance(first, Unknown)
    assert second == Deferred("nothing was sent: connect: timed out (waiting for a connection)")


@pytest.mark.parametrize("breaking", [HANG, CLOSE, "500 what?"])
def test_closing_does_not_depend_on_the_server(breaking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatchers.adapters.email.adapter.QUIT_SECONDS", 0.1)
    faulty = Faulty(at={"QUIT": breaking})

    async def work(adapter: SmtpAdapter) -> float:
        await send(adapter)
        started = time.monotonic()
        await adapter.aclose()
        await faulty.gone.wait()
        return time.monotonic() - started

    assert against(faulty, work) < 5
    assert faulty.commands[-1] == "QUIT"
