"""The bytes of a request: another implementation of HTTP reads in them what was given, or nothing was written."""

import h11
import httpx
from hypothesis import example, given
from hypothesis import strategies as st

from dispatchers.adapters.http_client.request_writer import Outgoing, Target

TARGET = Target.of(httpx.URL("http://crm.test/x"))
Headers = list[tuple[str, str]]

words = st.text(st.sampled_from("aZ09-_/:;,\r\n\0\x7f \tü€"), max_size=6)
methods = st.sampled_from(["POST", "PUT", "DELETE", "PATCH"]) | words
headers = st.lists(st.tuples(st.sampled_from(["X-A", "Cookie"]) | words, words), max_size=3)


def read(data: bytes) -> tuple[str, str, Headers, bytes] | None:
    """The one request in `data`, or None if there is none, or more."""
    server = h11.Connection(h11.SERVER)
    server.receive_data(data)
    try:
        head, content = server.next_event(), b""
        while isinstance(event := server.next_event(), h11.Data):
            content += event.data
    except h11.RemoteProtocolError:
        return None
    if not isinstance(head, h11.Request) or type(event) is not h11.EndOfMessage or server.trailing_data[0]:
        return None
    fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers.raw_items()]
    return head.method.decode(), head.target.decode(), fields, content


@given(methods, words, headers, headers, st.binary(max_size=20))
@example("POST", "/x?a=1", [("X-A", "1"), ("Cookie", "a=b")], [("Proxy-Authorization", "Basic x")], b"{}")
@example("DELETE", "/x", [], [], b"")
@example("POST", "/x", [("X-A", "1\r\nX-B: 2")], [], b"")
@example("POST", "/x", [("X-A", "1\r\n\r\nPOST /y HTTP/1.1")], [], b"")
@example("POST", "/x", [("X-A\r\nX-B", "2")], [], b"")
@example("POST", "/x", [("X-A", "1\nX-B: 2"), ("X-C", "")], [], b"")
@example("POST", "/x", [("X-A:", "1")], [], b"{}")
@example("POST", "/x HTTP/1.1\r\nX-B:", [], [], b"{}")
@example("POST", "/x", [("X-A", " 1")], [("X-A", "1\t")], b"{}")
def test_what_is_written_is_one_request_of_what_was_given(
    method: str, target: str, headers: Headers, for_proxy: Headers, content: bytes
) -> None:
    try:
        data = Outgoing(method, TARGET, headers, content).written(target, for_proxy)
    except httpx.LocalProtocolError:
        return

    expected = [("Host", "crm.test"), *headers, *for_proxy, ("Accept-Encoding", "identity")]
    if content or method in {"POST", "PUT", "PATCH"}:
        expected.append(("Content-Length", str(len(content))))
    assert read(data) == (method, target, expected, content)


@given(st.from_regex(r"\A([\x21-\x7e\x80-\xff]([\t\x20-\x7e\x80-\xff]{0,9}[\x21-\x7e\x80-\xff])?)?\Z"))
def test_every_value_that_http_allows_is_written(value: str) -> None:
    assert read(Outgoing("POST", TARGET, [("X-A", value)]).written("/x", ())) is not None
