"""Crontab expressions, and triggers of APScheduler 3, as triggers whose instants each process computes alike.

APScheduler's own `CronTrigger.from_crontab` counts weekdays from Monday, where crontab(5) counts from Sunday, and needs both the
day of the month and the weekday, where crontab(5) takes one or the other (agronholm/apscheduler#286).
"""

from collections.abc import Sequence
from datetime import datetime, tzinfo
from typing import Any

from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger

from dispatchers.periodic.instants import SECOND, next_instant
from dispatchers.periodic.local_times import LocalTimes
from dispatchers.periodic.schedules import Trigger
from outbox.times import EPOCH

MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")  # as crontab(5) counts them; 7 is Sunday too


class AnyOf:
    """Is due when one of its triggers is. APScheduler's OrTrigger never passes a DateTrigger's past date."""

    def __init__(self, triggers: Sequence[Trigger]) -> None:
        self._triggers = triggers

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime, /) -> datetime | None:
        found = [next_instant(each, now - SECOND) for each in self._triggers]
        return min((at for at in found if at is not None), default=None)


def trigger_of(text: str, zone: tzinfo) -> Trigger:
    """The trigger of a crontab expression with five fields, or of a macro such as `@daily`. Raises `ValueError`."""
    fields = MACROS.get(text.strip().lower(), text).split()
    if len(fields) != 5:
        raise ValueError(f"it has {len(fields)} fields, and must have minute, hour, day of month, month and weekday")
    minute, hour, day, month, weekday = fields

    def cron(day: str, weekday: str) -> Trigger:
        return LocalTimes(
            CronTrigger(minute=minute, hour=hour, day=day, month=month, day_of_week=weekday, second=0, timezone=zone)
        )

    weekdays = _weekdays(weekday)
    if day.startswith("*") or weekday.startswith("*"):
        return cron(day, weekdays)
    return AnyOf([cron(day, "*"), cron("*", weekdays)])


def _weekdays(field: str) -> str:
    """The weekdays as APScheduler's names."""
    days: set[int] = set()
    for part in field.lower().split(","):
        span, slash, step = part.partition("/")
        if slash and not (step.isascii() and step.isdigit() and int(step)):
            raise ValueError(f"the step of the weekday {part!r} must be a number above 0")
        first, dash, last = ("0", "-", "6") if span == "*" else span.partition("-")
        low = _weekday(first)
        high = _weekday(last) if dash else 6 if slash else low
        if high == 0 < low:
            high = 7  # a range up to Sunday
        if high < low:
            raise ValueError(f"the weekdays {part!r} are in the wrong order: the week ends with Sunday")
        days.update(day % 7 for day in range(low, high + 1, int(step) if slash else 1))
    return ",".join(WEEKDAYS[day] for day in sorted(days))


def _weekday(text: str) -> int:
    if text in WEEKDAYS:
        return WEEKDAYS.index(text)
    if not (len(text) == 1 and text in "01234567"):
        raise ValueError(f"the weekday {text!r} must be 0 to 7, or {', '.join(WEEKDAYS)}")
    return int(text)


def steady(trigger: Any) -> Trigger:
    """An app's own trigger. Raises `ValueError` if its instants are random or depend on earlier ones, or if it may search for
    them without end.
    """
    if getattr(trigger, "jitter", None):
        raise ValueError("the trigger's own jitter is random in each process: give periodic(jitter=...) instead")
    if isinstance(trigger, AndTrigger):
        raise ValueError("an AndTrigger may search without end: give one CronTrigger that has all the fields")
    inner = [steady(each) for each in getattr(trigger, "triggers", ())]
    if isinstance(trigger, OrTrigger):
        return AnyOf(inner)
    steadied: Trigger = LocalTimes(trigger) if type(trigger) is CronTrigger else trigger
    first = steadied.get_next_fire_time(None, EPOCH)
    again = None if first is None else steadied.get_next_fire_time(None, first + SECOND)
    if first is not None and again is not None and again <= first and not isinstance(trigger, DateTrigger):
        raise ValueError(
            f"{type(trigger).__name__} counts from its previous instant, and not from the time that it is given: give a"
            " CronTrigger or an IntervalTrigger"
        )
    return steadied
