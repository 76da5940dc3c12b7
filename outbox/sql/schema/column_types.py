"""The types of columns that differ between databases by more than a name."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BINARY, DateTime, Dialect, LargeBinary, Text, TypeDecorator, Uuid
from sqlalchemy.types import TypeEngine

from outbox.sql.dialect import dialect_rendered

_SERVERS = ("mariadb", "mysql")
_LONG = 2**32 - 1  # their own TEXT and BLOB hold 64 KiB; of this length they are LONGTEXT and LONGBLOB


class _BinaryUuid(TypeDecorator[UUID]):
    """Sixteen bytes, in their own order. MariaDB's UUID begins with 10.7, and orders some versions by other bytes than the first,
    where our ids of one parent must be neighbours (`outbox.sql.schema.parent_index`).
    """

    impl = BINARY(16)
    cache_ok = True

    def process_bind_param(self, value: UUID | None, dialect: Dialect) -> Any:
        return None if value is None else value.bytes

    def process_result_value(self, value: Any, dialect: Dialect) -> UUID | None:
        return None if value is None else UUID(bytes=bytes(value))


ID: Uuid[UUID] = Uuid().with_variant(_BinaryUuid(), *_SERVERS)
LONG_TEXT = Text().with_variant(Text(_LONG), *_SERVERS)
LONG_BINARY = LargeBinary().with_variant(LargeBinary(_LONG), *_SERVERS)


class Instant(TypeDecorator[datetime]):
    """An aware UTC datetime: `timestamptz` on PostgreSQL; whole microseconds since 1970 on SQLite, and DATETIME(6) in UTC on
    MariaDB and MySQL, which have no such type.
    """

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect_rendered(dialect).instant_type()

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        return None if value is None else dialect_rendered(dialect).stored_instant(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else dialect_rendered(dialect).read_instant(value)
