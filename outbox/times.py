"""Instants, and the lengths of time that an app may give. Pure."""

from datetime import UTC, datetime, timedelta

from outbox.errors import InvalidValue

NEVER = datetime(9999, 12, 31, tzinfo=UTC)
"""The due time of what must not be claimed. PostgreSQL's own 'infinity' cannot be read back by its drivers."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

# --- lengths of time

NOTHING = timedelta(0)
SECOND = timedelta(seconds=1)
MAX_SPAN = timedelta(days=36_525)  # a century: no calendar overflows

_AT_LEAST = {NOTHING: "0 s or more", MICROSECOND: "more than 0 s", SECOND: "at least 1 s"}


def check_span(field: str, span: object, *, least: timedelta = MICROSECOND, otherwise: str = "") -> None:
    """Raise `InvalidValue` unless `span` is a timedelta within the limits.

    least: `NOTHING`, `MICROSECOND` or `SECOND`. otherwise: what may be given instead of a timedelta, for the text.
    """
    if not isinstance(span, timedelta) or not least <= span <= MAX_SPAN:
        rule = f"must be a timedelta of {_AT_LEAST[least]}, and {MAX_SPAN.days} days at most{otherwise}"
        raise InvalidValue(field, span, rule)
