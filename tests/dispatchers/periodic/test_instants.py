"""Which instants of a schedule are due: by the clock, after a downtime, in daylight saving time, with jitter."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from hypothesis import given
from hypothesis import strategies as st

from dispatchers.periodic import instants
from dispatchers.periodic.declaration import declare
from dispatchers.periodic.instants import MAX_CAUGHT_UP, MAX_COUNTED, SECOND, due, next_instant, ready_at, upcoming
from dispatchers.periodic.schedules import Schedule

START = datetime(2026, 11, 2, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def schedule(trigger: Any = "* * * * *", **settings: Any) -> Schedule:
    given: dict[str, Any] = {"name": "report", "timezone": None, "jitter": timedelta(0), "catch_up": "latest"}
    return declare(trigger, lambda session, tick: None, **given | settings)


def shown(trigger: Any, after: str, count: int, **settings: Any) -> list[str]:
    found = upcoming(schedule(trigger, **settings).trigger, datetime.fromisoformat(after).replace(tzinfo=UTC), count)
    return [f"{at:%m-%d %H:%M}" for at in found]


# --- what is due


def test_an_instant_is_due_from_its_second_on() -> None:
    assert due(schedule(), START, START + MINUTE - timedelta(microseconds=1)) == ([], None, START + MINUTE)
    assert due(schedule(), START, START + MINUTE) == ([START + MINUTE], None, None)


def test_an_instant_that_was_dealt_with_is_not_due_again() -> None:
    assert due(schedule(), START + MINUTE, START + MINUTE).instants == []


def test_a_clock_that_was_set_back_makes_nothing_due() -> None:
    found = due(schedule(), START, START - DAY)

    assert found == ([], None, START + MINUTE)


def test_after_a_downtime_only_the_latest_instant_is_enqueued() -> None:
    found = due(schedule(), START, START + HOUR)

    assert found.instants == [START + HOUR]
    assert found.skipped == (59, True, START + MINUTE, START + 59 * MINUTE)


def test_all_missed_instants_are_enqueued_where_asked_for() -> None:
    found = due(schedule(catch_up="all"), START, START + HOUR)

    assert (len(found.instants), found.skipped) == (60, None)


def test_late_instants_are_dropped_where_asked_for() -> None:
    found = due(schedule(catch_up="none"), START, START + HOUR)

    assert found.instants == [START + 59 * MINUTE, START + HOUR]
    late = due(schedule("0 0 * * *", catch_up="none"), START, START + DAY + HOUR)
    assert (late.instants, late.skipped) == ([], (1, True, START + DAY, START + DAY))


@pytest.mark.parametrize(("catch_up", "count"), [("latest", 1), ("all", MAX_CAUGHT_UP), ("none", 2)])
def test_a_year_of_minutes_enqueues_a_bounded_number(
    catch_up: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    find = instants.next_instant
    monkeypatch.setattr(instants, "next_instant", lambda *given: asked.append(1) or find(*given))
    now = START + 365 * DAY

    found = due(schedule(catch_up=catch_up), START, now)

    assert found.instants == [now - MINUTE * n for n in range(count)][::-1]
    assert found.skipped == (MAX_COUNTED, False, START + MINUTE, found.instants[0] - MINUTE)
    assert len(asked) < 5000  # of 525,600 instants


def test_the_last_instants_before_a_long_silence_are_found() -> None:
    ended = IntervalTrigger(seconds=1, start_date=START, end_date=START + DAY)

    found = due(schedule(ended, catch_up="all"), START, START + 900 * DAY)

    assert found.instants == [START + DAY - timedelta(seconds=n) for n in range(MAX_CAUGHT_UP)][::-1]


TRIGGERS: list[Any] = [
    "* * * * *",
    "*/7 3,4 * * *",
    "0 9 * * MON",
    "15 2 1,15 * 5",
    IntervalTrigger(seconds=97, start_date=START - 3 * DAY),
    IntervalTrigger(minutes=5, start_date=START + HOUR, end_date=START + 9 * HOUR),
    DateTrigger(START + 5 * HOUR),
]
SPANS = st.integers(-2 * 86400, 4 * 86400).map(lambda seconds: timedelta(seconds=seconds))


@given(
    trigger=st.sampled_from(TRIGGERS),
    zone=st.sampled_from(["UTC", "Europe/Berlin", "America/New_York"]),
    catch_up=st.sampled_from(["latest", "all", "none"]),
    jitter=st.integers(0, 20).map(lambda seconds: timedelta(seconds=seconds)),
    jumps=st.lists(SPANS, min_size=1, max_size=12),
)
def test_whatever_the_clock_does_each_instant_is_enqueued_once(
    trigger: Any, zone: str, catch_up: str, jitter: timedelta, jumps: list[timedelta]
) -> None:
    made = schedule(trigger, timezone=zone if isinstance(trigger, str) else None, jitter=jitter, catch_up=catch_up)
    enqueued_to, now = START, START
    enqueued: list[datetime] = []

    for jump in jumps:
        now += jump
        for _ in range(60):  # as often as something is due
            found = due(made, enqueued_to, now)
            last = [*([found.skipped.last] if found.skipped else []), *found.instants]
            if not last:
                break
            assert all(at > enqueued_to and ready_at(made, at) <= now for at in last)
            enqueued += found.instants
            enqueued_to = last[-1]
        else:
            raise AssertionError("it never ends")
        assert found.wake_at is None or found.wake_at > now

    assert all(a < b for a, b in pairwise(enqueued))
    assert {at for at in enqueued if next_instant(made.trigger, at - timedelta(seconds=1)) != at} == set()


@given(seconds=st.integers(1, 200), offset=st.integers(0, 86400), missed=st.integers(1, 30 * 86400))
def test_the_latest_instants_are_those_that_a_search_through_all_finds(seconds: int, offset: int, missed: int) -> None:
    trigger = IntervalTrigger(seconds=seconds, start_date=START - timedelta(seconds=offset))
    now = START + timedelta(seconds=missed)

    found = due(schedule(trigger, catch_up="all"), START, now).instants

    late = (missed + offset) // seconds
    first = offset // seconds + 1
    wanted = [
        START + timedelta(seconds=n * seconds - offset) for n in range(max(first, late - MAX_CAUGHT_UP + 1), late + 1)
    ]
    assert found == wanted


# --- jitter


def test_jitter_is_the_same_in_each_process_and_keeps_the_order() -> None:
    made = schedule("*/5 * * * *", jitter=4 * MINUTE)
    found = upcoming(made.trigger, START, 200)

    ready = [ready_at(made, at) for at in found]

    assert f"{ready[0]:%H:%M:%S.%f}" == "00:07:55.686015"
    assert ready == sorted(ready)
    assert all(at <= late < at + 4 * MINUTE for at, late in zip(found, ready, strict=True))
    assert len({late - at for at, late in zip(found, ready, strict=True)}) > 190
    assert due(made, START, ready[0] - timedelta(milliseconds=1)).wake_at == ready[0]
    assert due(made, START, ready[0]).instants == [found[0]]


# --- daylight saving time

CHANGES = {
    "Europe/Berlin": ["2026-03-29", "2026-10-25"],
    "America/New_York": ["2026-03-08", "2026-11-01"],
    "America/Havana": ["2026-03-08", "2026-11-01"],  # at midnight
    "Australia/Lord_Howe": ["2026-04-05", "2026-10-04"],  # by half an hour
    "Africa/Casablanca": ["2026-02-15", "2026-03-22"],
    "Pacific/Apia": ["2011-12-30"],  # a day that does not exist
}


def local_minutes(zone: ZoneInfo, day: str, minutes: set[int], hours: set[int]) -> list[datetime]:
    """The instants around the day, found one by one: each local time, and each missing one later by what is missing."""
    midnights = [datetime.fromisoformat(day) + n * DAY for n in range(-2, 3)]
    walls = [each.replace(hour=hour, minute=minute) for each in midnights for hour in hours for minute in minutes]
    found = set()
    for wall in walls:
        for fold in (0, 1):
            at = wall.replace(tzinfo=zone, fold=fold).astimezone(UTC)
            is_missing = at.astimezone(zone).replace(tzinfo=None) != wall
            if not (is_missing and fold):
                found.add(at)
    return sorted(found)


@pytest.mark.parametrize(("zone", "day"), [(zone, day) for zone, days in CHANGES.items() for day in days])
@pytest.mark.parametrize("minutes", ["0", "15,40", "30"])
@pytest.mark.parametrize("hours", ["0", "1-3"])
def test_each_local_time_is_due_from_wherever_one_searches(zone: str, day: str, minutes: str, hours: str) -> None:
    tz = ZoneInfo(zone)
    expected = local_minutes(tz, day, {int(n) for n in minutes.split(",")}, {0} if hours == "0" else {1, 2, 3})

    trigger = schedule(f"{minutes} {hours} * * *", timezone=zone).trigger

    assert upcoming(trigger, expected[0] - SECOND, len(expected)) == expected
    for before, at in pairwise(expected):
        assert {next_instant(trigger, before + n * (at - before - SECOND) / 9) for n in range(10)} == {at}


def test_the_first_of_april_is_not_left_out_when_it_is_searched_in_march() -> None:
    found = shown("@monthly", "2026-02-27", 3, timezone="Europe/Berlin")

    assert found == ["02-28 23:00", "03-31 22:00", "04-30 22:00"]
    app = CronTrigger(day=1, hour=0, minute=0, second=0, end_date="2026-04-15", timezone="Europe/Berlin")
    assert shown(app, "2026-02-27", 3) == ["02-28 23:00", "03-31 22:00"]


def test_a_local_time_that_does_not_exist_is_an_hour_later() -> None:
    """02:30 does not exist: it is 03:30 of summer time, as many seconds after midnight as on other days."""
    assert shown("30 2 * * *", "2026-03-28", 3, timezone="Europe/Berlin") == [
        "03-28 01:30",
        "03-29 01:30",
        "03-30 00:30",
    ]
    new_york = shown("30 2 * * *", "2026-03-07", 3, timezone="America/New_York")
    assert new_york == ["03-07 07:30", "03-08 07:30", "03-09 06:30"]


def test_a_local_time_that_occurs_twice_is_due_twice() -> None:
    berlin = shown("30 2 * * *", "2026-10-24", 4, timezone="Europe/Berlin")
    assert berlin == ["10-24 00:30", "10-25 00:30", "10-25 01:30", "10-26 01:30"]
    new_york = shown("30 1 * * *", "2026-10-31", 4, timezone="America/New_York")
    assert new_york == ["10-31 05:30", "11-01 05:30", "11-01 06:30", "11-02 06:30"]


@pytest.mark.parametrize(
    ("zone", "day"),
    [
        ("Europe/Berlin", "2026-03-29"),
        ("Europe/Berlin", "2026-10-25"),
        ("America/New_York", "2026-03-08"),
        ("America/New_York", "2026-11-01"),
    ],
)
def test_each_hour_of_the_day_is_due_once_when_the_clocks_change(zone: str, day: str) -> None:
    start = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)

    found = upcoming(schedule("0 * * * *", timezone=zone).trigger, start, 30)

    assert found == [start + n * HOUR for n in range(1, 31)]


# --- crontab


@pytest.mark.parametrize(
    ("expression", "days"),
    [
        ("0 9 * * 0", ["11-08", "11-15"]),
        ("0 9 * * 7", ["11-08", "11-15"]),
        ("0 9 * * SUN", ["11-08", "11-15"]),
        ("0 9 * * 1", ["11-02", "11-09"]),
        ("0 9 * * 6-7", ["11-07", "11-08"]),
        ("0 9 * * fri-sun", ["11-06", "11-07"]),
        ("0 9 * * 1-5", ["11-02", "11-03"]),
        ("0 9 * * 0-0", ["11-08", "11-15"]),
        ("0 9 * * */3", ["11-04", "11-07"]),
        ("0 9 * * 1,Wed", ["11-02", "11-04"]),
        ("0 9 13 * 5", ["11-06", "11-13"]),  # the 13th, or a Friday
        ("0 9 29 2 *", ["02-29", "02-29"]),
        ("0 9 31 * *", ["12-31", "01-31"]),
    ],
)
def test_a_crontab_counts_weekdays_and_days_as_cron_does(expression: str, days: list[str]) -> None:
    assert shown(expression, "2026-11-02", 2) == [f"{day} 09:00" for day in days]


def test_a_macro_means_its_expression() -> None:
    assert shown("@weekly", "2026-11-02", 1) == ["11-08 00:00"]
    assert shown(" @Hourly ", "2026-11-02", 1) == ["11-02 01:00"]


def test_the_leap_day_is_due_every_four_years() -> None:
    found = upcoming(schedule("0 0 29 2 *").trigger, START, 2)
    assert found == [datetime(2028, 2, 29, tzinfo=UTC), datetime(2032, 2, 29, tzinfo=UTC)]


def test_a_trigger_of_several_passes_those_that_are_over() -> None:
    from apscheduler.triggers.combining import OrTrigger

    over = DateTrigger(START - DAY)
    both = OrTrigger([over, CronTrigger(hour=9, minute=0, timezone="UTC")])

    assert shown(both, "2026-11-02", 1) == ["11-02 09:00"]
    assert upcoming(schedule(over).trigger, START, 1) == []
