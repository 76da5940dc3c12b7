"""SmtpAdapter's TLS, STARTTLS and login: who does not prove who he is gets nothing."""

import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.mail_servers import HANG, MAIL, Faulty, Mailbox, against, handed_in, send, tls_contexts

from dispatchers.delivery import Deferred, Delivered


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's and the client's."""
    return tls_contexts(tmp_path_factory.mktemp("tls"), "DNS:localhost", "IP:127.0.0.1")


# --- encryption


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_starttls_comes_before_the_login_and_the_mail(contexts: Any, host: str) -> None:
    server, client = contexts
    mailbox = Mailbox()

    outcome = handed_in(
        mailbox,
        server={"tls_context": server, "require_starttls": True},
        **{"host": host, "encryption": "starttls", "tls": client, "username": "shop", "password": "right"},
    )

    assert isinstance(outcome, Delivered)
    assert mailbox.encrypted == [True]
    assert mailbox.logins == [(b"shop", b"right")]


def test_implicit_tls_encrypts_from_the_first_byte(contexts: Any) -> None:
    server, client = contexts
    mailbox = Mailbox()

    outcome = handed_in(mailbox, MAIL, MAIL, server={"implicit_tls": server}, encryption="tls", tls=client)

    assert isinstance(outcome, Delivered)
    assert len(mailbox.envelopes) == 2
    assert mailbox.connections == 1


def test_a_server_of_the_named_authority_is_trusted(tmp_path: Path) -> None:
    server, _ = tls_contexts(tmp_path, "IP:127.0.0.1")

    outcome = handed_in(Mailbox(), server={"implicit_tls": server}, encryption="tls", tls=tmp_path / "certificate.pem")

    assert isinstance(outcome, Delivered)


def test_a_large_mail_leaves_over_tls(contexts: Any) -> None:
    server, client = contexts
    mailbox = Mailbox()
    attachment = {"filename": "a.bin", "content_type": "application/pdf", "base64": "QUFB" * 1024 * 1024}

    outcome = handed_in(
        mailbox,
        {**MAIL, "attachments": [attachment]},
        server={"implicit_tls": server},
        encryption="tls",
        tls=client,
    )

    assert isinstance(outcome, Delivered)
    assert len(mailbox.contents[0]) > 4 * 1024 * 1024


def test_a_server_without_starttls_gets_nothing() -> None:
    faulty = Faulty()

    outcome = against(faulty, send, encryption="starttls", username="shop", password="right")

    assert outcome == Deferred("STARTTLS: the server does not offer it")
    assert faulty.commands == ["EHLO test"]


def test_a_server_that_takes_starttls_back_gets_nothing() -> None:
    faulty = Faulty(at={"STARTTLS": "454 4.7.0 not now"}, extensions=("STARTTLS",))

    outcome = against(faulty, send, encryption="starttls", username="shop", password="right")

    assert outcome == Deferred("STARTTLS: 454 4.7.0")
    assert faulty.commands == ["EHLO test", "STARTTLS"]


@pytest.mark.parametrize("at", ["220 go ahead", "220 go ahead\r\n250 injected", HANG])
def test_a_server_that_only_pretends_to_encrypt_gets_nothing(at: str) -> None:
    faulty = Faulty(at={"STARTTLS": at}, extensions=("STARTTLS",))

    outcome = against(faulty, send, encryption="starttls", timeout=timedelta(seconds=2))

    assert isinstance(outcome, Deferred)
    assert "STARTTLS" in outcome.reason
    assert faulty.messages == []


@pytest.mark.parametrize("tls", ["starttls", "tls"])
def test_a_certificate_that_does_not_hold_gets_nothing(contexts: Any, tls: str) -> None:
    server, _ = contexts
    mailbox = Mailbox()
    settings = {"implicit_tls": server} if tls == "tls" else {"tls_context": server}

    outcome = handed_in(mailbox, server=settings, encryption=tls, username="shop", password="right")

    phase = {"starttls": "STARTTLS", "tls": "connect"}[tls]
    assert outcome == Deferred(f"nothing was sent: tls: unknown authority ({phase})")
    assert mailbox.logins == []


# --- the login


def test_a_server_without_a_login_gets_nothing() -> None:
    faulty = Faulty()

    assert against(faulty, send, username="shop", password="right") == Deferred("AUTH: the server does not offer it")
