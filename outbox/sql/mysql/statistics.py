"""What a MySQL server reports, where its tables for it are not those of MariaDB."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Table, text
from sqlalchemy.exc import DBAPIError

from outbox.sql.clock import database_now
from outbox.sql.mariadb.errors import PROCESS_MISSING, number_of
from outbox.sql.mariadb.statistics import Statistics
from outbox.sql.server_reports import Holder, ServerIdentity, TableHealth

TIMELINE = "LPAD(HEX(CRC32(@@GLOBAL.server_uuid)), 8, '0')"
"""A server's UUID is in a file beside its data, which a replica and a restored backup do not share."""

_IDENTITY = text(f"SELECT {TIMELINE}, DATABASE()")

_HISTORY = text("SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'")

_AS_THEY_ARE = text("SET SESSION information_schema_stats_expiry = 0")
"""Otherwise the sizes of tables may be a day old."""


class MySQLStatistics(Statistics):
    """The reports that a MySQL gives otherwise."""

    timeline = TIMELINE

    def server_identity(self, connection: Connection, meta: Table, *, reads_server: bool) -> ServerIdentity:
        """Any user may read this."""
        at = database_now(connection)
        timeline, database = connection.execute(_IDENTITY).one()
        return ServerIdentity(checked_at=at, system_identifier=None, timeline=timeline, place=meta.schema or database)

    def read_history(self, connection: Connection) -> int | None:
        """None for a user without the right PROCESS."""
        try:
            return int(connection.execute(_HISTORY).scalar_one())
        except DBAPIError as error:
            if number_of(error.orig) != PROCESS_MISSING:
                raise
            return None

    def read_holders(self, connection: Connection) -> list[Holder] | None:
        """For a user without the right the server may return no row instead of an error."""
        return None if self.read_history(connection) is None else super().read_holders(connection)

    def read_tables(self, connection: Connection, tables: Sequence[Table]) -> list[TableHealth]:
        connection.execute(_AS_THEY_ARE)
        return super().read_tables(connection, tables)

    def read_size(self, connection: Connection, table: Table) -> tuple[int | None, int]:
        connection.execute(_AS_THEY_ARE)
        return super().read_size(connection, table)

    def cluster_settings(self, connection: Connection) -> dict[str, Any]:
        return {}
