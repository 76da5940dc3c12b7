"""Retry-After: what services write there, and what others do."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchers.adapters.retry_after import retry_after

DATE = "Wed, 21 Oct 2026 07:28:00 GMT"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("120", 120),
        (" 86400 ", 86400),
        ("999999999", 999_999_999),
        ("Wed, 21 Oct 2026 07:30:00 GMT", 120),
        ("Wed, 21 Oct 2026 09:30:00 +0200", 120),
    ],
)
def test_seconds_and_dates_are_honoured_in_full(text: str, seconds: int) -> None:
    assert retry_after(httpx.Headers({"Retry-After": text, "Date": DATE})) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "1.5",
        "1e9",
        "NaN",
        "inf",
        "9" * 5000,
        "²",
        "soon",
        "1, 2",
        "Wed, 21 Oct 2026 07:00:00 GMT",
        "Wed, 99 Foo",
    ],
)
def test_nonsense_and_the_past_ask_for_nothing(text: str) -> None:
    headers = httpx.Headers([(b"Retry-After", text.encode()), (b"Date", DATE.encode())])

    assert retry_after(headers) is None


def test_a_date_counts_from_our_clock_where_the_service_sends_none() -> None:
    after = retry_after({"retry-after": format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)})

    assert after is not None
    assert timedelta(minutes=59) < after <= timedelta(hours=1)


def test_a_header_that_is_not_there_asks_for_nothing() -> None:
    assert retry_after({}) is None


@given(st.text(max_size=60), st.none() | st.text(max_size=60))
def test_no_text_breaks_it(text: str, date: str | None) -> None:
    headers = {"retry-after": text} | ({} if date is None else {"date": date})

    after = retry_after(headers)

    assert after is None or after >= timedelta(0)


@given(
    st.from_regex(r"[A-Z][a-z]{2}, \d{1,6} (Jan|Feb|Dec) \d{1,9} \d{1,6}:\d{1,6}:\d{1,6} [+-]?\d{0,8}", fullmatch=True)
)
def test_no_date_breaks_it(text: str) -> None:
    after = retry_after({"retry-after": text, "date": DATE})

    assert after is None or after > timedelta(0)
