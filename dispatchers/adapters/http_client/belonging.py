"""Whether an answer belongs to its request. HTTP/1.1 binds the two by nothing but their order on the connection.

The first answer on a connection belongs to the first request, because there is no other. A later one may be an answer that a
faulty server or proxy sent twice, or the last words of a server to an idle connection, which cross the next request.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import httpx

from dispatchers.adapters.http_client.answer_reader import AnswerReader
from dispatchers.adapters.http_client.request_writer import Echo, Origin

log = logging.getLogger("outbox.dispatcher")

DISTRUST_SECONDS: Final = 600.0
"""How long each send to a service has its own connection, after the service has sent an answer that may be foreign."""

REQUEST_TIMEOUT: Final = 408  # the answer to an idle connection: RFC 9110, 15.5.9


class ForeignAnswer(httpx.RemoteProtocolError):
    """An answer came that may belong to another request."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the answer may belong to another request: {why}")


@dataclass(slots=True)
class _Manners:
    """closes_after: the statuses with which the service has closed connections on whose first request it answered."""

    distrusted_until: float = 0.0
    closes_after: set[int] = field(default_factory=set)


class Belonging:
    """What the answers of each service have shown so far."""

    def __init__(self) -> None:
        self._manners: dict[Origin, _Manners] = {}

    def may_reuse(self, origin: Origin, now: float) -> bool:
        """Whether a connection to this service may carry a second request. now: by the event loop's clock."""
        manners = self._manners.get(origin)
        return manners is None or manners.distrusted_until <= now

    def distrust(self, origin: Origin, now: float) -> None:
        """Let each send to this service have its own connection for a while."""
        if self.may_reuse(origin, now):
            log.warning(
                "%s sent an answer that no request asked for, or one that may belong to another request: each send to it has"
                " its own connection for %d minutes",
                origin,
                DISTRUST_SECONDS / 60,
            )
        self._manners.setdefault(origin, _Manners()).distrusted_until = now + DISTRUST_SECONDS

    def note_first(self, origin: Origin, answer: AnswerReader) -> None:
        """Remember the manner of a service that closes the connection after a refusal, as Tomcat does after each 400."""
        if answer.status is not None and _refuses_and_closes(answer):
            self._manners.setdefault(origin, _Manners()).closes_after.add(answer.status)

    def doubt(self, origin: Origin, answer: AnswerReader, *, is_followed: bool) -> str | None:
        """Why this answer to a later request of a connection may be foreign; None if nothing speaks for it.

        is_followed: whether more bytes of the service wait already.
        """
        if answer.status is None:
            return None
        if answer.came_early:
            return "it came before the service had received the request"
        if answer.is_followed or (is_followed and answer.keeps_alive):
            return "more than one answer came"
        if _refuses_and_closes(answer):
            manners = self._manners.get(origin)
            if answer.status == REQUEST_TIMEOUT or manners is None or answer.status not in manners.closes_after:
                return f"HTTP {answer.status} closed a connection that was used before"
        return None


def without_answer(error: Exception) -> str:
    """The reason of a send that may have been executed, and has no answer that counts. It quotes no exception of others."""
    return str(error) if isinstance(error, ForeignAnswer) else f"no answer: {type(error).__name__}"


def doubt_of_key(status: int, headers: Mapping[str, str], echo: Echo | None, *, is_first: bool) -> str | None:
    """Why the key in the answer, or its absence, speaks for another request; None if it does not."""
    if echo is None:
        return None
    echoed = headers.get(echo.header.lower())
    if echoed is not None and echo.key not in echoed:
        return f"its {echo.header} is not that of the request"
    if echoed is None and echo.is_sure and not is_first and 200 <= status < 300:
        return "it does not repeat the request's key, as this service does"
    return None


def _refuses_and_closes(answer: AnswerReader) -> bool:
    status = answer.status or 0
    return 400 <= status < 500 and (not answer.keeps_alive or status == REQUEST_TIMEOUT)
