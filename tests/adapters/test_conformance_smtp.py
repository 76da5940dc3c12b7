"""SmtpAdapter in the conformance suite: with a server that remembers keys, and with one that does not."""

import asyncio
import base64
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import aiosmtplib
import pytest
from support.fake_broker import NO_LISTENER, FakeBroker
from support.mail_servers import CLOSE, DRIP, HANG, RESET, Faulty, adapter_for

from dispatchers import Adapter, Deferred, Delivered, InProgress, KeyConflict, Rejected, Unknown
from dispatchers.testing.conformance import AdapterSuite, Scenario
from dispatchers.time_limits import Window

PASSWORD = "open-sesame-5eb63bbb"
LOGIN = base64.b64encode(f"\0shop\0{PASSWORD}".encode()).decode()


class MailFarSide(FakeBroker):
    """A mail server. A behaviour is what it does at which point; see `Faulty`."""

    def __init__(self) -> None:
        super().__init__()
        self._faulty = Faulty(extensions=("SIZE 1000000", "AUTH PLAIN"))
        self.requests = self._faulty.messages

    def behave(self, behaviour: Mapping[str, str]) -> None:
        super().behave(behaviour)
        self._faulty.at = {"AUTH": "235 2.7.0 welcome", **behaviour}

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._faulty.serve(reader, writer)


def at(**points: str) -> dict[str, str]:
    return points


class SmtpSuite(AdapterSuite):
    operation = "email.send"
    payload: Any = {"to": ["ada@example.com"], "subject": "Your invoice", "text": "Dear Ada\n.\n"}  # noqa: RUF012
    secrets = (PASSWORD, LOGIN)
    private = ("ada@example.com", "Your invoice")
    client_exceptions = (aiosmtplib.SMTPException, OSError)
    window: Window
    scenarios = (
        Scenario("taken", at(), Delivered),
        Scenario("taken, in odd words", at(dot="250 ada@example.com"), Delivered),
        Scenario("refused permanently", at(dot="554 5.7.1 no ada@example.com"), Rejected),
        Scenario("refused for now", at(dot="451 4.3.0 later, ada@example.com"), Deferred),
        Scenario("no such recipient", at(RCPT="550 5.1.1 ada@example.com"), Rejected, requests=0),
        Scenario("greylisted", at(RCPT="450 4.2.1 ada@example.com"), Deferred, requests=0),
        Scenario("sender refused", at(MAIL="550 5.7.1 not you"), Rejected, requests=0),
        Scenario("no recipient", at(), Rejected, payload={"subject": "Your invoice", "text": ""}, requests=0),
        Scenario("no object", at(), Rejected, payload=[], requests=0),
        Scenario("login refused", at(AUTH=f"535 5.7.8 AUTH PLAIN {LOGIN}"), Deferred, requests=0),
        Scenario("connection refused", {NO_LISTENER: ""}, Deferred, requests=0),
        Scenario("not greeted", at(greeting=CLOSE), Deferred, requests=0),
        Scenario("reset before the dot", at(DATA=RESET), Deferred, requests=0),
        Scenario("hangs before the dot", at(DATA=HANG), Deferred, requests=0, hangs=True),
        Scenario("drips before the dot", at(MAIL=DRIP), Deferred, requests=0, hangs=True),
        Scenario("closed after the dot", at(dot=CLOSE), Unknown),
        Scenario("reset after the dot", at(dot=RESET), Unknown),
        Scenario("no SMTP after the dot", at(dot="hello?"), Unknown),
        Scenario("hangs after the dot", at(dot=HANG), Unknown, hangs=True),
        Scenario("drips after the dot", at(dot=DRIP), Unknown, hangs=True),
    )
    never: Mapping[type[Any], str] = {
        KeyConflict: "SMTP has no word for it",
        InProgress: "SMTP has no word for it",
    }

    def remote(self) -> MailFarSide:
        return MailFarSide()

    def adapter(self, remote: MailFarSide, timeout: timedelta) -> Adapter:
        return adapter_for(remote.port, timeout=timeout, window=self.window, username="shop", password=PASSWORD)

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        async def fail(client: aiosmtplib.SMTP) -> None:
            raise error

        monkeypatch.setattr(aiosmtplib.SMTP, "connect", fail)
        return adapter_for(1)

    def exception(self, cls: type[Exception], text: str) -> Exception:
        """Those that hold a reply say what a server said, and that may be kept with the result."""
        if issubclass(cls, aiosmtplib.SMTPRecipientsRefused):
            return cls([aiosmtplib.SMTPRecipientRefused(550, "no", "ada@example.com")])
        if issubclass(cls, aiosmtplib.SMTPSenderRefused | aiosmtplib.SMTPRecipientRefused):
            return cls(550, "no", "ada@example.com")
        return cls(550, "no") if issubclass(cls, aiosmtplib.SMTPResponseException) else super().exception(cls, text)


class TestSmtpThatRemembersKeys(SmtpSuite):
    window = timedelta(hours=24)


class TestSmtp(SmtpSuite):
    window = None
