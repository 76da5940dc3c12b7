"""Lengths of time that an app gives: what is one, and between which limits."""

from datetime import timedelta

from outbox.errors import InvalidValue

NOTHING = timedelta(0)
INSTANT = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)
SPAN_MAX = timedelta(days=36_525)  # a century: no calendar overflows

_AT_LEAST = {NOTHING: "0 s or more", INSTANT: "more than 0 s", SECOND: "at least 1 s"}


def check_span(field: str, span: object, *, least: timedelta = INSTANT, otherwise: str = "") -> None:
    """Raise `InvalidValue` unless `span` is a timedelta within the limits.

    least: `NOTHING`, `INSTANT` or `SECOND`. otherwise: what may be given instead of a timedelta, for the text.
    """
    if not isinstance(span, timedelta) or not least <= span <= SPAN_MAX:
        rule = f"must be a timedelta of {_AT_LEAST[least]}, and {SPAN_MAX.days} days at most{otherwise}"
        raise InvalidValue(field, span, rule)
