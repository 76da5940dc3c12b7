"""The common part of PostgreSQL and of the servers that are compatible with it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects.postgresql import insert

from outbox.sql.dialect import Dialect
from outbox.sql.statements import on_conflict_do_update


class Compatible(Dialect):
    """The SQL that both take."""

    clock = "clock_timestamp()"
    # PostgreSQL reads no JSON with an escaped NUL, whichever member is asked for: one such payload would end the statement.
    json_member = (
        r"(CAST(regexp_replace(convert_from({0}, 'UTF8'), '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g') AS json)"
        r" #>> string_to_array(CAST({1} AS text), '.'))"
    )

    has_settings = True
    is_watched = True

    def filled_id(self, kept_bytes: int, digit: str) -> str:
        rest = digit * (32 - 2 * kept_bytes)
        return f"CAST(left(CAST({{0}} AS text), {2 * kept_bytes}) || '{rest}' AS uuid)"

    def insert_unless_present(self, table: Table) -> Any:
        return insert(table).on_conflict_do_nothing(index_elements=list(table.primary_key))

    def upsert(
        self,
        connection: Connection,
        table: Table,
        rows: Sequence[Mapping[str, Any]],
        *,
        added: Collection[str] = (),
        kept: Collection[str] = (),
    ) -> None:
        connection.execute(on_conflict_do_update(insert(table), table, rows, added=added, kept=kept))
