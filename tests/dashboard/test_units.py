"""Numbers, sizes and durations as people read them."""

from datetime import UTC, datetime, timedelta

import pytest

from dispatchers.admin.read.counts import Count
from dispatchers.dashboard.units import bytes_text, duration_text, limited_text, number_text, relative_text

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.25, "250 ms"),
        (0.9999, "1 s"),
        (2.5, "2.5 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (125, "2 min 5 s"),
        (3600, "1 h"),
        (12_060, "3 h 21 min"),
        (100_800, "1 day 4 h"),
        (259_200, "3 days"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("ago", "text"),
    [
        (timedelta(seconds=0.4), "0 s ago"),
        (timedelta(seconds=59), "59 s ago"),
        (timedelta(minutes=3, seconds=59), "3 min ago"),
        (timedelta(days=1, hours=4), "1 day ago"),
        (timedelta(hours=-2), "in 2 h"),
        (timedelta(days=-40), "in 40 days"),
    ],
)
def test_a_relative_time_has_its_largest_unit(ago: timedelta, text: str) -> None:
    assert relative_text(NOW - ago, NOW) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "unknown size"),
        (27, "27 bytes"),
        (8192, "8.19 kB"),
        (999_700, "1 MB"),
        (12_345_678_901, "12.3 GB"),
        (5e15, "5,000 TB"),
    ],
)
def test_a_size_has_three_digits_and_its_unit(count: float | None, text: str) -> None:
    assert bytes_text(count) == text


def test_thousands_are_separated_and_a_limited_count_says_so() -> None:
    assert [number_text(value) for value in (0, 999, 1250, 2.5, 1_000_000.0)] == [
        "0",
        "999",
        "1,250",
        "2.5",
        "1,000,000",
    ]
    assert limited_text(Count(value=1000, is_exact=False)) == "1,000+"
