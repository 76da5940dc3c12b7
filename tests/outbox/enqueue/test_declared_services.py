"""An app that declares its services learns at the enqueue what they could never be sent."""

from typing import Any

import pytest
from sqlalchemy.orm import Session
from support.database import Database
from support.entries import put_one, queue_row, reasons, run_once, state, states

import outbox
from dispatchers.adapters.providers import resend, sendgrid

MAIL = {"to": "ada@example.com"}


@pytest.fixture
def declared() -> outbox.Outbox:
    ring = outbox.Keyring({"k1": bytes(range(32))}, current="k1")
    return outbox.Outbox(ring, env="test", services={"resend": resend, "mail": sendgrid})


@pytest.mark.parametrize(
    ("operation", "payload", "said"),
    [
        ("resend.emails.sent", MAIL, "did you mean 'emails.send'"),
        ("resend.charges.create", MAIL, "it has emails.send, emails.batch"),
        ("resend", MAIL, "must name an operation of the service: resend."),
        ("resend.emails.send", [MAIL], "must be an object, not a list"),
        ("resend.emails.batch", MAIL, "must be a list, not an object"),
        ("mail.mail.send", {"custom_args": {"outbox_key": "mine"}}, "must not set 'custom_args.outbox_key'"),
        ("mail.mail.send", {"custom_args": "text"}, "must have an object as 'custom_args'"),
    ],
)
def test_what_a_service_never_takes_is_refused_unwritten(
    database: Database, declared: outbox.Outbox, operation: str, payload: Any, said: str
) -> None:
    with database.begin() as session, pytest.raises(outbox.InvalidValue, match=said):
        declared.enqueue(session, operation, payload, parent="order:1")

    assert states(database) == {}


@pytest.mark.parametrize(
    ("operation", "payload"),
    [("resend.emails.send", MAIL), ("resend.emails.batch", (MAIL,)), ("mail.mail.send", MAIL), ("resender.x", MAIL)],
)
def test_what_a_service_takes_is_enqueued(declared: outbox.Outbox, operation: str, payload: Any) -> None:
    entry = declared.enqueue(Session(), operation, payload, parent="order:1")

    assert entry.id


def test_without_a_declaration_it_waits_with_the_nearest_name(database: Database, ob: outbox.Outbox) -> None:
    entry = put_one(database, ob, "resend.emails.sent", payload=MAIL)

    run_once(database, ob, adapters={"resend": resend(api_key="any")})

    assert state(database, entry) == "pending"
    assert "did you mean 'resend.emails.send'" in queue_row(database, entry).outcome


def test_without_a_declaration_a_wrong_payload_fails_unsent(database: Database, ob: outbox.Outbox) -> None:
    entry = put_one(database, ob, "sendgrid.mail.send", payload={"custom_args": {"outbox_key": "mine"}})

    run_once(database, ob, adapters={"sendgrid": sendgrid(api_key="any")})

    assert state(database, entry) == "failed"
    assert "must not set 'custom_args.outbox_key'" in str(reasons(database, entry))


@pytest.mark.parametrize(
    ("services", "said"),
    [
        ([resend], "must be a mapping"),
        ({"resend": "resend"}, "must have check"),
        ({"Re send": resend}, "lower-case words"),
    ],
)
def test_a_declaration_that_is_none_is_refused(services: Any, said: str) -> None:
    with pytest.raises((outbox.ConfigurationError, outbox.InvalidValue), match=said):
        outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test", services=services)
