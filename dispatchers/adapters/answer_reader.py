"""Reads one HTTP/1.1 answer from the bytes of a connection, and returns whether the connection may be used again. No I/O.

Everything doubtful ends the connection: it is used again only after an answer that ends exactly where its framing says.
Source: RFC 9112.
"""

import re
from typing import Final

import httpx

HEAD_BYTES_MAX: Final = 100 * 1024  # of a head, of what is between two chunks, of the trailers
HEAD_END: Final = re.compile(rb"\n\r?\n")
LINE_END: Final = re.compile(rb"\r?\n")
STATUS_LINE: Final = re.compile(rb"HTTP/1\.([0-9]) ([1-9][0-9]{2})(?: .*)?")
FIELD_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
NEVER_IN_A_LINE: Final = re.compile(rb"[\x00\x0b\x0c]|\r(?!\n)")
LENGTH: Final = re.compile(rb"[0-9]{1,18}")
CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\x00\r\n]*)?")
WITHOUT_BODY: Final = frozenset({204, 304})
SWITCHING_PROTOCOLS: Final = 101
UNTIL_CLOSE: Final = -1


class Malformed(Exception):
    """What came is no answer in HTTP/1.1. The text shows nothing of it."""


class AnswerReader:
    """Takes an answer in pieces, as they come.

    status, headers: of the answer; status is None until its head is complete. 1xx answers before it are skipped.
    body: what came of it, at most `body_bytes_max`. ended: nothing more is wanted. whole: the body ended where it should.
    head_only: the answer ends with its head, as that to CONNECT does.
    reusable: the answer ended and was whole, nothing followed it, and the server keeps the connection.
    """

    __slots__ = (
        *("status", "headers", "body", "ended", "whole", "_body_bytes_max", "_head_only"),
        *("_buffer", "_searched", "_chunked", "_left", "_follows_chunk", "_keeps"),
    )

    def __init__(self, body_bytes_max: int, *, head_only: bool = False) -> None:
        self._head_only = head_only
        self._body_bytes_max = body_bytes_max
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.ended = False
        self.whole = False
        self._buffer = bytearray()
        self._searched = 0
        self._chunked = False
        self._left = 0  # of the body, or of the chunk; `UNTIL_CLOSE` for a body without a length
        self._follows_chunk = False
        self._keeps = False

    @property
    def reusable(self) -> bool:
        return self.whole and self._keeps and not self._buffer

    @property
    def has_left_overs(self) -> bool:
        """Whether more came than the answer."""
        return bool(self._buffer)

    def headers_for_httpx(self) -> httpx.Headers:
        is_ascii = all(name.isascii() and value.isascii() for name, value in self.headers)
        return httpx.Headers(self.headers, encoding="ascii" if is_ascii else None)  # it takes long to find that out

    def feed(self, data: bytes) -> None:
        """Take what came. Raises `Malformed` for a head that is none; a body that is none ends, and is not whole."""
        self._buffer += data
        if self.status is None:
            self._read_head()
        if self.status is None or self.ended:
            return
        if self._chunked:
            self._read_chunks()
        elif self._left == UNTIL_CLOSE:
            self._take(len(self._buffer))
        else:
            self._left -= self._take(self._left)
            if not self._left and not self.ended:
                self._end(whole=True)

    def feed_end(self) -> None:
        """Take that the server has closed. Raises `Malformed` if there is no head."""
        if self.status is None:
            raise Malformed("the connection was closed before an answer")
        self._keeps = False
        if not self.ended:
            self._end(whole=not self._chunked and self._left == UNTIL_CLOSE)

    def _end(self, *, whole: bool) -> None:
        self.ended = True
        self.whole = whole

    # --- the head

    def _read_head(self) -> None:
        while self.status is None:
            end = HEAD_END.search(self._buffer, max(0, self._searched - 2))
            if (len(self._buffer) if end is None else end.end()) > HEAD_BYTES_MAX:
                raise Malformed("the head of the answer is too large")
            if end is None:
                self._searched = len(self._buffer)
                return
            head = bytes(self._buffer[: end.end()])
            del self._buffer[: end.end()]
            self._searched = 0
            self._take_head(head)

    def _take_head(self, head: bytes) -> None:
        if NEVER_IN_A_LINE.search(head):
            raise Malformed("the head of the answer has bytes that no line has")
        first, *lines, _, _ = LINE_END.split(head)
        start = STATUS_LINE.fullmatch(first)
        if start is None:
            raise Malformed("the answer has no status line of HTTP/1.1")
        status, self.headers = int(start[2]), _fields(lines)
        if status == SWITCHING_PROTOCOLS:
            raise Malformed("the answer switches to a protocol that was not asked for")
        if status < 200:
            return  # an interim answer
        self._frame(status, keeps_by_default=start[1] != b"0")
        self.status = status

    def _frame(self, status: int, *, keeps_by_default: bool) -> None:
        """How long the body is, and whether the connection continues after it."""
        lengths: set[bytes] = set()
        codings: list[bytes] = []
        connection = b""
        for name, value in self.headers:
            match name.lower():
                case b"content-length":
                    lengths.update(part.strip() for part in value.split(b","))
                case b"transfer-encoding":
                    codings += [part.strip().lower() for part in value.split(b",")]
                case b"connection":
                    connection += value.lower() + b","
        # After HTTP/1.0, and where two lengths are given, other servers and proxies may see other ends.
        options = {option.strip() for option in connection.split(b",")}
        self._keeps = keeps_by_default and b"close" not in options and not (codings and lengths)
        if codings not in ([], [b"chunked"]):
            raise Malformed("the answer has a transfer coding that was not asked for")
        if len(lengths) > 1 or not all(map(LENGTH.fullmatch, lengths)):
            raise Malformed("the answer has no length that can be understood")
        self._chunked = bool(codings)
        self._left = 0 if codings else int(lengths.pop()) if lengths else UNTIL_CLOSE
        if self._head_only or status in WITHOUT_BODY:
            self._end(whole=True)

    # --- the body

    def _take(self, wanted: int) -> int:
        """Move so many bytes of the body out of the buffer, or those that are there. Returns: how many."""
        part = self._buffer[:wanted]
        del self._buffer[:wanted]
        self.body += part
        if len(self.body) > self._body_bytes_max:
            del self.body[self._body_bytes_max :]
            self._end(whole=False)
        return len(part)

    def _read_chunks(self) -> None:
        while not self.ended:
            if self._left:
                self._left -= self._take(self._left)
                self._follows_chunk = True
                if self._left:
                    return
            elif not self._read_chunk_line():
                return

    def _read_chunk_line(self) -> bool:
        """Whether the size of another chunk was read."""
        start = 2 if self._follows_chunk else 0
        if len(self._buffer) < start:
            return False
        end = self._buffer.find(b"\r\n", start)
        if self._buffer[:start] != b"\r\n"[:start] or (end < 0 and len(self._buffer) > HEAD_BYTES_MAX):
            self._end(whole=False)
        if end < 0 or self.ended:
            return False
        line = CHUNK_LINE.fullmatch(self._buffer, start, end)
        if line is None:
            self._end(whole=False)
            return False
        size = int(line[1], 16)
        if not size:
            self._read_trailers(end)
            return False
        del self._buffer[: end + 2]
        self._left = size
        return True

    def _read_trailers(self, start: int) -> None:
        """Skip them: nothing of them counts. start: where the line of the last chunk ends."""
        end = self._buffer.find(b"\r\n\r\n", start)
        if end < 0:
            if len(self._buffer) - start > HEAD_BYTES_MAX:
                self._end(whole=False)
            return
        trailers = bytes(self._buffer[start + 2 : end])
        del self._buffer[: end + 4]
        try:
            _fields(trailers.split(b"\r\n") if trailers else [])
        except Malformed:
            self._end(whole=False)
        else:
            self._end(whole=True)


def _fields(lines: list[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers as names and values; a line that continues the one before is joined to it."""
    fields: list[tuple[bytes, bytes]] = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if line[:1] in {b" ", b"\t"} and fields:
            name, before = fields.pop()
            fields.append((name, before + b" " + line.strip(b" \t")))
        elif colon and FIELD_NAME.fullmatch(name):
            fields.append((name, value.strip(b" \t")))
        else:
            raise Malformed("the answer has a header that is none")
    return fields
