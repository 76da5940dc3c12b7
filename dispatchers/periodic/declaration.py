"""Checks what an app declares of a schedule: every process must compute the same instants from it."""

import inspect
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import pairwise
from typing import get_args
from zoneinfo import ZoneInfo

from dispatchers.periodic.instants import upcoming
from dispatchers.periodic.schedules import CatchUp, Schedule, TickFunction, Trigger
from outbox.errors import ConfigurationError
from outbox.extras import missing
from outbox.keys import check_operation
from outbox.times import EPOCH

GAPS_COMPARED = 10  # with the jitter
MAX_EXPRESSION_CHARS = 1000


def declare(
    trigger: str | Trigger,
    function: TickFunction,
    *,
    name: str | None,
    timezone: str | None,
    jitter: timedelta,
    catch_up: CatchUp,
) -> Schedule:
    """Check what an app declares. Raises `ConfigurationError`, and `InvalidValue` for a malformed name."""
    named = getattr(function, "__name__", "") if name is None else name
    check_operation(named, "schedule")
    where = f"periodic schedule {named!r}"
    if catch_up not in get_args(CatchUp):
        raise ConfigurationError(f"{where}: catch_up must be one of {', '.join(get_args(CatchUp))}, not {catch_up!r}")
    _require_arguments(where, function)
    checked, expression, zone = _checked(where, trigger, timezone)
    first = checked.get_next_fire_time(None, EPOCH)
    _require_certain(where, expression, first)
    _require_short(where, checked, jitter)
    return Schedule(
        name=named,
        expression=expression,
        trigger=checked,
        zone=zone,
        jitter=jitter,
        catch_up=catch_up,
        function=function,
    )


def _checked(where: str, trigger: object, timezone: str | None) -> tuple[Trigger, str, tzinfo]:
    """The trigger, its expression and its time zone."""
    try:
        from dispatchers.periodic import crontab
    except ModuleNotFoundError as error:
        raise missing("Operations.periodic()", "dispatcher", error) from error
    if isinstance(trigger, str):
        key = "UTC" if timezone is None else timezone
        zone = UTC if key == "UTC" else _zone(where, key)  # a host without time zones has UTC
        try:
            return crontab.trigger_of(trigger, zone), f"{' '.join(trigger.split())} {key}", zone
        except ValueError as error:
            raise ConfigurationError(
                f"{where}: {trigger!r} is no crontab expression, such as '0 9 * * MON': {error}"
            ) from None
    if timezone is not None:
        raise ConfigurationError(f"{where}: timezone= is for a crontab expression; give the trigger its own timezone")
    if not callable(getattr(trigger, "get_next_fire_time", None)):
        raise ConfigurationError(
            f"{where}: give a crontab expression, such as '0 9 * * MON', or a trigger of APScheduler 3, not {trigger!r}"
        )
    expression = repr(trigger)
    if " at 0x" in expression or len(expression) > MAX_EXPRESSION_CHARS:
        raise ConfigurationError(
            f"{where}: the trigger's repr() must be the same in each process, and have {MAX_EXPRESSION_CHARS} characters at"
            f" most, because a change of it is a change of the schedule: give {type(trigger).__name__} a __repr__"
        )
    try:
        return crontab.steady(trigger), expression, getattr(trigger, "timezone", None) or UTC
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _require_arguments(where: str, function: TickFunction) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C shows none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise ConfigurationError(
            f"{where}: its function must take two arguments, (session, tick), not {signature}"
        ) from None


def _zone(where: str, timezone: str) -> ZoneInfo:
    try:
        return ZoneInfo(timezone)
    except (KeyError, ValueError, OSError, TypeError, AttributeError):
        raise ConfigurationError(
            f"{where}: the time zone {timezone!r} is unknown: give a name such as 'Europe/Berlin'; if the name is right, this"
            " host has no time zones: pip install tzdata"
        ) from None


def _require_certain(where: str, expression: str, first: datetime | None) -> None:
    """Raise for a trigger that is never due, or whose instants differ between processes."""
    if first is None:
        raise ConfigurationError(f"{where}: {expression} is never due")
    if first.utcoffset() is None:
        raise ConfigurationError(f"{where}: {expression} is due at {first!r}, which has no time zone")
    if first.microsecond:
        raise ConfigurationError(
            f"{where}: {expression} is due at {first.isoformat()}, which is no whole second. Without a start_date, an"
            " IntervalTrigger counts from the start of each process, and the dispatchers would not agree: give it a start_date"
        )


def _require_short(where: str, trigger: Trigger, jitter: object) -> None:
    """Raise unless the jitter is shorter than the time between two instants, which would change their order."""
    if not isinstance(jitter, timedelta) or jitter < timedelta(0):
        raise ConfigurationError(f"{where}: jitter must be a timedelta of 0 s or more, not {jitter!r}")
    if not jitter:
        return
    shortest = min((b - a for a, b in pairwise(upcoming(trigger, EPOCH, GAPS_COMPARED + 1))), default=None)
    if shortest is not None and jitter >= shortest:
        raise ConfigurationError(
            f"{where}: jitter={jitter} must be shorter than the time between two instants, which is {shortest}"
        )
