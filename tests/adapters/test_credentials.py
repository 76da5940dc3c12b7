"""What services quote of an adapter's credentials is not stored, however they write it; nor does any log show it."""

import asyncio
import base64
import html
import json
import logging
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote, quote_plus
from uuid import UUID

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.canaries import leaks
from support.cli_runner import succeeded
from support.daemons import daemon, wait_for, write_factory
from support.database import CHARGE, TABLES, Database
from support.entries import put_one, run_once, settlement_row
from support.mail_servers import Faulty, against, send

import outbox
from dispatchers import Absent, CannotTell, Delivery, Found, KeyConflict, Rejected, Unknown
from dispatchers.adapters import HttpAdapter, StripeAdapter
from dispatchers.adapters.credentials import HIDDEN, Credentials, credentials_of

TOKEN = "sk/live+abc=123&xyz"
BASIC = "ada:pass/word+1="
ENCODED = base64.b64encode(BASIC.encode()).decode()
HEADERS = {"Authorization": f"Bearer {TOKEN}", "X-Api-Key": f"Basic {ENCODED}", "Accept": "application/json"}
BASE_URL = "https://hooks.test/services/T0000AB1/abcdefghijklmnopqrst"

ENCODERS: dict[str, Callable[[str], str]] = {
    "PHP": lambda text: json.dumps(text).replace("/", "\\/"),
    "Gson": lambda text: "".join(
        f"\\u{ord(char):04x}" if char in "=&+<>'" else json.dumps(char)[1:-1] for char in text
    ),
    "JSON": json.dumps,
    "percent": lambda text: quote(text, safe=""),
    "form": quote_plus,
    "HTML": html.escape,
}
WHOLE: dict[str, Callable[[str], str]] = {
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64url": lambda text: base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
    "hex": lambda text: text.encode().hex(),
    "none": lambda text: text,
}

secrets = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=12, max_size=40)


@given(
    secrets,
    st.text(max_size=8),
    st.sampled_from(sorted(WHOLE)),
    st.lists(st.sampled_from(sorted(ENCODERS)), max_size=2),
)
def test_a_quoted_secret_is_found_in_every_encoding(secret: str, before: str, whole: str, by: list[str]) -> None:
    text = WHOLE[whole](before.replace("\\", "") + secret + before.replace("\\", ""))
    for name in by:
        text = ENCODERS[name](text)

    kept = Credentials([secret]).hidden({"error": {"seen": [text]}, "id": 7})

    assert kept == {"error": {"seen": [HIDDEN]}, "id": 7}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_what_quotes_nothing_is_kept_as_it_is(value: Any) -> None:
    assert Credentials([TOKEN]).hidden(value) is value


@given(secrets, st.sampled_from(sorted(ENCODERS)))
def test_a_secret_in_capitals_is_found(secret: str, by: str) -> None:
    text = ENCODERS[by](secret.upper())

    assert Credentials([secret]).hidden([text]) == [HIDDEN]


@pytest.mark.parametrize(
    ("path", "quoted", "is_hidden"),
    [
        ("/hooks/T00/B01/x7y8", "no such hook: /hooks/T00/B01/x7y8", True),
        ("/hooks/T00/B01/x7y8", "T00%2FB01%2Fx7y8", True),
        ("/hooks/T00/B01/x7y8", "HTTPS://HOOKS.TEST/HOOKS/T00/B01/X7Y8", True),
        ("/hooks/T00/B01/x7y8", "T00", False),
        ("/v2/contacts", "https://crm.test/v2/contacts/7", False),
        ("/oauth2/token", "https://crm.test/oauth2/token", False),
        ("/api/v1.0/contacts", "/api/v1.0/contacts", False),
    ],
)
def test_a_path_is_hidden_where_it_looks_secret(path: str, quoted: str, is_hidden: bool) -> None:
    assert credentials_of({}, [f"https://hooks.test{path}"]).hidden(quoted) == (HIDDEN if is_hidden else quoted)


def test_a_quoted_number_and_a_quoted_name_are_hidden() -> None:
    hidden = Credentials(["123456789012", "private_name"]).hidden({"private_name": 123456789012, "id": 123456789013})

    assert hidden == {HIDDEN: HIDDEN, "id": 123456789013}


@pytest.mark.parametrize(
    "quoted",
    [TOKEN, f"Bearer {TOKEN}", ENCODED, ENCODED.rstrip("="), BASIC, "pass/word+1=", "T0000AB1", "abcdefghijklmnopqrst"],
)
def test_what_counts_as_a_credential(quoted: str) -> None:
    assert credentials_of(HEADERS, [BASE_URL]).hidden(f"<{quoted}>") == HIDDEN


@pytest.mark.parametrize("usual", ["application/json", "services", "hooks.test", "Bearer", "/services/", "Basic"])
def test_what_is_no_credential_is_kept(usual: str) -> None:
    assert credentials_of(HEADERS, [BASE_URL]).hidden(usual) == usual


def test_an_outcome_and_a_finding_lose_what_they_quote_and_nothing_else() -> None:
    credentials = Credentials([TOKEN])
    message = f"key {TOKEN} is unknown"

    assert credentials.removed_from(Rejected(message, result=[message, 7])) == Rejected(HIDDEN, result=[HIDDEN, 7])
    assert credentials.removed_from(KeyConflict(message)) == KeyConflict(HIDDEN)
    assert credentials.removed_from(Unknown(message, final=True)) == Unknown(HIDDEN, final=True)
    assert credentials.removed_from(Found(message)) == Found(HIDDEN)
    assert credentials.removed_from(CannotTell(message)) == CannotTell(HIDDEN)
    assert credentials.removed_from(Absent()) == Absent()


# --- through the adapters


def quoting(request: httpx.Request) -> httpx.Response:
    """A service that says all that it was sent, in every encoding, in its body and its headers."""
    sent = "\n".join([str(request.url), *(f"{name}: {value}" for name, value in request.headers.items())])
    body = {name: encode(sent) for name, encode in (ENCODERS | WHOLE).items()}
    return httpx.Response(201, json=body, headers={"X-Echo": quote(sent), "Set-Cookie": "sid=1"})


def delivery() -> Delivery:
    return Delivery(UUID(int=1), "crm.upsert", b"{}", "ck1_key", 1, {}, {}, deadline=0.0)


@pytest.mark.parametrize("status", [200, 409])
def test_nothing_that_an_http_service_quotes_is_stored(
    postgresql: Database, ob: outbox.Outbox, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    private = (TOKEN, ENCODED, BASIC, "abcdefghijklmnopqrst")
    crm = HttpAdapter(
        base_url=BASE_URL,
        headers=HEADERS,
        statuses={201: lambda answer: Rejected(answer.body.decode(), result=answer.headers["X-Echo"])}
        if status == 409
        else None,
        transport=httpx.MockTransport(quoting),
    )
    id = put_one(postgresql, ob, "crm.upsert", payload={})

    run_once(postgresql, ob, adapters={"crm": crm})

    row = settlement_row(postgresql, id)
    assert row.state == ("delivered" if status == 200 else "failed")
    stored = repr([row, postgresql.rows(TABLES.event)])
    assert leaks(stored + caplog.text + repr(crm) + crm.pinned, *private) == []
    assert "(hidden: it quotes" in stored
    assert leaks(succeeded("show", str(id), database=postgresql), *private) == []


def test_a_finding_quotes_no_credentials() -> None:
    async def find(delivery: Delivery, get: Any) -> Found:
        return Found((await get("/x")).headers["X-Echo"])

    crm = HttpAdapter(base_url=BASE_URL, headers=HEADERS, find=find, transport=httpx.MockTransport(quoting))

    assert crm.find is not None
    assert asyncio.run(crm.find(delivery())) == Found(HIDDEN)


@pytest.mark.parametrize("status", [200, 400, 401, 402, 403, 409, 429, 500])
def test_stripe_stores_no_api_key(status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = "sk_test_canary_1234567890"
    said = {"message": f"Invalid API Key: {key}", "code": key, "type": key, "param": key, "payment_intent": key}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"id": key, "object": "x", "error": said}, headers={"Request-Id": key})

    send = delivery()._replace(operation=CHARGE, payload_json=b'{"amount": 1}')

    outcome = asyncio.run(StripeAdapter(api_key=key, transport=httpx.MockTransport(answer)).send(send))

    assert leaks(repr(outcome) + caplog.text, key) == []


@pytest.mark.parametrize("point", ["AUTH", "MAIL", "RCPT", "DATA", "dot", "dot 554"])
def test_a_mail_server_that_quotes_the_password_is_not_quoted(point: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    word = "correct-horse"
    said = base64.b64encode(f"\0ada\0{word}".encode()).decode() + " " + word
    point, _, code = point.partition(" ")
    at = {"AUTH": "235 welcome", "EHLO": "250-faulty\r\n250 AUTH PLAIN"}
    at |= {point: f"{code or ('250' if point == 'dot' else '550')} {said}"}

    outcome = against(Faulty(at), send, username="ada", password=word)

    assert not isinstance(outcome, Unknown)
    assert leaks(repr(outcome) + caplog.text, word) == []


# --- the process


FACTORY = """
def make():
    headers = {"Authorization": "Bearer " + os.environ["TOKEN"]}
    crm = HttpAdapter(base_url=os.environ["CRM"], headers=headers, window=FOREVER)
    return Dispatcher(url, outbox=ob, adapters={"crm": crm}, poll=timedelta(milliseconds=20))
"""


class Quoting(BaseHTTPRequestHandler):
    """Sets cookies, and says in its headers how it was asked."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.send_header("Set-Cookie", "sid=cookie-canary-1234")
        self.send_header("X-Echo", self.headers["Authorization"])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


def test_the_log_of_a_process_at_debug_shows_no_header(postgresql: Database, ob: outbox.Outbox, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Quoting)
    Thread(target=server.serve_forever, daemon=True).start()
    write_factory(tmp_path, FACTORY)
    id = put_one(postgresql, ob, "crm.upsert", payload={"url": "/x", "json": {"card": "payload-canary"}})
    environment = {"TOKEN": "token-canary-1234", "CRM": f"http://127.0.0.1:{server.server_port}/path-canary-1234"}

    with daemon(tmp_path, postgresql.url, "factory:make", "--log-level", "debug", **environment) as process:
        wait_for(lambda: settlement_row(postgresql, id), "the entry's end", workers=[process])
        process.terminate()
        process.wait()
    server.shutdown()
    server.server_close()

    assert "DEBUG" in process.output
    assert "canary" not in process.output


def test_an_app_that_logs_at_debug_shows_no_header_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    """Its own requests over httpx, it does."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Quoting)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    crm = HttpAdapter(base_url=url, headers={"Authorization": "Bearer token-canary-1234"})

    async def send_twice() -> None:
        for _ in range(2):
            await crm.send(delivery()._replace(payload_json=b'{"json": {}}'))
        await crm.aclose()

    caplog.set_level(logging.DEBUG)
    asyncio.run(send_twice())
    ours = caplog.text
    httpx.post(url, headers={"Authorization": "its own"}, content=b"{}")
    server.shutdown()
    server.server_close()

    assert "canary" not in ours
    assert "its own" in caplog.text
