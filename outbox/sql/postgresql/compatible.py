"""The common part of PostgreSQL and of the servers that are compatible with it."""

from typing import Any

from sqlalchemy import Table
from sqlalchemy.dialects.postgresql import insert

from outbox.sql.on_conflict import OnConflict


class Compatible(OnConflict):
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

    def insert(self, table: Table) -> Any:
        return insert(table)
