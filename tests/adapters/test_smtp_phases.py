"""SmtpAdapter against a server that breaks: up to the final dot nothing is sent, after it only a reply shows what happened."""

import asyncio
import inspect
from contextlib import suppress
from datetime import timedelta
from typing import Any

import aiosmtplib
import pytest
from support.database import Database
from support.entries import dispatcher, put_one, state
from support.mail_servers import (
    CLOSE,
    DRIP,
    DUE_AT,
    HANG,
    RESET,
    STALL,
    THEN_CLOSE,
    Faulty,
    against,
    send,
)

import outbox
from dispatchers.adapters import SmtpAdapter
from dispatchers.adapters.email.connection import Connection
from dispatchers.adapters.email.message import compose, parse_address
from dispatchers.adapters.email.outcomes import ROWS, Exchange, outcome_of
from dispatchers.delivery import Deferred, Delivered, Outcome, Rejected, Unknown

pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")  # a connection left to the garbage collector

BEFORE = ["greeting", "EHLO", "MAIL", "RCPT", "DATA"]
HUGE = {
    "to": "ada@example.com",
    "subject": "Your invoices",
    "text": "",
    "attachments": [{"filename": "a.bin", "content_type": "application/pdf", "base64": "A" * 4 * 1024 * 1024}],
}
"""More than the network holds on the way."""


BRIEFLY = timedelta(seconds=0.5)
LONG_ENOUGH = timedelta(seconds=2)  # half of it for what comes before the dot, on a busy machine too


def outcome_at(point: str, reply: str, timeout: timedelta = timedelta(seconds=30)) -> tuple[Outcome, Faulty]:
    faulty = Faulty(at={point: reply})
    return against(faulty, send, timeout=timeout), faulty


# --- before the final dot


@pytest.mark.parametrize("breaking", [CLOSE, RESET, HANG, DRIP, "hello?", "2", "-1 odd"])
@pytest.mark.parametrize("point", BEFORE)
def test_whatever_breaks_before_the_final_dot_nothing_was_sent(point: str, breaking: str) -> None:
    outcome, faulty = outcome_at(point, breaking, BRIEFLY)

    assert isinstance(outcome, Deferred)
    assert faulty.messages == []


@pytest.mark.parametrize(
    ("point", "reply", "expected"),
    [
        ("greeting", "421 busy", Deferred("connect: 421")),
        ("greeting", "554 go away", Deferred("connect: 554")),
        ("EHLO", "550 not you", Deferred("EHLO: 550")),
        ("MAIL", "451 4.3.0 later, shop@example.com", Deferred("MAIL: 451 4.3.0")),
        ("MAIL", "421 4.4.2 closing", Deferred("MAIL: 421 4.4.2")),
        ("MAIL", "530 5.7.0 log in first", Deferred("MAIL: 530 5.7.0")),
        ("MAIL", "250-odd\r\n252 odd", Deferred("MAIL: 252")),
        ("RCPT", "450 4.2.1 greylisted <ada@example.com>", Deferred("RCPT: 450 4.2.1")),
        ("RCPT", "530 log in first", Deferred("RCPT: 530")),
        ("DATA", "451 4.3.1 disk full", Deferred("DATA: 451 4.3.1")),
        ("DATA", "250 ok", Deferred("DATA: 250")),
    ],
)
def test_a_refusal_for_now_defers_with_its_codes(point: str, reply: str, expected: Outcome) -> None:
    outcome, faulty = outcome_at(point, reply)

    assert outcome == expected
    assert faulty.messages == []


@pytest.mark.parametrize(
    ("point", "reply", "expected"),
    [
        ("MAIL", "552 5.3.4 too large", Rejected("MAIL: 552 5.3.4", result={"code": 552, "enhanced": "5.3.4"})),
        ("DATA", "554 no", Rejected("DATA: 554", result={"code": 554})),
    ],
)
def test_a_permanent_refusal_rejects_with_its_codes(point: str, reply: str, expected: Rejected) -> None:
    outcome, faulty = outcome_at(point, reply)

    assert outcome == Rejected(expected.reason, result=expected.result | {"reply": reply[4:]})
    assert faulty.messages == []


def test_a_server_that_hangs_up_as_the_text_begins_gets_no_dot() -> None:
    outcome, faulty = outcome_at("DATA", f"354 continue{THEN_CLOSE}")

    assert outcome == Deferred("nothing was sent: connect: closed by the other side (message)")
    assert faulty.messages == []


@pytest.mark.parametrize("breaking", [CLOSE, RESET])
def test_a_server_that_breaks_in_the_text_was_not_sent_the_dot(breaking: str) -> None:
    faulty = Faulty(at={"message": breaking})

    outcome = against(faulty, lambda adapter: send(adapter, HUGE), timeout=timedelta(seconds=10))

    assert isinstance(outcome, Deferred)
    assert outcome.reason.endswith("(message)")
    assert faulty.messages == []


def test_a_text_that_is_too_slow_is_deferred_and_its_dot_never_leaves() -> None:
    faulty = Faulty(at={"message": STALL}, extensions=())

    async def work(adapter: SmtpAdapter) -> Outcome:
        outcome = await send(adapter, HUGE)
        faulty.event("resume").set()
        await faulty.gone.wait()
        return outcome

    assert against(faulty, work, timeout=timedelta(seconds=6)) == Deferred(
        "nothing was sent: connect: timed out (message)"
    )
    assert faulty.messages == []


def test_half_of_the_time_is_left_for_the_reply_to_the_dot() -> None:
    faulty = Faulty(at={"EHLO": HANG})

    async def work(adapter: SmtpAdapter) -> float:
        started = asyncio.get_running_loop().time()
        assert await send(adapter) == Deferred("nothing was sent: connect: timed out (EHLO)")
        return asyncio.get_running_loop().time() - started

    assert 0.99 < against(faulty, work, timeout=LONG_ENOUGH) < 1.9


def test_no_dot_is_written_when_its_time_is_over() -> None:
    faulty = Faulty()

    async def work(adapter: SmtpAdapter) -> None:
        exchange = Exchange()
        connection = await Connection.open(adapter._server, exchange)
        payload = {"to": "ada@example.com", "subject": "", "text": ""}
        await connection.offer(
            compose(payload, sender=parse_address("", "a@b.example"), key="k", date=DUE_AT), exchange
        )

        with pytest.raises(TimeoutError):
            await connection.end(exchange, latest=asyncio.get_running_loop().time())

        assert not exchange.dot_left
        connection.abort()
        await faulty.gone.wait()

    against(faulty, work)

    assert faulty.received
    assert faulty.messages == []


@pytest.mark.parametrize("point", [*BEFORE, "message"])
def test_a_send_cancelled_before_the_dot_never_sends_it(point: str) -> None:
    faulty = Faulty(at={point: STALL}, extensions=())

    async def work(adapter: SmtpAdapter) -> None:
        sending = asyncio.create_task(send(adapter, HUGE))
        await faulty.event(point).wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        faulty.event("resume").set()
        await faulty.gone.wait()

    against(faulty, work, timeout=timedelta(seconds=30))

    assert faulty.messages == []


# --- after the final dot


@pytest.mark.parametrize(
    ("breaking", "reason"),
    [
        (CLOSE, "no answer to the message: SMTPServerDisconnected"),
        (RESET, "no answer to the message: ConnectionResetError"),
        (HANG, "no answer to the message: TimeoutError"),
        (DRIP, "no answer to the message: "),
        ("hello?", "no answer to the message: SMTPResponseException"),
        ("354 continue", "end of message: 354"),
        ("999 odd", "end of message: no SMTP reply"),
        ("25", "end of message: no SMTP reply"),
    ],
)
def test_without_a_reply_to_the_dot_the_outcome_is_unknown(breaking: str, reason: str) -> None:
    outcome, faulty = outcome_at("dot", breaking, LONG_ENOUGH)

    assert isinstance(outcome, Unknown)
    assert outcome.reason.startswith(reason)
    assert len(faulty.messages) == 1


@pytest.mark.parametrize("reply", ["250 2.0.0 Ok: queued as 77", "250", "251 will forward"])
def test_a_positive_reply_delivers_and_is_kept(reply: str) -> None:
    outcome, _ = outcome_at("dot", reply)

    assert isinstance(outcome, Delivered)
    assert outcome.result["reply"] == reply[4:]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("451 4.7.1 try later, ada@example.com", Deferred("end of message: 451 4.7.1")),
        ("421 4.3.2 shutting down", Deferred("end of message: 421 4.3.2")),
        ("452", Deferred("end of message: 452")),
    ],
)
def test_a_negative_reply_for_now_is_a_reply_not_taken(reply: str, expected: Outcome) -> None:
    assert outcome_at("dot", reply)[0] == expected


def test_a_permanent_negative_reply_is_rejected() -> None:
    outcome, _ = outcome_at("dot", "554 5.7.1 spam from shop@example.com")

    result = {"code": 554, "enhanced": "5.7.1", "reply": "5.7.1 spam from shop@example.com"}
    assert outcome == Rejected("end of message: 554 5.7.1", result=result)


def test_a_reply_that_no_database_takes_is_made_printable() -> None:
    outcome, _ = outcome_at("dot", "250 \x00\x1b[31m ok " + "x" * 1000)

    assert isinstance(outcome, Delivered)
    assert outcome.result["reply"].startswith("??[31m ok xxx")
    assert len(outcome.result["reply"]) == 200


def test_a_lost_reply_parks_the_entry_as_uncertain(sqlite: Database, ob: outbox.Outbox) -> None:
    assert _dispatched(sqlite, ob) == "uncertain"


def test_a_lost_reply_sends_again_where_that_was_chosen(sqlite: Database, ob: outbox.Outbox) -> None:
    assert _dispatched(sqlite, ob, at_least_once=True) == "retry"


def test_a_lost_reply_sends_again_where_the_server_remembers_keys(sqlite: Database, ob: outbox.Outbox) -> None:
    assert _dispatched(sqlite, ob, window=timedelta(hours=24)) == "retry"


def test_a_dispatcher_s_deadline_comes_after_the_adapter_s(sqlite: Database, ob: outbox.Outbox) -> None:
    """A hang before the dot: as the dispatcher's own timeout it would be in doubt."""
    assert _dispatched(sqlite, ob, at="DATA", breaking=HANG, timeout=BRIEFLY) == "retry"


def _dispatched(database: Database, ob: outbox.Outbox, at: str = "dot", breaking: str = CLOSE, **settings: Any) -> str:
    id = put_one(database, ob, "email.send", payload={"to": "ada@example.com", "subject": "", "text": "Dear Ada"})

    async def work(adapter: SmtpAdapter) -> None:
        working = dispatcher(database, ob, adapters={"email": adapter})
        await working.run_once()
        await working.close()

    against(Faulty(at={at: breaking}), work, **settings)
    return state(database, id)


# --- every exception


EXCEPTIONS = [
    value for _, value in inspect.getmembers(aiosmtplib, inspect.isclass) if issubclass(value, BaseException)
] + [value for _, value in inspect.getmembers(aiosmtplib.errors, inspect.isclass) if issubclass(value, BaseException)]


def made(cls: type[BaseException]) -> BaseException:
    for arguments in (("said ada@example.com",), (451, "said ada@example.com"), (451, "said", "ada@example.com")):
        with suppress(TypeError):
            return cls(*arguments)
    raise AssertionError(f"{cls.__name__} cannot be made")


@pytest.mark.parametrize("cls", EXCEPTIONS)
def test_every_exception_of_the_client_has_an_answer_of_its_own(cls: type[Exception]) -> None:
    assert cls in ROWS or cls is TimeoutError
    if cls is aiosmtplib.SMTPRecipientsRefused:
        return  # made of refusals; met in the tests of recipients
    error = made(cls)
    assert isinstance(error, Exception)

    before, after = outcome_of(error, Exchange(phase="RCPT")), outcome_of(error, Exchange(dot_left=True))

    assert isinstance(before, Deferred if cls is not aiosmtplib.SMTPNotSupported else Rejected)
    assert isinstance(after, Unknown)
    assert "ada@" not in before.reason + after.reason


@pytest.mark.parametrize("error", [OSError("x"), ValueError("x"), RuntimeError("x"), ExceptionGroup("x", [OSError()])])
def test_any_other_exception_is_judged_by_the_dot_alone(error: Exception) -> None:
    assert isinstance(outcome_of(error, Exchange()), Deferred)
    assert isinstance(outcome_of(error, Exchange(dot_left=True)), Unknown)


# --- replies that no command asked for

EXTRA = ["250 ok", "550 5.1.1 no", "354 continue", "421 idle", "250-half a reply"]
USUAL = {"greeting": "220 hello", "EHLO": "250 HELP", "MAIL": "250 ok", "RCPT": "250 ok", "DATA": "354 continue"}


@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("point", BEFORE)
def test_after_an_extra_reply_nothing_is_sent(point: str, extra: str) -> None:
    """It would be taken for the reply to the next command, and at last for the reply to the final dot."""
    if (point, extra) == ("greeting", "250-half a reply"):
        pytest.skip("the reply to EHLO ends it, and the server is in step again")
    outcome, faulty = outcome_at(point, f"{USUAL[point]}\r\n{extra}")

    assert isinstance(outcome, Deferred)
    assert faulty.messages == []


@pytest.mark.parametrize("extra", EXTRA)
def test_a_reply_while_the_text_is_sent_keeps_back_the_dot(extra: str) -> None:
    faulty = Faulty(at={"message": extra})

    outcome = against(faulty, lambda adapter: send(adapter, HUGE), timeout=timedelta(seconds=30))

    assert isinstance(outcome, Deferred)
    assert faulty.messages == []


@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("first", ["250 ok", "550 no"])
def test_two_replies_to_the_dot_prove_nothing(first: str, extra: str) -> None:
    outcome, faulty = outcome_at("dot", f"{first}\r\n{extra}")

    assert isinstance(outcome, Unknown)
    assert len(faulty.messages) == 1


@pytest.mark.parametrize("extra", EXTRA)
def test_an_extra_reply_to_rset_ends_the_connection(extra: str) -> None:
    faulty = Faulty(at={"RSET": f"250 ok\r\n{extra}"})

    async def twice(adapter: SmtpAdapter) -> list[Outcome]:
        return [await send(adapter), await send(adapter)]

    assert [type(each) for each in against(faulty, twice)] == [Delivered, Delivered]
    assert faulty.connections == 2


def test_a_reply_to_an_idle_connection_ends_it() -> None:
    async def scenario(adapter: SmtpAdapter) -> list[Outcome]:
        first = await send(adapter)
        writers[0].write(b"250 ok\r\n")
        await writers[0].drain()
        await asyncio.sleep(0.25)  # until the bytes have come: some kernels need 40 ms on loopback
        return [first, await send(adapter)]

    writers: list[asyncio.StreamWriter] = []

    class Remembering(Faulty):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            await super().serve(reader, writer)

    faulty = Remembering()

    assert [type(each) for each in against(faulty, scenario)] == [Delivered, Delivered]
    assert faulty.connections == 2
