"""When a service asks to be called again: its Retry-After header."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime


def retry_after(headers: Mapping[str, str]) -> timedelta | None:
    """The header in full, seconds or a date; None for what is neither, or lies in the past.

    headers: `httpx.Headers`, or names in lower case. A date counts from the service's own clock if it is given, else from ours.
    Source: RFC 9110, 10.2.3.
    """
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    if re.fullmatch("[0-9]{1,9}", text):
        return timedelta(seconds=int(text))
    try:
        then = parsedate_to_datetime(text)
        now = parsedate_to_datetime(headers["date"]) if "date" in headers else datetime.now(UTC)
    except ValueError:
        return None
    after = then.replace(tzinfo=then.tzinfo or UTC) - now.replace(tzinfo=now.tzinfo or UTC)
    return after if after > timedelta(0) else None
