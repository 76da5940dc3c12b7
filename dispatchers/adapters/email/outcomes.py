"""The outcomes of a mail server's answers. Pure.

Before the final dot is handed over, nothing is sent in any case. After it, an answer is an answer (RFC 5321, 4.2.5:
with 4yz or 5yz the server must not deliver), and without a reply the outcome is unknown.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import aiosmtplib

from dispatchers.adapters.causes import nothing_sent
from dispatchers.adapters.email.replies import OutOfStep
from dispatchers.delivery import Deferred, Delivered, Outcome, Rejected, Unknown

CREDENTIALS_CODES: Final = frozenset({530, 534, 535, 538})  # RFC 4954, 6: whose login is wanted, too weak or wrong
MAX_REPLY_CHARS: Final = 200  # ours: room for the id under which the server queued it


@dataclass(slots=True)
class Exchange:
    """How far one send has come.

    phase: the current SMTP command. dot_left: the final dot was handed over, perhaps. recipients: how many are asked for.
    refused: who was refused permanently, and with which reply.
    """

    phase: str = "connect"
    dot_left: bool = False
    recipients: int = 0
    refused: list[aiosmtplib.SMTPRecipientRefused] = field(default_factory=list)

    @property
    def refusals(self) -> list[dict[str, Any]]:
        return [{"recipient": each.recipient, **_codes(each.code, each.message)} for each in self.refused]


def answered(reply: aiosmtplib.SMTPResponse, exchange: Exchange, message_id: str) -> Outcome:
    """What the server's reply to the final dot means. By the first digit: RFC 5321, 4.2.1."""
    reason = _reason(exchange, reply.code, reply.message)
    match reply.code // 100:
        case 2:
            accepted = exchange.recipients - len(exchange.refused)
            fields = {"accepted": accepted, "refused": exchange.refusals, "message_id": message_id}
            return Delivered(fields | {"reply": _printable(reply.message)})
        case 4:
            return Deferred(reason)
        case 5:
            return Rejected(reason, result=_codes(reply.code, reply.message) | {"reply": _printable(reply.message)})
        case _:
            return Unknown(reason)


def outcome_of(error: Exception, exchange: Exchange) -> Outcome:
    """What a send without a reply to its dot means. Total: an exception without a row of its own has its ancestor's."""
    if exchange.dot_left:
        return Unknown(f"no answer to the message: {error if isinstance(error, OutOfStep) else _kind(error)}")
    row = next(ROWS[cls] for cls in type(error).__mro__ if cls in ROWS)
    return row(error, exchange)


def is_in_step(error: Exception) -> bool:
    """Whether the server has refused in due form, and now waits for the next command."""
    match error:
        case aiosmtplib.SMTPSenderRefused() | aiosmtplib.SMTPRecipientRefused() | aiosmtplib.SMTPDataError():
            return 400 <= error.code < 600
        case _:
            return isinstance(error, aiosmtplib.SMTPRecipientsRefused | aiosmtplib.SMTPNotSupported)


def is_permanent(code: int) -> bool:
    """Whether it will be refused again. What is wrong with our credentials is mended outside."""
    return 500 <= code < 600 and code not in CREDENTIALS_CODES


def refused(error: Any, exchange: Exchange) -> Outcome:
    """MAIL, RCPT or DATA got an unexpected reply."""
    reason = _reason(exchange, error.code, error.message)
    if not is_permanent(error.code):
        return Deferred(reason)
    return Rejected(reason, result=_codes(error.code, error.message) | {"reply": _printable(error.message)})


def all_refused(error: Any, exchange: Exchange) -> Outcome:
    first = error.recipients[0]
    reason = f"every recipient was refused, the first with {_code_text(first.code, first.message)}"
    return Rejected(reason, result={"accepted": 0, "refused": exchange.refusals})


def not_taken(error: Any, exchange: Exchange) -> Outcome:
    """An answer outside of the mail itself: the server is busy, does not want us, or makes no sense."""
    return Deferred(_reason(exchange, error.code, error.message))


def not_supported(error: Any, exchange: Exchange) -> Outcome:
    """The server lacks what this mail needs; another attempt would find it so."""
    return Rejected("the server does not offer SMTPUTF8, which an address beyond ASCII needs")


def not_offered(error: Any, exchange: Exchange) -> Outcome:
    """The server lacks what every mail needs: STARTTLS, or a way to log in."""
    return Deferred(f"{exchange.phase}: the server does not offer it")


def out_of_step(error: Any, exchange: Exchange) -> Outcome:
    return Deferred(f"nothing was sent: {error} ({exchange.phase})")


def not_sent(error: Any, exchange: Exchange) -> Outcome:
    return Deferred(f"{nothing_sent(error)} ({exchange.phase})")


Row: TypeAlias = Callable[[Any, Exchange], Outcome]

ROWS: Final[dict[type[BaseException], Row]] = {
    aiosmtplib.SMTPSenderRefused: refused,
    aiosmtplib.SMTPDataError: refused,
    aiosmtplib.SMTPRecipientRefused: refused,  # raised on for one that is temporary
    aiosmtplib.SMTPRecipientsRefused: all_refused,
    aiosmtplib.SMTPResponseException: not_taken,
    aiosmtplib.SMTPConnectResponseError: not_taken,
    aiosmtplib.SMTPHeloError: not_taken,
    aiosmtplib.SMTPAuthenticationError: not_taken,
    aiosmtplib.SMTPNotSupported: not_supported,
    aiosmtplib.SMTPServerDisconnected: not_sent,
    aiosmtplib.SMTPConnectError: not_sent,
    aiosmtplib.SMTPTimeoutError: not_sent,
    aiosmtplib.SMTPConnectTimeoutError: not_sent,
    aiosmtplib.SMTPReadTimeoutError: not_sent,
    aiosmtplib.SMTPException: not_offered,  # itself raised for nothing else
    # What the client lets through: the network's own errors, and a reply that it trips over.
    OSError: not_sent,
    OutOfStep: out_of_step,
    Exception: not_sent,
}
"""One row for each exception of the client; a test holds it complete."""


def _reason(exchange: Exchange, code: int, text: str) -> str:
    return f"{exchange.phase}: {_code_text(code, text)}"


def _code_text(code: int, text: str) -> str:
    """The codes and nothing else: a server's text quotes addresses."""
    return " ".join(str(value) for value in _codes(code, text).values()) if 100 <= code < 600 else "no SMTP reply"


def _codes(code: int, text: str) -> dict[str, Any]:
    enhanced = re.match(r"[245]\.\d{1,3}\.\d{1,3}(?!\S)", text)  # RFC 3463
    return {"code": code} | ({"enhanced": enhanced[0]} if enhanced else {})


def _printable(text: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", text[:MAX_REPLY_CHARS])


def _kind(error: BaseException) -> str:
    """The name of what lies beneath: ConnectionResetError rather than SMTPServerDisconnected. Never its text."""
    return type(error.__cause__ if isinstance(error.__cause__, OSError) else error).__name__
