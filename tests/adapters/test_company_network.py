"""In a company's network: through its proxy, under its authority, and with a reason that says what to repair."""

import asyncio
import json
import re
import socket
import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest
import stripe
from support.docs_pages import ROOT
from support.loopback import answering, closed_port, listening, say, serving, tunnelling, whole_request
from support.mail_servers import adapter_for, tls_contexts
from support.mail_servers import send as send_mail
from support.stripe_sends import API_KEY, INTENT
from support.stripe_sends import delivery as payment
from support.transports import post

from dispatchers.adapters import (
    HttpAdapter,
    ImapSearch,
    NatsAdapter,
    RabbitMqAdapter,
    RestateAdapter,
    SmtpAdapter,
    StripeAdapter,
)
from dispatchers.adapters.causes import WORDS, Cause, nothing_sent, words_of
from dispatchers.adapters.http_client.proxies import Proxies
from dispatchers.adapters.http_client.request_writer import Origin
from dispatchers.adapters.http_client.transport import NEVER_SENT, Transport
from dispatchers.adapters.trust import for_http
from dispatchers.delivery import Deferred, Delivered, Outcome
from outbox.errors import ConfigurationError

SECOND = timedelta(seconds=1)
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def authority(directory: Path) -> str:
    """The file with the authority of `tls_contexts`."""
    return str(directory / "certificate.pem")


async def stripe_service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        key = (await whole_request(reader)).decode().partition("Idempotency-Key: ")[2].partition("\r\n")[0]
        await say(writer, 200, json.dumps(INTENT).encode(), f"Idempotency-Key: {key}")


# --- the proxy and the authority


@pytest.mark.parametrize("given", ["by settings", "by the environment"])
def test_stripe_is_reached_through_a_proxy_and_under_an_own_authority(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_tls, _ = tls_contexts(tmp_path, "DNS:api.stripe.com")
    asked: list[bytes] = []

    async def scenario() -> Outcome:
        async with serving(stripe_service, server_tls) as port, listening(tunnelling(port, asked)) as proxy:
            if given == "by settings":
                adapter = StripeAdapter(api_key=API_KEY, proxy=proxy, tls=authority(tmp_path))
            else:
                monkeypatch.setenv("HTTPS_PROXY", proxy)
                monkeypatch.setenv("SSL_CERT_FILE", authority(tmp_path))
                adapter = StripeAdapter(api_key=API_KEY)
            try:
                return await adapter.send(payment())
            finally:
                await adapter.aclose()

    assert isinstance(asyncio.run(scenario()), Delivered)
    assert asked[0].startswith(b"CONNECT api.stripe.com:443 HTTP/1.1\r\n")


@pytest.mark.usefixtures("without_rest")
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_tunnel_carries_requests_and_the_proxy_sees_none_of_them(tmp_path: Path, scheme: str) -> None:
    server_tls, client_tls = tls_contexts(tmp_path, "DNS:crm.test", "DNS:localhost")
    seen: list[bytes] = []
    asked: list[bytes] = []

    async def scenario() -> None:
        async with (
            serving(answering(seen=seen), server_tls) as port,
            serving(tunnelling(port, asked), server_tls if scheme == "https" else None) as proxy_port,
        ):
            proxy = f"{scheme}://localhost:{proxy_port}"
            transport = Transport(timeout=60 * SECOND, tls=client_tls, proxy=proxy.replace("//", "//ada:p%40ss@"))
            for _ in range(2):
                assert (await post(transport, "https://crm.test:8443", content=b"secret")).status == 200
            await transport.aclose()

    asyncio.run(scenario())

    assert len(seen) == 2
    assert b"Proxy-Authorization" not in b"".join(seen)
    credentials = b"YWRhOnBAc3M="  # of ada:p@ss
    assert asked == [
        b"CONNECT crm.test:8443 HTTP/1.1\r\nHost: crm.test:8443\r\nProxy-Authorization: Basic "
        + credentials
        + b"\r\n\r\n"
    ]


SERVICE = Origin("https", "crm.example.com", 443)


@pytest.mark.parametrize(
    ("environment", "origin", "proxy"),
    [
        ({}, SERVICE, None),
        ({"HTTPS_PROXY": "http://p:1"}, SERVICE, "http://p:1"),
        ({"https_proxy": "p:1"}, SERVICE, "http://p:1"),
        ({"ALL_PROXY": "https://p:1"}, SERVICE, "https://p:1"),
        ({"HTTP_PROXY": "http://p:1"}, SERVICE, None),
        ({"HTTP_PROXY": "http://p:1"}, Origin("http", "crm.example.com", 80), "http://p:1"),
        ({"all_proxy": "http://p:1"}, SERVICE, "http://p:1"),
        ({"HTTPS_PROXY": "  ", "ALL_PROXY": "http://p:1"}, SERVICE, "http://p:1"),
        ({"HTTPS_PROXY": "  "}, SERVICE, None),
        ({"ALL_PROXY": "http://p:1"}, Origin("http", "127.0.0.1", 80), None),
        ({"ALL_PROXY": "http://p:1"}, Origin("http", "localhost", 80), None),
        ({"ALL_PROXY": "http://p:1"}, Origin("https", "::1", 443), None),
        *[
            ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": exception}, origin, None if is_named else "http://p:1")
            for exception, origin, is_named in [
                ("*", SERVICE, True),
                ("crm.example.com", SERVICE, True),
                ("other, CRM.example.com", SERVICE, True),
                ("example.com", SERVICE, True),
                (".example.com", SERVICE, True),
                ("*.example.com", SERVICE, True),
                ("crm.example.com:443", SERVICE, True),
                ("crm.example.com:8443", SERVICE, False),
                ("m.example.com", SERVICE, False),
                ("10.0.0.0/8", Origin("https", "10.1.2.3", 443), True),
                ("10.0.0.0/8", Origin("https", "11.1.2.3", 443), False),
                ("fd00::/8", Origin("https", "fd00::1", 443), True),
                ("[fd00::1]:443", Origin("https", "fd00::1", 443), True),
                ("[fd00::1]:444", Origin("https", "fd00::1", 443), False),
                ("", SERVICE, False),
                (":::", SERVICE, False),
            ]
        ],
    ],
)
def test_the_environment_names_the_proxy_of_each_service(
    environment: dict[str, str], origin: Origin, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    found = Proxies(None).of(origin)

    assert (found and str(found.origin)) == proxy
    assert str(Proxies("http://given:2").of(origin).origin) == "http://given:2"  # type: ignore[union-attr]


@pytest.mark.parametrize("url", ["http://h:99999", "http://h:0", "socks5://h:1", "http://", "h:secret@x"])
def test_a_proxy_that_cannot_be_is_refused_and_not_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"^proxy must be a URL .* \(it is not shown\)$"):
        HttpAdapter(base_url="https://crm.test", proxy=url)
    if "://" in url:
        monkeypatch.setenv("HTTPS_PROXY", url)
        with pytest.raises(
            ConfigurationError, match=r"^the environment's HTTPS_PROXY (must be a URL|is a SOCKS proxy)"
        ):
            HttpAdapter(base_url="https://crm.test")


@pytest.mark.parametrize("variable", ["all_proxy", "ALL_PROXY", "https_proxy", "HTTPS_PROXY"])
@pytest.mark.parametrize("scheme", ["socks5", "socks5h", "SOCKS4"])
def test_a_socks_proxy_is_refused_for_the_services_that_it_concerns(
    variable: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, f"{scheme}://name:secret@proxy.test:1080")
    makers: list[Callable[[], Any]] = [
        lambda: HttpAdapter(base_url="https://crm.test"),
        lambda: HttpAdapter(origins=["https://localhost", "https://crm.test"]),
        lambda: StripeAdapter(api_key=API_KEY),
        lambda: RestateAdapter(url="https://restate.test", target="mail/{operation}"),
    ]

    for make in makers:
        with pytest.raises(ConfigurationError) as refused:
            make()
        said = str(refused.value)
        assert said.startswith(
            f"the environment's {variable} is a SOCKS proxy, which the adapters cannot use. https://"
        )
        assert "give the adapter proxy='http://HOST:PORT', set https_proxy" in said
        assert "NO_PROXY=" in said
        assert "secret" not in said


@pytest.mark.parametrize(
    "environment",
    [
        {"all_proxy": "socks5://p:1", "NO_PROXY": "crm.test"},
        {"all_proxy": "socks5://p:1", "HTTPS_PROXY": "http://p:1"},
        {"HTTP_PROXY": "socks5://p:1"},
        {"HTTPS_PROXY": "  "},
        {"HTTPS_PROXY": " http://p:1\n"},
        {"all_proxy": "", "ALL_PROXY": "socks5://p:1"},
    ],
    ids=str,
)
def test_a_proxy_that_concerns_no_service_or_is_blank_is_left_alone(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    HttpAdapter(base_url="https://crm.test")


def test_a_socks_proxy_concerns_neither_this_machine_nor_a_given_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://p:1")

    HttpAdapter(base_url="http://127.0.0.1:8080")
    HttpAdapter(base_url="https://crm.test", proxy="http://p:1")
    HttpAdapter(base_url="https://crm.test", transport=httpx.MockTransport(lambda request: httpx.Response(200)))


def test_a_service_that_was_not_named_at_the_start_is_not_sent_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://p:1")
    transport = Transport(timeout=SECOND)

    with pytest.raises(httpx.ProxyError, match=Cause.NO_USABLE_PROXY):
        asyncio.run(transport.send(httpx.Request("POST", "https://files.test")))


def test_a_proxy_for_the_sdk_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripe, "proxy", "http://p:1")

    with pytest.raises(ConfigurationError, match=r"give StripeAdapter\(proxy="):
        StripeAdapter(api_key=API_KEY)


MAKERS: list[Callable[..., Any]] = [
    lambda **settings: StripeAdapter(api_key=API_KEY, **settings),
    lambda **settings: HttpAdapter(base_url="https://crm.test", **settings),
    lambda **settings: RestateAdapter(url="https://restate.test", **settings),
]


@pytest.mark.parametrize("make", MAKERS)
def test_every_http_adapter_takes_a_proxy_and_authorities(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls_contexts(tmp_path, "DNS:localhost")
    make(proxy="http://p:1", tls=authority(tmp_path), reuse=False)
    make(tls=tmp_path)
    with pytest.raises(ConfigurationError, match=r"tls='/nowhere\.pem' is no file or directory of CA certificates"):
        make(tls="/nowhere.pem")
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    with pytest.raises(ConfigurationError, match=r"the environment's SSL_CERT_FILE='/nowhere\.pem' is no file"):
        make()


OTHERS: list[Callable[..., Any]] = [
    lambda **settings: SmtpAdapter(host="mail.test", **settings),
    lambda **settings: ImapSearch(host="mail.test", username="shop", password="sesame", **settings),
    lambda **settings: RabbitMqAdapter(urls="amqps://mq.test", **settings),
    lambda **settings: NatsAdapter(urls="tls://nats.test", stream="ORDERS", **settings),
]


@pytest.mark.parametrize("make", OTHERS)
def test_adapters_of_other_protocols_take_authorities_in_the_same_form(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    _, client_tls = tls_contexts(tmp_path, "DNS:localhost")

    for authorities in (None, client_tls, authority(tmp_path), tmp_path):
        make(tls=authorities)
    with pytest.raises(ConfigurationError, match=r"tls='/nowhere\.pem' is no file or directory of CA certificates"):
        make(tls="/nowhere.pem")


def test_a_given_context_is_used_and_not_changed(tmp_path: Path) -> None:
    server_tls, client_tls = tls_contexts(tmp_path, "DNS:localhost")
    server_tls.set_alpn_protocols(["h2", "http/1.1"])
    chosen: list[str | None] = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chosen.append(writer.get_extra_info("ssl_object").selected_alpn_protocol())
        await answering()(reader, writer)

    async def scenario() -> None:
        async with serving(server, server_tls) as port:
            transport = Transport(timeout=60 * SECOND, tls=client_tls)
            assert (await post(transport, f"https://localhost:{port}")).status == 200
            client_tls.set_alpn_protocols(["h2"])  # another user of this context
            with pytest.raises(httpx.ConnectError, match=Cause.NO_HTTP_1):
                await post(Transport(timeout=60 * SECOND, tls=client_tls), f"https://localhost:{port}")
            made = for_http(authority(tmp_path))
            assert (await post(Transport(timeout=60 * SECOND, tls=made), f"https://localhost:{port}")).status == 200
            await transport.aclose()

    asyncio.run(scenario())

    assert [chosen[0], chosen[-1]] == [None, "http/1.1"]


# --- why nothing was sent


def reason(url: str, **settings: Any) -> str:
    async def scenario() -> str:
        transport = Transport(timeout=settings.pop("timeout", 60 * SECOND), **settings)
        try:
            await post(transport, url)
        except NEVER_SENT as error:
            return nothing_sent(error).removeprefix("nothing was sent: ")
        return "sent"

    return asyncio.run(scenario())


def test_a_connection_that_fails_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = closed_port()

    assert reason(closed) == "connect: refused"
    assert reason("https://crm.test", proxy=closed) == "proxy: connect: refused"
    assert reason("ftp://crm.test") == "url: neither http:// nor https://, or without a host"

    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(number, "secret.internal")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    number = socket.EAI_NONAME
    assert reason("https://crm.test") == "dns: host not found"
    number = socket.EAI_AGAIN
    assert reason("https://crm.test", proxy="http://proxy.test:1") == "proxy: dns: no answer from the name server"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n", "proxy: 407, it wants a login"),
        (b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n", "proxy: it opened no tunnel"),
        (b"", "proxy: it opened no tunnel"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://else.test\r\n\r\n", "proxy: it opened no tunnel"),
        (b"\x05\x00", "proxy: it opened no tunnel"),
        (b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "proxy: it opened no tunnel"),
    ],
)
def test_a_proxy_that_refuses_has_its_reason(answer: bytes, expected: str) -> None:
    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        writer.write(answer)

    async def scenario() -> str:
        async with listening(proxy) as url:
            return await asyncio.to_thread(reason, "https://crm.test", proxy=url)

    assert asyncio.run(scenario()) == expected


@pytest.mark.parametrize("kind", ["unknown authority", "host name does not match"])
def test_tls_that_fails_has_its_reason(kind: str, tmp_path: Path) -> None:
    names = "DNS:another.test" if kind.startswith("host") else "DNS:localhost"
    server_tls, client_tls = tls_contexts(tmp_path, names)

    async def scenario() -> tuple[str, Outcome]:
        settings = {} if kind == "unknown authority" else {"tls": client_tls}
        async with serving(answering(), server_tls) as port:
            mail = adapter_for(port, host="localhost", encryption="tls", tls=settings.get("tls"))
            return (
                await asyncio.to_thread(reason, f"https://localhost:{port}", **settings),
                await send_mail(mail),
            )

    assert asyncio.run(scenario()) == (f"tls: {kind}", Deferred(f"nothing was sent: tls: {kind} (connect)"))


@pytest.mark.parametrize(
    ("how", "expected"),
    [("close", "handshake failed"), ("in clear", "handshake failed"), ("hang", "handshake timed out")],
)
def test_a_server_without_tls_has_its_reason(how: str, expected: str) -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if how == "hang":
            await reader.read()
        elif how == "in clear":
            writer.write(b"not TLS")

    async def scenario() -> str:
        async with listening(server) as url:
            return await asyncio.to_thread(reason, url.replace("http:", "https:"), timeout=SECOND)

    assert asyncio.run(scenario()) == f"tls: {expected}"


@pytest.mark.parametrize(
    ("code", "expected"), [(10, "tls: certificate expired"), (9, "tls: certificate not yet valid")]
)
def test_a_certificate_out_of_its_time_has_its_reason(code: int, expected: str) -> None:
    error = ssl.SSLCertVerificationError("secret.internal")
    error.verify_code = code

    assert words_of(error) == expected


def test_no_exception_of_others_comes_into_a_reason() -> None:
    for cls in NEVER_SENT:
        assert words_of(cls("http://user:password@host")) in WORDS
    assert words_of(httpx.ConnectError("proxy: connect: refused!")) == "connect: failed"


def test_the_page_explains_each_reason() -> None:
    page = (ROOT / "docs" / "http.md").read_text()
    rows = re.findall(r"^\| `((?:dns|connect|tls|proxy|url): [^`]*)` \|", page, re.M)

    assert rows == list(Cause)


# --- test doubles, and those who only wrap


def test_one_who_wraps_httpx_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the instrumentation of OpenTelemetry does: a proxy and the authorities are used as before."""
    calls: list[str] = []

    def wrapped(cls: Any) -> Any:
        original = cls.handle_async_request

        async def traced(self: Any, request: Any) -> Any:
            calls.append(cls.__name__)
            return await original(self, request)

        return traced

    for cls in (httpx.AsyncHTTPTransport, httpcore.AsyncConnectionPool):
        monkeypatch.setattr(cls, "handle_async_request", wrapped(cls))

    assert reason("https://crm.test", proxy=closed_port()) == "proxy: connect: refused"
    assert calls == []


def test_stripe_takes_a_transport_in_tests() -> None:
    async def scenario() -> Outcome:
        answer = httpx.MockTransport(lambda request: httpx.Response(200, json=INTENT))
        return await StripeAdapter(api_key=API_KEY, transport=answer).send(payment())

    assert isinstance(asyncio.run(scenario()), Delivered)
