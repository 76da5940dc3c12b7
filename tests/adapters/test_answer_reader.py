"""What the adapters take for an answer in HTTP/1.1, and after which answers a connection may be used again."""

import gc
import weakref
from dataclasses import dataclass
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchers.adapters.http_client.answer_reader import MAX_HEAD_BYTES, AnswerReader

OK = b"HTTP/1.1 200 OK\r\n"
MAX_BODY_BYTES = 10_000


@dataclass(frozen=True)
class Read:
    """status: None for no answer. whole: the body ended where it should."""

    status: int | None
    headers: dict[str, str]
    body: bytes
    whole: bool
    reusable: bool


def read(
    data: bytes, cuts: list[int] | None = None, *, closed: bool = False, asked: AnswerReader | None = None
) -> Read:
    """What is read in the pieces that `cuts` make."""
    reader = asked or AnswerReader(MAX_BODY_BYTES)
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts or []), len(data)]
    try:
        for start, end in pairwise(places):
            if start < end:
                reader.feed(data[start:end])
        if closed:
            reader.feed(b"")
    except httpx.RemoteProtocolError:
        return Read(None, {}, b"", False, False)
    return Read(reader.status, reader.headers, bytes(reader.body), reader.whole, reader.reusable)


def feed_in_pieces(reader: AnswerReader, data: bytes, pieces: int) -> None:
    size = len(data) // pieces
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])


# --- any bytes

names = st.from_regex(rb"\A[A-Za-z][A-Za-z0-9-]{0,8}\Z").filter(
    lambda name: name.lower() not in {b"connection", b"content-length", b"transfer-encoding"}
)
values = st.from_regex(rb"\A([\x21-\x7e\x80-\xff]([ \t\x21-\x7e\x80-\xff]{0,20}[\x21-\x7e\x80-\xff])?)?\Z")
fields = st.lists(st.tuples(names, values), max_size=4)


def lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """One answer, framed in any of the ways there are, after some that are only interim; then maybe more than was asked for."""
    interim = b"".join(
        b"HTTP/1.1 %d\r\n%b\r\n" % (status, lines(draw(fields)))
        for status in draw(st.lists(st.sampled_from([100, 103])))
    )
    head = draw(st.sampled_from([b"HTTP/1.1 ", b"HTTP/1.1 ", b"HTTP/1.0 "]))
    head += (
        draw(st.sampled_from([b"200 OK", b"201", b"204 No Content", b"304 ", b"422 \xffNo", b"500 Oh no"])) + b"\r\n"
    )
    head += lines(draw(fields)) + draw(
        st.sampled_from([b"", b"", b"Connection: close\r\n", b"Connection: a, Close\r\n"])
    )
    body: bytes = draw(st.binary(max_size=50))
    match draw(st.sampled_from(["length", "chunks", "close"])):
        case "length":
            head, framed = head + b"Content-Length: %d\r\n" % len(body), body
        case "chunks":
            head += b"Transfer-Encoding: chunked\r\n"
            sizes = draw(st.lists(st.integers(1, 20), max_size=5))
            framed, at = b"", 0
            for size in [*sizes, len(body)]:
                if part := body[at : at + size]:
                    extension = draw(st.sampled_from([b"", b";a=b", b"; q"]))
                    framed += b"%x%b\r\n%b\r\n" % (len(part), extension, part)
                at += size
            framed += b"0\r\n" + lines(draw(fields)) + b"\r\n"
        case _:
            framed = body
    return interim + head + b"\r\n" + framed + draw(st.sampled_from([b"", b"", b"X", b"\r\n", OK + b"\r\n"]))


cuts = st.lists(st.integers(0, 500), max_size=6)


@given(answers(), cuts, st.booleans(), st.data())
def test_any_bytes_are_read_alike_in_any_pieces(
    data: bytes, cuts: list[int], closed: bool, more: st.DataObject
) -> None:
    """Also after some byte was lost, added or changed; nothing is raised but that this is no answer."""
    place = more.draw(st.integers(0, len(data)))
    changed = data[:place] + more.draw(st.binary(max_size=3)) + data[place + more.draw(st.integers(0, 3)) :]

    assert read(changed, cuts, closed=closed) == read(changed, closed=closed)


# --- what ends a connection


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\n{}",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Trailer: t\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n",
    ],
)
def test_after_a_plain_answer_the_connection_is_used_again(answer: bytes) -> None:
    assert read(answer).reusable


@pytest.mark.parametrize("more", [b"X", b"\r\n", b"\n", b" ", OK + b"\r\n"])
@pytest.mark.parametrize(
    "framed", [b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
def test_after_more_than_the_answer_it_does_not(framed: bytes, more: bytes) -> None:
    got = read(OK + framed + more)

    assert (got.status, got.body, got.whole, got.reusable) == (200, b"{}", True, False)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}",
        OK + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}",
        OK + b"Connection: Upgrade\r\nConnection: x, Close\r\nContent-Length: 2\r\n\r\n{}",
        OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_where_the_server_may_see_another_end_it_does_not(answer: bytes) -> None:
    assert (read(answer).whole, read(answer).reusable) == (True, False)


def test_the_answer_to_a_head_request_has_no_body() -> None:
    assert read(OK + b"Content-Length: 2\r\n\r\n", asked=AnswerReader(MAX_BODY_BYTES, has_body=False)).reusable
    assert not read(OK + b"Content-Length: 2\r\n\r\n{}", asked=AnswerReader(MAX_BODY_BYTES, has_body=False)).reusable


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    assert read(OK + b"\r\n{}").whole is False
    assert read(OK + b"\r\n{}", closed=True) == Read(200, {}, b"{}", True, False)


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 3\r\n\r\n{}",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
    ],
)
def test_a_body_that_is_cut_short_is_not_whole(answer: bytes) -> None:
    assert read(answer, closed=True) == Read(200, read(answer).headers, b"{}", False, False)


# --- what is no answer


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/2 200 OK",
        b"HTTP/2.0 200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 099 OK",
        b"HTTP/1.1  200 OK",
        b"ICY 200 OK",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\nsp ace: x",
        b"HTTP/1.1 200 OK\r\n: x",
        b"HTTP/1.1 200 OK\r\n folded: first",
        b"HTTP/1.1 200 OK\r\nX: a\x00b",
        b"HTTP/1.1 200 OK\r\nX: a\rb",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0x10",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1",
        b"HTTP/1.1 200 OK\r\nX: first\r\n folded",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 1",
        b"HTTP/1.1 199 Soon\r\nTransfer-Encoding: chunked",
        b"RTSP/1.0 200 OK",
        b"ICE/1.0 200 OK",
        b"",
    ],
)
def test_what_is_no_head_is_no_answer(head: bytes) -> None:
    asked = AnswerReader(MAX_BODY_BYTES)

    with pytest.raises(httpx.RemoteProtocolError) as raised:
        asked.feed(head + b"\r\n\r\n")

    assert str(raised.value) == "no head of an answer in HTTP/1.1 came"  # nothing of it is quoted
    assert raised.value.__suppress_context__  # nor by the parser in a traceback


def test_a_connection_that_ends_before_the_head_does_is_no_answer() -> None:
    reader = AnswerReader(MAX_BODY_BYTES)
    reader.feed(b"HTTP/1.1 200 OK\r\nX: y\r\n")

    with pytest.raises(httpx.RemoteProtocolError):
        reader.feed(b"")


def test_a_broken_connection_leaves_nothing_for_the_garbage_collector() -> None:
    reader = AnswerReader(MAX_BODY_BYTES)
    left = weakref.ref(reader)
    with pytest.raises(httpx.RemoteProtocolError):
        reader.feed(b"")

    gc.disable()
    try:
        del reader
        assert left() is None
    finally:
        gc.enable()


# --- what is kept of it


def test_a_long_head_is_read() -> None:
    value = b"x" * (MAX_HEAD_BYTES - 100)
    asked = AnswerReader(MAX_BODY_BYTES)

    feed_in_pieces(asked, OK + b"Content-Length: 0\r\nX: " + value + b"\r\n\r\n", 200)

    assert (asked.headers["x"], asked.reusable) == (value.decode(), True)


@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 100 Continue\r\n\r\n"])
@pytest.mark.parametrize("pieces", [1, 200])
def test_a_head_without_end_is_no_answer(interim: bytes, pieces: int) -> None:
    reader = AnswerReader(MAX_BODY_BYTES)
    reader.feed(interim + OK + b"X: ")

    with pytest.raises(httpx.RemoteProtocolError):
        feed_in_pieces(reader, b"x" * (MAX_HEAD_BYTES + pieces), pieces)


@pytest.mark.parametrize(
    "start", [b"2\r\n{}\r\n", b"2\r\n{}\r\n2;", b"2\r\n{}\r\n0\r\nX: "], ids=["size", "extension", "trailers"]
)
def test_endless_data_between_chunks_ends_the_answer(start: bytes) -> None:
    reader = AnswerReader(MAX_BODY_BYTES)
    reader.feed(OK + b"Transfer-Encoding: chunked\r\n\r\n" + start)

    feed_in_pieces(reader, b"1" * (MAX_HEAD_BYTES + 200), 200)

    assert (reader.ended, reader.whole, bytes(reader.body)) == (True, False, b"{}")


@pytest.mark.parametrize("framing", [b"", b"Content-Length: 99999\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_of_a_long_body_only_so_much_is_kept(framing: bytes) -> None:
    reader = AnswerReader(3)
    reader.feed(OK + framing + b"\r\n" + (b"99\r\n" if b"chunked" in framing else b"") + b"x" * 50)

    assert (reader.ended, reader.whole, bytes(reader.body)) == (True, False, b"xxx")
