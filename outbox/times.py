"""Instants: how the database stores them, and the few that mean something. Pure."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, DateTime, Dialect, TypeDecorator
from sqlalchemy.types import TypeEngine

NEVER = datetime(9999, 12, 31, tzinfo=UTC)
"""The due time of what must not be claimed. PostgreSQL's own 'infinity' cannot be read back by its drivers."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


class Instant(TypeDecorator[datetime]):
    """An aware UTC datetime: `timestamptz` on PostgreSQL; whole microseconds since 1970 on SQLite, which has no such type."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return BigInteger() if dialect.name == "sqlite" else DateTime(timezone=True)

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        return (value - EPOCH) // MICROSECOND if value is not None and dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        instant: datetime = EPOCH + value * MICROSECOND if dialect.name == "sqlite" else value.astimezone(UTC)
        return instant
