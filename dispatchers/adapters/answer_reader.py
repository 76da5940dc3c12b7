"""Reads one HTTP/1.1 answer with h11, and returns whether the connection may be used again. No I/O.

Everything doubtful ends the connection: it is used again only after an answer that ends exactly where its framing says.
"""

from typing import Final

import h11
import httpx

SWITCHING_PROTOCOLS: Final = 101
TWO_FRAMINGS: Final = frozenset({b"content-length", b"transfer-encoding"})


class AnswerReader:
    """Takes an answer in pieces, as they come.

    http: what framed the request. status, headers: of the answer; status is None until its head is complete. 1xx answers
    before it are skipped. body: what came of it, at most `body_bytes_max`. ended: nothing more is wanted. whole: the body
    ended where it should. After the answer that opens a tunnel, `whole` is False.
    """

    __slots__ = ("_body_bytes_max", "_http", "body", "ended", "headers", "status", "whole")

    def __init__(self, http: h11.Connection, body_bytes_max: int) -> None:
        self._http = http
        self._body_bytes_max = body_bytes_max
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.ended = False
        self.whole = False

    @property
    def reusable(self) -> bool:
        """Whether the answer was whole, nothing followed it, and both sides keep the connection.

        After two framings, servers and proxies on the way may have seen two ends; h11 accepts them.
        """
        return (
            self.whole
            and self._http.our_state is self._http.their_state is h11.DONE
            and not self.has_left_overs
            and not TWO_FRAMINGS.issubset(name.lower() for name, _ in self.headers)
        )

    @property
    def has_left_overs(self) -> bool:
        """Whether the server sent more than the answer, or closed."""
        return self._http.trailing_data != (b"", False)

    def headers_for_httpx(self) -> httpx.Headers:
        is_ascii = all(name.isascii() and value.isascii() for name, value in self.headers)
        return httpx.Headers(self.headers, encoding="ascii" if is_ascii else None)  # it takes long to find that out

    def feed(self, data: bytes) -> None:
        """Take what came; no bytes mean that the server has closed.

        Raises `httpx.RemoteProtocolError` without the head of an answer; the text shows nothing of what came. A broken body
        ends the answer, which is then not whole.
        """
        self._http.receive_data(data)
        try:
            while not self.ended and self._take(self._http.next_event()):
                pass
        except h11.RemoteProtocolError:
            if self.status is None:
                raise httpx.RemoteProtocolError("no head of an answer in HTTP/1.1 came") from None
            self.ended = True

    def _take(self, event: object) -> bool:
        """Whether another event may follow at once."""
        match event:
            case h11.Data():
                self._take_body(event.data)
            case h11.EndOfMessage():
                self.ended = self.whole = True
            case h11.Response():
                self._take_head(event)
            case h11.InformationalResponse():
                if event.status_code == SWITCHING_PROTOCOLS:
                    raise h11.RemoteProtocolError("the protocol after it is not read here")
            case _:
                self.ended = event is h11.PAUSED  # a tunnel begins after the head
                return False
        return True

    def _take_head(self, head: h11.Response) -> None:
        if not head.http_version.startswith(b"1."):
            raise h11.RemoteProtocolError("another version of HTTP")
        self.headers = head.headers.raw_items()
        self.status = head.status_code

    def _take_body(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > self._body_bytes_max:
            del self.body[self._body_bytes_max :]
            self.ended = True
