"""Instants, how the database stores them, and the lengths of time that an app may give. Pure."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, DateTime, Dialect, TypeDecorator
from sqlalchemy.types import TypeEngine

from outbox.errors import InvalidValue

NEVER = datetime(9999, 12, 31, tzinfo=UTC)
"""The due time of what must not be claimed. PostgreSQL's own 'infinity' cannot be read back by its drivers."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


class Instant(TypeDecorator[datetime]):
    """An aware UTC datetime: `timestamptz` on PostgreSQL; whole microseconds since 1970 on SQLite, and DATETIME(6) in UTC on
    MariaDB, which have no such type.
    """

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "mariadb":
            from sqlalchemy.dialects.mysql import DATETIME  # it takes 40 ms, so other databases do not load it

            return DATETIME(fsp=6)
        return BigInteger() if dialect.name == "sqlite" else DateTime(timezone=True)

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if dialect.name in ("postgresql", "portable") or value is None:
            return value
        return (
            (value - EPOCH) // MICROSECOND if dialect.name == "sqlite" else value.astimezone(UTC).replace(tzinfo=None)
        )

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if dialect.name in ("postgresql", "portable"):
            instant: datetime = value.astimezone(UTC)
        else:
            instant = EPOCH + value * MICROSECOND if dialect.name == "sqlite" else _from_mariadb(value)
        return instant


def _from_mariadb(value: datetime | str) -> datetime:
    # text for a parameter in a list of columns
    naive = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return naive.replace(tzinfo=UTC)


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
