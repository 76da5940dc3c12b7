"""The outcomes of Stripe's answers: one row for each exception of its SDK, and the stored result of a success."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeAlias

import httpx
import stripe
from stripe import oauth_error

from dispatchers.adapters.causes import nothing_sent
from dispatchers.adapters.http_client.belonging import ForeignAnswer
from dispatchers.adapters.http_client.transport import NEVER_SENT
from dispatchers.adapters.retry_after import retry_after
from dispatchers.delivery import Deferred, Delivered, InProgress, KeyConflict, Outcome, Rejected, Unknown

WORD: Final = re.compile(r"[\w.\[\]-]{1,120}", re.ASCII)


@dataclass(slots=True)
class Exchange:
    """The transport's record of one send. It has more than the SDK's exceptions.

    account: the connected account in the entry's options. reads: whether this is a lookup, which only reads; a send never does.
    trace: the W3C headers of the request. started: whether the request was given to a connection. status: None until the head
    of an answer was read.
    """

    account: str | None = None
    reads: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)
    started: bool = False
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed send, with the values that the rows below need. It has no message of Stripe, because these quote the request."""

    kind: str
    status: int | None
    type: str | None
    code: str | None
    decline_code: str | None
    param: str | None
    request_id: str | None
    made: Mapping[str, str]
    replayed: bool
    should_retry: str | None
    after: timedelta | None
    unsent: bool
    account: str | None

    @classmethod
    def of(cls, error: Exception, exchange: Exchange) -> "Failure":
        status, headers, body = exchange.status, exchange.headers, None
        if isinstance(error, stripe.StripeError):
            status, headers, body = (
                status or error.http_status,
                headers or httpx.Headers(error.headers),
                error.json_body,
            )
        fields = body.get("error") if isinstance(body, Mapping) else None
        details = fields if isinstance(fields, Mapping) else {}
        return cls(
            kind=_kind(error.__cause__ or error),  # ReadTimeout rather than APIConnectionError
            status=status,
            type=_word(details.get("type")),
            code=_word(details.get("code")),
            decline_code=_word(details.get("decline_code")),
            param=_word(details.get("param")),
            request_id=_word(headers.get("request-id")),
            made=_ids_in(details),
            replayed=headers.get("idempotent-replayed") == "true",
            should_retry=headers.get("stripe-should-retry"),
            after=retry_after(headers),
            # Only the cause counts: the context may be the error of another send, if this send began while it was handled.
            unsent=isinstance(error.__cause__, NEVER_SENT),
            account=exchange.account,
        )

    @property
    def reason(self) -> str:
        codes = "/".join(code for code in (self.code, self.decline_code) if code)
        about = f"param {self.param}" if self.param else ""
        status = f"HTTP {self.status}" if self.status else ""
        details = [part for part in (codes, about, status, self.request_id) if part]
        return f"{self.type or self.kind}: {', '.join(details)}" if details else self.type or self.kind

    @property
    def result(self) -> dict[str, Any]:
        fields = {
            "type": self.type,
            "code": self.code,
            "decline_code": self.decline_code,
            "param": self.param,
            "http_status": self.status,
            "request_id": self.request_id,
        }
        return {name: value for name, value in fields.items() if value is not None} | dict(self.made)


def outcome_of(error: Exception, exchange: Exchange) -> Outcome:
    """The outcome of a failed send. An exception without its own row uses the row of its nearest base class."""
    failure = Failure.of(error, exchange)
    if not exchange.started and not isinstance(error, stripe.StripeError):
        return Rejected(f"the SDK cannot make a request from this payload: {failure.kind}")
    # First by code and type: their status has changed over time, and the SDK chooses the class by the status.
    if failure.code == "idempotency_key_in_use":
        return InProgress(failure.after)
    if failure.type == "idempotency_error":
        return KeyConflict(failure.reason)
    if failure.code == "lock_timeout":  # docs.stripe.com/rate-limits, "Object lock timeouts": retry the request
        return Deferred(failure.reason, after=failure.after)
    row = next(ROWS[cls] for cls in type(error).__mro__ if cls in ROWS)
    return row(failure)


def declined(failure: Failure) -> Outcome:
    """402: Stripe executed the request until the decline, and stored the answer under the key."""
    return Rejected(failure.reason, conclusive=True, result=failure.result)


def refused(failure: Failure) -> Outcome:
    """Stripe did not execute the request: it validates before it reads the key, unless the answer shows that it was stored."""
    if failure.type == "api_error" and not failure.replayed:  # a fault of Stripe's, with any status
        return Unknown(failure.reason, after=failure.after)
    return Rejected(failure.reason, conclusive=failure.replayed, result=failure.result)


def barred(failure: Failure) -> Outcome:
    """The API key or its rights are wrong. An operator repairs that, and the entry is sent under the same key; unless Stripe
    stored the answer. If the entry has an account, only that account is affected.
    """
    if failure.replayed:
        return refused(failure)
    return Deferred(failure.reason, after=failure.after, cooldown=True, account=failure.account)


def throttled(failure: Failure) -> Outcome:
    """Stripe's limiter acts before anything is executed."""
    return Deferred(failure.reason, after=failure.after, cooldown=True)


def conflicting(failure: Failure) -> Outcome:
    return KeyConflict(failure.reason)


def unanswered(failure: Failure) -> Outcome:
    return Deferred(failure.kind) if failure.unsent else Unknown(failure.reason)


def by_status(failure: Failure) -> Outcome:
    """The outcome if the SDK's class does not decide it: 5xx, 409, redirects, answers of a proxy, broken answers."""
    match failure.status:
        case int(status) if 200 <= status < 300:
            return Delivered({"unparsed": True, **failure.result}, replayed=failure.replayed)
        case int(status) if status >= 500:
            # A stored 500 is repeated for as long as the key is remembered.
            final = failure.replayed or failure.should_retry == "false"
            cooldown = status == 503 and failure.after is not None
            return Unknown(failure.reason, after=failure.after, final=final, cooldown=cooldown)
        case 401 | 403:
            return barred(failure)
        case 429:
            return throttled(failure)
        case int(status) if status >= 400 and status != 409 and failure.type == "invalid_request_error":
            return refused(failure)
        case _:
            return Unknown(failure.reason, after=failure.after)


Row: TypeAlias = Callable[[Failure], Outcome]

ROWS: Final[dict[type[BaseException], Row]] = {
    stripe.CardError: declined,
    stripe.InvalidRequestError: refused,
    stripe.IdempotencyError: conflicting,
    stripe.AuthenticationError: barred,
    stripe.PermissionError: barred,
    stripe.RateLimitError: throttled,
    stripe.APIConnectionError: unanswered,
    stripe.APIError: by_status,
    # Base classes, which are never raised.
    stripe.StripeError: by_status,
    stripe.StripeErrorWithParamCode: by_status,
    # Only for webhooks. If a call raised it, it would prove nothing.
    stripe.SignatureVerificationError: by_status,
    # The SDK raises it for an answer whose `error` is a text. v1 never sends that, so a proxy answered.
    oauth_error.OAuthError: by_status,
    oauth_error.InvalidClientError: by_status,
    oauth_error.InvalidGrantError: by_status,
    oauth_error.InvalidRequestError: by_status,
    oauth_error.InvalidScopeError: by_status,
    oauth_error.UnsupportedGrantTypeError: by_status,
    oauth_error.UnsupportedResponseTypeError: by_status,
    # Other exceptions while the SDK reads an answer (a warning as an error, an answer of an unknown form).
    Exception: by_status,
}
"""One row for each exception of the SDK; a test checks that none is missing."""

# v2 only, and by name, because older versions of the SDK lack most. v2 does not keep failures under the key.
_V2_ROWS: Final[dict[Row, tuple[str, ...]]] = {
    throttled: ("QuotaExceededError", "TemporarySessionExpiredError"),
    refused: (
        *("AlreadyCanceledError", "BlockedByStripeError", "CannotProceedError", "CapabilityNotEnabledError"),
        *("ControlledByAlternateResourceError", "FeatureNotEnabledError", "FinancialAccountNotOpenError"),
        *("FxQuoteNeedsRefreshError", "InsufficientFundsError", "InvalidPaymentMethodError"),
        *("InvalidPayoutMethodError", "InvalidVaultedCredentialError", "NotCancelableError"),
        *("RecipientNotNotifiableError", "VerificationAttemptFailedError", "VerificationExpiredError"),
        "VerificationNotInitiatedError",
    ),
}
ROWS.update({getattr(stripe, n): row for row, names in _V2_ROWS.items() for n in names if hasattr(stripe, n)})


def remembered(answer: object, exchange: Exchange) -> dict[str, Any]:
    request_id = {"request_id": value} if (value := _word(exchange.headers.get("request-id"))) else {}
    if not isinstance(answer, stripe.StripeObject):
        return {"unparsed": True, "http_status": exchange.status, **request_id}
    fields = {name: _word(getattr(answer, name, None)) for name in ("id", "object", "status")}
    return {name: word for name, word in fields.items() if word} | request_id


def _ids_in(details: Mapping[str, Any]) -> dict[str, str]:
    """The ids of objects that a declined request created: with `confirm`, a PaymentIntent exists after a decline."""
    made = {name: details.get(name) for name in ("payment_intent", "setup_intent", "charge")}
    ids = {name: value.get("id") if isinstance(value, Mapping) else value for name, value in made.items()}
    return {name: word for name, value in ids.items() if (word := _word(value))}


def _kind(error: BaseException) -> str:
    if isinstance(error, NEVER_SENT):
        return nothing_sent(error)
    return str(error) if isinstance(error, ForeignAnswer) else type(error).__name__


def _word(value: object) -> str | None:
    """`value` if it is a name (a code, a parameter, an id); no other text of Stripe may be stored."""
    return value if isinstance(value, str) and WORD.fullmatch(value) else None
