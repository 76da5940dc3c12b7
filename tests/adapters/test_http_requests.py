"""HttpAdapter: the request that a payload makes, and what no payload can do."""

import asyncio
import base64
import posixpath
import re
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_http_adapter import CONTACT, KEY, delivery

from dispatchers import Delivered, KeyFormat, Outcome, Rejected
from dispatchers.adapters import HttpAdapter

UNRESERVED = "-._~!$&'()*+,;=:@[]"  # and letters, digits: RFC 3986 leaves them as they are
UNUSED = ssl.create_default_context()  # its making takes longer than a test


class Far:
    """A service that takes everything, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(204)

    def send(self, *deliveries: Any, **settings: Any) -> Outcome:
        """The outcome of the last of them."""
        given = {"base_url": "https://crm.test/v2", "transport": httpx.MockTransport(self), "tls": UNUSED}
        crm = HttpAdapter(**{**given, **settings})

        async def each() -> list[Outcome]:
            return [await crm.send(each) for each in deliveries]

        return asyncio.run(each())[-1]


@pytest.fixture
def far() -> Far:
    return Far()


# --- the request


def test_json_goes_to_a_path_below_the_base_under_the_child_key(far: Far) -> None:
    far.send(delivery())

    (request,) = far.requests
    assert (request.method, str(request.url)) == ("POST", "https://crm.test/v2/contacts")
    assert request.content == b'{"email":"ada@example.com"}'
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["Idempotency-Key"] == KEY


def test_every_attempt_makes_the_same_bytes() -> None:
    attempts = []
    for attempt in (1, 2):
        far = Far()
        payload = {
            "url": "/x",
            "json": {"z": [1.10, True, None, "é\n"], "a": 10**30},
            "headers": {"X-B": "1", "X-A": "2"},
        }
        far.send(delivery(payload, attempt=attempt, headers={"traceparent": "00-1-2-01"}))
        (request,) = far.requests
        attempts.append((request.method, request.url.raw_path, request.headers.raw, request.content))

    assert attempts[0] == attempts[1]


def test_json_is_written_as_it_was_enqueued(far: Far) -> None:
    far.send(delivery({"json": {"z": "é\u2028", "a": [1.5, 10**30, None]}}))

    assert far.requests[0].content == '{"z":"é\u2028","a":[1.5,1000000000000000000000000000000,null]}'.encode()


@pytest.mark.parametrize(
    ("payload", "content", "content_type"),
    [
        ({"json": None}, b"null", "application/json"),
        ({"json": [], "content_type": "application/json-patch+json"}, b"[]", "application/json-patch+json"),
        ({"text": "<né/>", "content_type": "application/xml"}, "<né/>".encode(), "application/xml"),
        ({"text": ""}, b"", "text/plain; charset=utf-8"),
        ({"base64": base64.b64encode(b"\x00\xff").decode()}, b"\x00\xff", "application/octet-stream"),
        ({"base64": base64.encodebytes(b"\xff" * 100).decode()}, b"\xff" * 100, "application/octet-stream"),
        ({"base64": "AAEC\r\n\tAwQF \r\n"}, bytes(range(6)), "application/octet-stream"),
        ({}, b"", None),
    ],
)
def test_a_body_comes_as_json_text_base64_or_not_at_all(
    far: Far, payload: dict[str, Any], content: bytes, content_type: str | None
) -> None:
    far.send(delivery(payload))

    (request,) = far.requests
    assert (request.content, request.headers.get("Content-Type")) == (content, content_type)
    assert request.headers["Content-Length"] == str(len(content))


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_every_method_that_writes_carries_the_key(far: Far, method: str) -> None:
    far.send(delivery({**CONTACT, "method": method}))

    (request,) = far.requests
    assert (request.method, request.headers["Idempotency-Key"]) == (method, KEY)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        (None, "/v2"),
        ("", "/v2"),
        ("/", "/v2/"),
        ("/a//b", "/v2/a//b"),
        ("//evil.test/x", "/v2//evil.test/x"),
        ("/@evil.test", "/v2/@evil.test"),
        ("?a=1&b=%20c", "/v2?a=1&b=%20c"),
        ("/a%2Fb/%c3%A9?next=../x", "/v2/a%2Fb/%c3%A9?next=../x"),
        ("/a?next=/../x", "/v2/a?next=/../x"),
        (f"/{UNRESERVED}?{UNRESERVED}/?", f"/v2/{UNRESERVED}?{UNRESERVED}/?"),
    ],
)
def test_a_url_goes_out_as_it_is_written_and_never_elsewhere(far: Far, url: str | None, target: str) -> None:
    far.send(delivery({"json": 1} if url is None else {"json": 1, "url": url}))

    (request,) = far.requests
    assert request.url.raw_path == target.encode()
    assert request.headers["Host"] == "crm.test"


def test_a_slash_at_the_base_s_end_changes_nothing(far: Far) -> None:
    far.send(delivery(), base_url="https://crm.test/v2/")

    assert far.requests[0].url.raw_path == b"/v2/contacts"


def test_an_absolute_url_goes_to_an_origin_that_is_listed(far: Far) -> None:
    origins = ["https://A.test", "http://127.0.0.1:8000", "https://b.test:443/"]

    for url in ("https://a.test/x", "http://127.0.0.1:8000/y?z", "https://b.test", "HTTPS://B.test:443/"):
        assert far.send(delivery({"url": url}), base_url=None, origins=origins) == Delivered({"status": 204})

    assert [request.url.host for request in far.requests] == ["a.test", "127.0.0.1", "b.test", "b.test"]


def test_headers_yield_to_each_other_in_order(far: Far) -> None:
    trace = {"traceparent": "00-1-2-01", "X-Own": "trace", "Authorization": "trace", "bad name": "x", "x-bad": "\n"}

    far.send(
        delivery({"headers": {"x-own": "payload", "User-Agent": "mine"}}, headers=trace),
        headers={"Authorization": "Bearer adapter"},
    )

    sent = far.requests[0].headers
    assert sent["traceparent"] == "00-1-2-01"
    assert sent.get_list("X-Own") == ["payload"]
    assert sent.get_list("Authorization") == ["Bearer adapter"]
    assert sent["User-Agent"] == "mine"
    assert not {"bad name", "x-bad"} & set(sent)


def test_the_key_goes_into_the_header_and_form_that_the_service_takes(far: Far) -> None:
    crm = {"key_header": "X-Request-Id", "key_format": KeyFormat(encoding="uuid")}

    far.send(delivery(key="a-uuid"), **crm)

    sent = far.requests[0].headers
    assert sent["X-Request-Id"] == "a-uuid"
    assert "Idempotency-Key" not in sent


def test_a_service_without_keys_gets_none(far: Far) -> None:
    far.send(delivery(), key_header=None)

    assert KEY not in str(far.requests[0].headers.raw)


# --- what no payload can do

LEADS = "payload field 'url' must lead to https://crm.test"
DOTS = "payload field 'url' must not contain '.' or '..' between its slashes"
ENCODED = "payload field 'url' must be text, percent-encoded, without a fragment"
BELOW = "payload field 'url' must be a path below the adapter's base_url, such as '/contacts/7'"
KNOWN = "an HTTP payload has the fields method, url, headers, json, text, base64, content_type; unknown:"
TYPE = "payload field 'content_type' must be printable ASCII, and needs a body"
METHOD = "payload field 'method' must be one of POST, PUT, PATCH, DELETE: an outbox is for effects"
NO_OBJECT = "an HTTP payload must be an object such as {'url': '/contacts', 'json': {...}}"
NAME = "payload field 'headers': a header's name must consist of letters, digits and -, without spaces"


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (None, NO_OBJECT),
        ([], NO_OBJECT),
        ("text", NO_OBJECT),
        ({"jsn": {}, "body": 1}, f"{KNOWN} body, jsn"),
        ({"ada@example.com": 1}, f"{KNOWN} (not shown)"),
        ({"method": "GET"}, METHOD),
        ({"method": "post"}, METHOD),
        ({"method": ["POST"]}, METHOD),
        ({"url": 7}, ENCODED),
        ({"url": "/a b"}, ENCODED),
        ({"url": "/é"}, ENCODED),
        ({"url": "/a\r\nX: y"}, ENCODED),
        ({"url": "/a%2"}, ENCODED),
        ({"url": "/a#b"}, ENCODED),
        ({"url": "/a\\..\\b"}, ENCODED),
        ({"url": "contacts"}, BELOW),
        ({"url": "@evil.test"}, BELOW),
        ({"url": ".evil.test"}, BELOW),
        ({"url": "https://evil.test/"}, BELOW),
        ({"url": "/../admin"}, DOTS),
        ({"url": "/a/%2E%2e/%2e./b"}, DOTS),
        ({"url": "/..;/admin"}, DOTS),
        ({"url": "/%252e%252e/x"}, DOTS),
        ({"url": "/a/..%3Bv=1%2Fb"}, DOTS),
        ({"url": "/%c0%ae%c0%ae/x"}, DOTS),
        ({"url": "/%25252525252525/x"}, DOTS),
        ({"url": "/a%2F..%2Fb"}, DOTS),
        ({"url": "/a/..%5Cb"}, DOTS),
        ({"url": "/" + "x" * 70_000}, "payload field 'url' is not a URL"),
        ({"headers": []}, "payload field 'headers' must be an object of names and texts"),
        ({"headers": {"a b": "x"}}, NAME),
        ({"headers": {"X-A\r\nX-B": "x"}}, NAME),
        (
            {"headers": {"X-A": "x\r\nX-B: y"}},
            "payload field 'headers': the value of 'X-A' must be printable ASCII, and",
        ),
        (
            {"headers": {"X-A": 7}},
            "payload field 'headers': the value of 'X-A' must be printable ASCII, and must not",
        ),
        ({"json": 1, "text": "x"}, "payload fields 'json' and 'text' exclude each other: a request has one body"),
        ({"json": "\ud800"}, "payload field 'json' must be JSON that UTF-8 can encode"),
        ({"json": float("inf")}, "payload field 'json' must be JSON that UTF-8 can encode"),
        ({"text": "\ud800"}, "payload field 'text' must be text that UTF-8 can encode"),
        ({"text": {}}, "payload field 'text' must be text that UTF-8 can encode"),
        (
            {"base64": "a-_="},
            "payload field 'base64' must be text in the standard base64 alphabet, with padding, perhaps in lines",
        ),
        (
            {"base64": "Y!W!I!="},
            "payload field 'base64' must be text in the standard base64 alphabet, with padding, perhaps in lines",
        ),
        (
            {"base64": 7},
            "payload field 'base64' must be text in the standard base64 alphabet, with padding, perhaps in lines",
        ),
        ({"content_type": "text/plain"}, TYPE),
        ({"text": "x", "content_type": None}, TYPE),
        ({"text": "x", "content_type": "text/plain\n"}, TYPE),
    ],
)
def test_a_payload_that_makes_no_request_is_rejected_by_field_before_it(far: Far, payload: Any, reason: str) -> None:
    outcome = far.send(delivery(payload))

    assert isinstance(outcome, Rejected)
    assert outcome.reason.startswith(reason)
    assert not far.requests


@pytest.mark.parametrize("body", [b'{"json":' + b"[" * 100_000, b"{", b"\xff"])
def test_a_payload_that_cannot_be_read_is_rejected_before_anything_is_sent(far: Far, body: bytes) -> None:
    outcome = far.send(delivery()._replace(payload_json=body))

    assert outcome == Rejected("the payload cannot be read as JSON")
    assert not far.requests


@pytest.mark.parametrize(
    "name",
    [
        *("Host", "AUTHORIZATION", "Proxy-Authorization", "Cookie", "idempotency-key", "X-Api-Key", "Content-Type"),
        *("Content-Length", "Transfer-Encoding", "Connection", "Expect", "TE", "Upgrade", "Accept-Encoding"),
    ],
)
def test_a_payload_cannot_set_what_is_the_adapter_s(far: Far, name: str) -> None:
    outcome = far.send(delivery({"headers": {name: "x"}}), headers={"x-api-key": "secret"})

    assert outcome == Rejected(f"payload field 'headers' must not set {name!r}: only the adapter sets this header")
    assert not far.requests


@pytest.mark.parametrize(
    "url",
    [
        "https://evil.test/",
        "http://crm.test/",
        "https://crm.test:8443/",
        "https://crm.test.evil.test/",
        "https://crm.test@evil.test/",
        "https://user:password@crm.test/",
        "https:crm.test/",
        "//crm.test/",
        "/contacts",
        "",
    ],
)
def test_a_row_cannot_send_credentials_elsewhere(far: Far, url: str) -> None:
    outcome = far.send(delivery({"url": url}), base_url=None, origins=["https://crm.test"])

    assert outcome == Rejected(LEADS)
    assert not far.requests


def as_servers_read(path: str) -> Iterator[str]:
    """How servers resolve a path: decoded never, once or more often, with or without what follows a semicolon."""
    for decodings in range(5):
        for drops in (r"", r";[^/]*"):
            decoded = path
            for _ in range(decodings):
                decoded = unquote(decoded)
            for slashes in (decoded, decoded.replace("\\", "/")):
                yield posixpath.normpath(re.sub(drops, "", slashes) if drops else slashes)


dots = st.sampled_from([".", "%2e", "%2E", "%252e"])
rests = st.sampled_from(["", "", ";", ";a=1", "%3B", "%253b", "a"])
segments = st.builds(lambda two, rest: "".join(two) + rest, st.lists(dots, max_size=2), rests)
slashes = st.sampled_from(["/", "/", "%2f", "%252F", "%5c"])


@given(st.lists(st.tuples(slashes, segments), max_size=3))
def test_no_server_reads_a_path_as_one_above_the_base(parts: list[tuple[str, str]]) -> None:
    far = Far()
    far.send(delivery({"json": 1, "url": "/" + "".join(slash + segment for slash, segment in parts)}))

    for request in far.requests:
        for read in as_servers_read(request.url.raw_path.decode()):
            assert read == "/v2" or read.startswith("/v2/"), read


@given(st.text(alphabet="/.:@?#%\\[]2eEfF5cvilh", max_size=20))
def test_no_url_leaves_the_base(url: str) -> None:
    far = Far()

    far.send(delivery({"url": url}))

    for request in far.requests:
        assert (request.url.scheme, request.headers["Host"]) == ("https", "crm.test")
        assert request.url.raw_path.startswith((b"/v2/", b"/v2?")) or request.url.raw_path == b"/v2"


def test_options_are_refused(far: Far) -> None:
    outcome = far.send(delivery(options={"account": "a"}))

    assert outcome == Rejected("an HTTP entry takes no options: put everything that the request needs into its payload")
    assert not far.requests
