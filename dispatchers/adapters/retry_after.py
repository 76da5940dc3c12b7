"""The Retry-After header: when a service asks to be called again."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime


def retry_after(headers: Mapping[str, str]) -> timedelta | None:
    """The header in full, seconds or a date; None for what is neither, or lies in the past.

    headers: `httpx.Headers`, or names in lower case. A date counts from the service's own clock if it is given, else from ours.
    It never raises: an odd header must not change what the status means. Source: RFC 9110, 10.2.3.
    """
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    if re.fullmatch("[0-9]{1,9}", text):
        return timedelta(seconds=int(text))
    then, now = date(text), date(headers["date"]) if "date" in headers else datetime.now(UTC)
    if then is None or now is None or then <= now:
        return None
    return then - now


def date(text: str) -> datetime | None:
    """A date of a header, with its time zone; None for other text. RFC 9110, 5.6.7."""
    try:
        found = parsedate_to_datetime(text)
        found = found.replace(tzinfo=found.tzinfo or UTC)
        found.astimezone(UTC)  # a time zone may lead out of the years that exist
    except (ValueError, OverflowError, TypeError, IndexError):  # by no documentation, on texts that are no dates
        return None
    return found
