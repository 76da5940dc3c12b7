"""SmtpAdapter against a real mail server: what is handed in, as whom and how, and what is refused before that."""

import asyncio
import threading
from contextlib import suppress
from datetime import timedelta
from email import message_from_bytes
from email.policy import default
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
from support.mail_servers import (
    DUE_AT,
    KEY,
    MAIL,
    Faulty,
    Mailbox,
    adapter_for,
    against,
    delivery,
    handed_in,
    mail_server,
    send,
)

import outbox
from dispatchers import FOREVER, Dispatcher
from dispatchers.adapters import MemoryAdapter, SmtpAdapter
from dispatchers.adapters.email.message import Message, compose
from dispatchers.delivery import Deferred, Delivered, Outcome, Rejected
from outbox.errors import ConfigurationError

# --- what is handed in


def test_a_mail_is_delivered_and_its_queue_id_kept() -> None:
    mailbox = Mailbox()

    outcome = handed_in(mailbox)

    result = {"accepted": 1, "refused": [], "message_id": f"<{KEY}@example.com>", "reply": "2.0.0 Ok: queued as 4F1C"}
    assert outcome == Delivered(result)
    assert mailbox.envelopes[0].mail_from == "shop@example.com"
    assert mailbox.envelopes[0].rcpt_tos == ["ada@example.com"]


def test_the_child_key_is_in_the_message_id_and_in_a_header() -> None:
    mailbox = Mailbox()

    handed_in(mailbox)

    message = message_from_bytes(mailbox.contents[0], policy=default)
    assert message["Message-ID"] == f"<{KEY}@example.com>"
    assert message["Idempotency-Key"] == KEY


def test_the_header_is_the_user_s() -> None:
    mailbox = Mailbox()

    handed_in(mailbox, key_header="Resend-Idempotency-Key")

    message = message_from_bytes(mailbox.contents[0], policy=default)
    assert message["Resend-Idempotency-Key"] == KEY
    assert "Idempotency-Key" not in message


def test_the_header_can_be_left_out() -> None:
    mailbox = Mailbox()

    handed_in(mailbox, key_header=None)

    assert mailbox.contents[0].count(KEY.encode()) == 1


def test_lines_of_dots_arrive_as_they_are() -> None:
    mailbox = Mailbox()
    text = ".\n..\n.dot\nno dot.\n\n.\n"

    handed_in(mailbox, {**MAIL, "text": text})

    message = message_from_bytes(mailbox.contents[0], policy=default)
    assert message.get_content().replace("\r\n", "\n") == text  # type: ignore[attr-defined]


def test_who_is_in_bcc_gets_the_mail_and_is_not_shown() -> None:
    mailbox = Mailbox()

    handed_in(mailbox, {**MAIL, "cc": ["bob@example.com"], "bcc": ["eve@example.com", "ada@example.com"]})

    assert mailbox.envelopes[0].rcpt_tos == ["ada@example.com", "bob@example.com", "eve@example.com"]
    assert b"eve@" not in mailbox.contents[0]
    assert b"cc: bob@example.com" in mailbox.contents[0].lower()


def test_the_payload_s_from_goes_before_the_adapter_s_sender() -> None:
    mailbox = Mailbox()

    handed_in(mailbox, {**MAIL, "from": "Bills <bills@example.org>"})

    assert mailbox.envelopes[0].mail_from == "bills@example.org"
    assert b'From: "Bills" <bills@example.org>\r\n' in mailbox.contents[0]
    assert f"<{KEY}@example.org>".encode() in mailbox.contents[0]


def test_a_mail_has_its_first_attempts_date_unless_the_payload_has_one() -> None:
    mailbox = Mailbox()

    handed_in(mailbox, MAIL, {**MAIL, "date": "2026-11-21T09:30:00+01:00"})

    tried, given = (message_from_bytes(content, policy=default)["Date"] for content in mailbox.contents)
    assert parsedate_to_datetime(tried) == DUE_AT
    assert given == "Sat, 21 Nov 2026 09:30:00 +0100"


def test_the_size_is_announced_where_the_server_asks_for_it() -> None:
    outcome = handed_in(Mailbox(), {**MAIL, "text": "x" * 3000}, server={"data_size_limit": 2000})

    assert isinstance(outcome, Rejected)
    assert outcome.reason == "MAIL: 552"


def test_no_size_is_announced_where_the_server_knows_none() -> None:
    faulty = Faulty(extensions=())

    against(faulty, send)

    assert faulty.commands[1] == "MAIL FROM:<shop@example.com>"


# --- recipients


THREE = {**MAIL, "to": ["ada@example.com", "bob@example.com"], "bcc": "eve@example.com"}


def test_who_is_refused_permanently_is_named_and_the_others_get_the_mail() -> None:
    mailbox = Mailbox({"bob@example.com": "550 5.1.1 no such user bob@example.com"})

    outcome = handed_in(mailbox, THREE)

    assert isinstance(outcome, Delivered)
    assert outcome.result["accepted"] == 2
    assert outcome.result["refused"] == [{"recipient": "bob@example.com", "code": 550, "enhanced": "5.1.1"}]
    assert mailbox.envelopes[0].rcpt_tos == ["ada@example.com", "eve@example.com"]


def test_one_refused_for_now_defers_the_mail_for_all() -> None:
    mailbox = Mailbox({"ada@example.com": "550 5.1.1 no such user", "eve@example.com": "451 4.7.1 greylisted"})

    outcome = handed_in(mailbox, THREE)

    assert outcome == Deferred("RCPT: 451 4.7.1")
    assert mailbox.envelopes == []


def test_a_mail_after_a_refused_one_goes_to_its_own_recipients_only() -> None:
    mailbox = Mailbox({"eve@example.com": "451 4.7.1 greylisted"})

    handed_in(mailbox, THREE, MAIL)

    assert [envelope.rcpt_tos for envelope in mailbox.envelopes] == [["ada@example.com"]]
    assert mailbox.connections == 1


def test_a_mail_refused_for_all_recipients_is_rejected_without_an_address() -> None:
    everybody = ("ada@example.com", "bob@example.com", "eve@example.com")
    mailbox = Mailbox({name: f"550 5.1.1 no {name}" for name in everybody})

    outcome = handed_in(mailbox, THREE)

    assert isinstance(outcome, Rejected)
    assert outcome.reason == "every recipient was refused, the first with 550 5.1.1"
    assert outcome.result["accepted"] == 0
    assert [each["recipient"] for each in outcome.result["refused"]] == list(mailbox.refuse)
    assert mailbox.envelopes == []


# --- international addresses


INTERNATIONAL = {**MAIL, "to": "Zoë <zoë@exämple.com>"}


def test_an_address_beyond_ascii_goes_to_a_server_that_takes_it() -> None:
    mailbox = Mailbox()

    outcome = handed_in(mailbox, INTERNATIONAL, server={"enable_SMTPUTF8": True, "decode_data": False})

    assert isinstance(outcome, Delivered)
    assert mailbox.envelopes[0].rcpt_tos == ["zoë@xn--exmple-cua.com"]
    assert mailbox.envelopes[0].mail_options == [f"SIZE={len(mailbox.contents[0])}", "SMTPUTF8", "BODY=8BITMIME"]
    assert "<zoë@xn--exmple-cua.com>".encode() in mailbox.contents[0]


def test_an_address_beyond_ascii_is_rejected_where_servers_lack_support() -> None:
    mailbox = Mailbox()

    outcome = handed_in(mailbox, INTERNATIONAL)

    assert outcome == Rejected("the server does not offer SMTPUTF8, which an address beyond ASCII needs")
    assert mailbox.envelopes == []


# --- what is not sent


def test_a_mail_without_any_sender_is_rejected() -> None:
    assert handed_in(Mailbox(), sender=None) == Rejected("from is missing, and the adapter has no sender of its own")


def test_options_are_rejected() -> None:
    async def main() -> Outcome:
        return await adapter_for(25).send(delivery(options={"account": "acct_1"}))

    assert asyncio.run(main()) == Rejected("unknown options ['account']: a mail takes none")


# --- configuration


@pytest.mark.parametrize(("encryption", "port"), [("starttls", 587), ("tls", 465), ("none", 25)])
def test_the_port_follows_the_encryption(encryption: Any, port: int) -> None:
    assert f"port={port}" in repr(SmtpAdapter(host="mail.example.com", encryption=encryption))


def test_encryption_by_starttls_is_the_default() -> None:
    assert "encryption='starttls'" in repr(SmtpAdapter(host="mail.example.com"))


LOGIN = {"username": "shop", "password": "s3cret"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"host": ""}, "host='' must be the mail server's name or address"),
        ({"host": "a\r\nb"}, "host='a\\r\\nb' must be the mail server's name or address"),
        ({"port": 99999}, "port=99999 must be a number from 1 to 65535"),
        ({"port": "25"}, "port='25' must be a number from 1 to 65535"),
        ({"local_hostname": "a b"}, "local_hostname='a b' must be this machine's name, or [its address]"),
        ({"encryption": "maybe"}, "encryption='maybe' must be one of 'starttls', 'tls', 'none'"),
        ({"max_connections": 0}, "max_connections=0 must be an int of at least 1"),
        ({"max_connections": "a"}, "max_connections='a' must be an int of at least 1"),
        ({"find": 5}, "find=5 must be a function of the delivery and the Message-ID, or None"),
        ({"username": "shop"}, "username and password must both be text, or both be left out (they are not shown)"),
        ({"password": "s3cret"}, "username and password must both be text, or both be left out (they are not shown)"),
        (
            {**LOGIN, "encryption": "none"},
            "encryption='none' would show the password to the network: use encryption='starttls' or 'tls'",
        ),
        ({"sender": "shop"}, "sender is not an address: write it as ada@example.com or Ada <ada@example.com>"),
        (
            {"key_header": "Two Words"},
            "key_header='Two Words' is not a valid header name, or the adapter writes this header itself",
        ),
        (
            {"key_header": "Subject"},
            "key_header='Subject' is not a valid header name, or the adapter writes this header itself",
        ),
        ({"key_header": None, "window": FOREVER}, "needs a key_header: without one no server can remember the key"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(settings: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        SmtpAdapter(**{"host": "mail.example.com", **settings})

    assert text in str(refused.value)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "::1"])
def test_a_password_may_go_in_clear_within_this_machine(host: str) -> None:
    SmtpAdapter(host=host, encryption="none", **LOGIN)


def test_what_bytes_and_memory_depend_on_is_pinned_where_keys_are_kept() -> None:
    given: dict[str, Any] = {"host": "smtp.example.com", "sender": "Shop <shop@example.com>"}

    keyed = SmtpAdapter(**given, key_header="Resend-Idempotency-Key", window=timedelta(hours=24))

    assert keyed.pinned == "smtp smtp.example.com:587 Resend-Idempotency-Key from=Shop <shop@example.com>"
    assert SmtpAdapter(**given).pinned == ""


def test_a_dispatcher_takes_it_as_it_is(ob: outbox.Outbox) -> None:
    Dispatcher(
        "sqlite://", outbox=ob, adapters={"email": SmtpAdapter(host="mail.example.com"), "memory": MemoryAdapter()}
    )


def test_only_a_large_mail_is_made_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the event loop from everything else: 20 MB for some seconds."""
    threads: list[str] = []

    def noted(*arguments: Any, **settings: Any) -> Message:
        threads.append(threading.current_thread().name)
        return compose(*arguments, **settings)

    monkeypatch.setattr("dispatchers.adapters.email.adapter.compose", noted)
    large = {**MAIL, "text": "x" * 100_000}
    mailbox = Mailbox()

    assert isinstance(handed_in(mailbox, MAIL, large), Delivered)
    assert threads == ["MainThread", "outbox-compose"]
    assert isinstance(handed_in(mailbox, {**large, "subject": 7}), Rejected)


LARGE = {**MAIL, "text": "x" * 100_000}


def test_large_mails_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads at work would keep the interpreter from the event loop: each of its turns would wait for all of them."""
    met = threading.Barrier(2)
    meetings: list[bool] = []

    def meeting(*arguments: Any, **settings: Any) -> Message:
        with suppress(threading.BrokenBarrierError):  # alone, or after one that was alone
            met.wait(0.3)
            meetings.append(True)
        return compose(*arguments, **settings)

    monkeypatch.setattr("dispatchers.adapters.email.adapter.compose", meeting)
    mailbox = Mailbox()

    async def main() -> list[Outcome]:
        async with mail_server(mailbox) as port:
            adapter = adapter_for(port)
            outcomes = await asyncio.gather(*(send(adapter, LARGE) for _ in range(2)))
            await adapter.aclose()
            return outcomes

    assert [type(outcome) for outcome in asyncio.run(main())] == [Delivered, Delivered]
    assert not meetings


def test_a_mail_that_is_not_made_in_time_is_certainly_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def slow(*arguments: Any, **settings: Any) -> Message:
        done.wait(30)
        return compose(*arguments, **settings)

    monkeypatch.setattr("dispatchers.adapters.email.adapter.compose", slow)
    mailbox = Mailbox()

    async def main() -> Outcome:
        async with mail_server(mailbox) as port:
            adapter = adapter_for(port, timeout=timedelta(seconds=0.2))
            outcome = await send(adapter, LARGE)
            done.set()
            await adapter.aclose()
            return outcome

    assert isinstance(asyncio.run(main()), Deferred)
    assert mailbox.contents == []


def test_a_long_text_is_written_in_parts_and_arrives_whole() -> None:
    mailbox = Mailbox()
    lines = [f".{each:09}" + "x" * 60 for each in range(10_000)]

    assert isinstance(handed_in(mailbox, {**MAIL, "text": "\n".join(lines)}), Delivered)
    assert message_from_bytes(mailbox.contents[0], policy=default).get_content().splitlines() == lines
