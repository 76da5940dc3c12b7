"""The database's clock, the only one that decides."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, literal, select
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.functions import FunctionElement

from outbox.sql.schema.column_types import Instant
from outbox.sql.schema.rendering import renders


@renders(lambda dialect: dialect.clock)
class clock(FunctionElement[Any]):  # noqa: N801  # named as the SQL function that it renders
    """The database's clock now, not the transaction's start. On MariaDB the statement's start."""

    type = Instant()
    inherit_cache = True


@renders(lambda dialect: dialect.later)
class _Later(FunctionElement[Any]):
    type = Instant()
    inherit_cache = True


def clock_plus(delay: timedelta | BindParameter[float]) -> ColumnElement[Any]:
    """The database's clock, `delay` from now; a parameter gives it in seconds."""
    return later(clock(), delay)


def later(instant: ColumnElement[Any], by: timedelta | BindParameter[float]) -> ColumnElement[Any]:
    return _Later(instant, literal(by.total_seconds()) if isinstance(by, timedelta) else by)


def earlier(instant: ColumnElement[Any], by: timedelta) -> ColumnElement[Any]:
    return later(instant, -by)


def database_now(connection: Connection) -> datetime:
    now: datetime = connection.execute(select(clock())).scalar_one()
    return now
