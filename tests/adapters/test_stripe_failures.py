"""StripeAdapter, against the real SDK: what each exception means, and what a broken or reused connection does."""

from collections.abc import Iterator

import httpx
import pytest
import stripe
import stripe.oauth_error
from support.stripe_sends import raised

from dispatchers.adapters.stripe.outcomes import ROWS, Exchange, outcome_of
from dispatchers.delivery import Deferred, Delivered, Outcome, Rejected, Unknown


def descendants(cls: type[BaseException]) -> Iterator[type[BaseException]]:
    for child in cls.__subclasses__():
        yield child
        yield from descendants(child)


def test_every_exception_of_the_sdk_has_a_row_of_its_own() -> None:
    without = {cls for cls in (stripe.StripeError, *descendants(stripe.StripeError)) if cls not in ROWS}

    assert without == set()


def test_an_exception_without_a_row_is_answered_as_its_parent() -> None:
    class NewError(stripe.RateLimitError):
        """Of a later SDK."""

    assert isinstance(outcome_of(NewError("m", http_status=429), Exchange(started=True)), Deferred)


@pytest.mark.parametrize(
    ("exception", "expected"),
    [
        (
            raised(stripe.CardError, "m", "p", "c", http_status=402),
            Rejected("CardError: HTTP 402", conclusive=True, result={"http_status": 402}),
        ),
        (stripe.AuthenticationError("no API key"), Deferred("AuthenticationError", cooldown=True)),
        (raised(stripe.APIConnectionError, "m"), Unknown("APIConnectionError")),
        (raised(stripe.SignatureVerificationError, "m", "sig"), Unknown("SignatureVerificationError")),
        (
            raised(stripe.oauth_error.InvalidGrantError, "c", "d", http_status=400),
            Unknown("InvalidGrantError: HTTP 400"),
        ),
        (stripe.QuotaExceededError("m", http_status=400), Deferred("QuotaExceededError: HTTP 400", cooldown=True)),
        (stripe.StripeError("m", http_status=200), Delivered({"unparsed": True, "http_status": 200})),
        (RuntimeError("unforeseen"), Unknown("RuntimeError")),
    ],
)
def test_an_exception_raised_after_the_send_began_means(exception: Exception, expected: Outcome) -> None:
    assert outcome_of(exception, Exchange(started=True)) == expected


# --- the connection, over real sockets


def test_a_refusal_that_another_send_met_is_no_proof_for_this_one() -> None:
    """Python chains an error to whatever was being handled; only the cause belongs to this send."""
    try:
        raise httpx.ConnectError("of another send")
    except httpx.ConnectError:
        try:
            raise raised(stripe.APIConnectionError, "ReadError") from httpx.ReadError("of this one")
        except stripe.APIConnectionError as error:
            outcome = outcome_of(error, Exchange(started=True))

    assert isinstance(outcome, Unknown)
