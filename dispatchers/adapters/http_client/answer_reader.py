"""Reads one HTTP/1.1 answer with httptools, and returns whether the connection may be used again. No I/O.

A connection is used again only after an answer that ends exactly where its framing says. In any doubt it is closed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

MAX_HEAD_BYTES: Final = 100 * 1024  # limit of the bytes before the body, and of the framing between two parts of it
SHORT_KEEP_ALIVE: Final = re.compile(r'\btimeout\s*=\s*"?0*[01]?(?!\d)', re.I)
"""A server that closes idle connections sooner than `pool.KEEP_SECONDS`. Source: RFC 2068, 19.7.1.1."""
BEGINNING: Final = b"HTTP/"  # the parser also accepts answers of other protocols


class AnswerHeaders(Mapping[str, str]):
    """Found by their names in any case. Values of one name are joined: RFC 9110, 5.3."""

    __slots__ = ("_by_name",)

    def __init__(self, by_name: Mapping[str, str]) -> None:
        """by_name: the names in lower case."""
        self._by_name = by_name

    def __getitem__(self, name: str) -> str:
        return self._by_name[name.lower()]

    def get(self, name: str, default: Any = None) -> Any:
        """Not the inherited one, which raises and catches an exception for each header that is missing."""
        return self._by_name.get(name.lower(), default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


class AnswerReader:
    """Takes an answer in pieces, as they come.

    max_body_bytes: how much of the body is kept. has_body: False for the answer to HEAD or CONNECT, which has no body.

    status, headers: of the answer, with the headers' names in lower case; status is None until the head is complete. 1xx
    answers are skipped. body: the bytes so far. ended: no more bytes are needed. whole: the body ended where it should.
    has_left_overs: the server sent more than the answer, or closed. is_followed: it sent more. came_early: set by the connection
    if the answer's first bytes came before the server had received the whole request.
    """

    def __init__(self, max_body_bytes: int, *, has_body: bool = True) -> None:
        self._max_body_bytes = max_body_bytes
        self._has_body = has_body
        self._beginning = b""
        self._room = MAX_HEAD_BYTES
        self.keeps_alive = False
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.ended = False
        self.whole = False
        self.has_left_overs = False
        self.is_followed = False
        self.came_early = False
        self.on_body = self.body.extend if has_body else None  # called by the parser, as are the methods below
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_chunked_length=True,  # use the chunks, and close the connection afterwards: RFC 9112, 6.3
            lenient_optional_cr_before_lf=True,  # RFC 9112, 2.2
            lenient_spaces_after_chunk_size=True,
        )

    @property
    def reusable(self) -> bool:
        """Whether the answer was whole, nothing followed it, and the server keeps the connection for long enough.

        With two framings, or an unknown one, servers and proxies may disagree about the end of the answer.
        """
        return (
            self.whole
            and self.keeps_alive
            and not self.has_left_overs
            and not SHORT_KEEP_ALIVE.search(self.headers.get("keep-alive", ""))
            and (
                "transfer-encoding" not in self.headers
                or (self.headers["transfer-encoding"].lower() == "chunked" and "content-length" not in self.headers)
            )
        )

    def feed(self, data: bytes) -> None:
        """Read these bytes; no bytes mean that the server has closed the connection.

        Raises `httpx.RemoteProtocolError` if there is no head of an answer; its text shows none of the bytes. After a broken
        body the answer has ended, but is not whole.
        """
        try:
            if data:
                self._parse(memoryview(data))
            else:
                self._close()
        except (HttpParserError, HttpParserUpgrade):
            if self.status is None:
                self._parser = None  # it refers to this reader
                raise httpx.RemoteProtocolError("no head of an answer in HTTP/1.1 came") from None
            self.is_followed = self.is_followed or self.ended
            self.has_left_overs = self.ended = True
        if self.ended:
            self._parser = None

    def _parse(self, data: memoryview) -> None:
        if self.status is None:
            self._expect_http(data)
            if len(data) > self._room:
                self._take(data[: self._room])
                if self.status is None:
                    raise HttpParserError("the head is too long")
                data = data[self._room :]
        kept = len(self.body)
        # The answer ends with the last byte, or more bytes than the answer have arrived.
        self._take(data[:-1])
        self._take(data[-1:])
        self._room = self._room - len(data) if len(self.body) == kept else MAX_HEAD_BYTES
        if len(self.body) > self._max_body_bytes or (self._room < 0 and not self.ended):
            del self.body[self._max_body_bytes :]
            self.ended, self.whole = True, False

    def _expect_http(self, data: memoryview) -> None:
        missing = len(BEGINNING) - len(self._beginning)
        if missing:
            self._beginning += data[:missing]
            if not BEGINNING.startswith(self._beginning):
                raise HttpParserError("not HTTP")

    def _take(self, data: memoryview) -> None:
        if self.ended or self._parser is None:
            self.is_followed = self.is_followed or len(data) > 0
            self.has_left_overs = self.has_left_overs or len(data) > 0
        else:
            self._parser.feed_data(data)

    def _close(self) -> None:
        self.has_left_overs = True
        if self.status is None:
            raise HttpParserError("closed before an answer")
        if not self.ended:
            self.ended = True
            self.whole = not {"content-length", "transfer-encoding"} & self.headers.keys()

    # --- what the parser calls

    def on_message_begin(self) -> None:
        if self.ended:
            raise HttpParserError("another answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status is None:
            key, text = name.decode("ascii").lower(), _decoded(value)
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        if self._parser is None:
            raise HttpParserError("another answer")
        version, status = self._parser.get_http_version(), self._parser.get_status_code()
        if version not in {"1.0", "1.1"} or status < 100 or status == 101:
            raise HttpParserError("another version or protocol")
        if status >= 200:
            self.status, self._room = status, MAX_HEAD_BYTES
            self.keeps_alive = version == "1.1" and self._parser.should_keep_alive()
            self._parser.set_dangerous_leniencies(
                lenient_optional_cr_before_lf=False
            )  # between chunks a bare LF is an attack
            self.ended = self.whole = not self._has_body
        elif "transfer-encoding" in self.headers or self.headers.get("content-length", "0") != "0":
            raise HttpParserError("an interim answer with a body")  # RFC 9110, 8.6
        else:
            self.headers.clear()

    def on_message_complete(self) -> None:
        if self.status is not None:
            self.ended = self.whole = True


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
