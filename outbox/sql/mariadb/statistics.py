"""What a MariaDB server reports of itself, its sessions and the outbox's tables."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, Connection, Table, bindparam, literal, select, text
from sqlalchemy.exc import DBAPIError

from outbox.sql.clock import database_now
from outbox.sql.dialect import Dialect
from outbox.sql.errors.driver import INSUFFICIENT_PRIVILEGE, sqlstate
from outbox.sql.mariadb.errors import PROCESS_MISSING, number_of
from outbox.sql.server_reports import Holder, ServerIdentity, TableHealth

TIMELINE = "LPAD(HEX(CRC32(@@GLOBAL.gtid_slave_pos)), 8, '0')"
"""A server's position in replication changes only while it follows another one: this shows that a replica was promoted."""


class Statistics(Dialect):
    """The part of the dialect that asks the server for its reports."""

    timeline = TIMELINE

    def server_identity(self, connection: Connection, meta: Table, *, reads_server: bool) -> ServerIdentity:
        """Any user may read this. `@@server_uid` and `@@server_id` are not in it: a container that starts again may have
        others.
        """
        at = database_now(connection)
        timeline, database = connection.execute(_IDENTITY).one()
        status = {name.upper(): value for name, value in connection.execute(_STATUS)}
        cluster = status.get("WSREP_CLUSTER_STATE_UUID", "").replace("-", "")
        replicates = status["SLAVES_RUNNING"] != "0"  # the position moves
        return ServerIdentity(
            checked_at=at,
            system_identifier=cluster or None,
            timeline=None if cluster or replicates else timeline,
            place=meta.schema or database,
        )

    def unreadable(self, connection: Connection, columns: Sequence[Column[Any]]) -> frozenset[Column[Any]]:
        may_read = text(
            "SELECT column_name AS name FROM information_schema.columns"
            " WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name AND FIND_IN_SET('select', privileges)"
        )
        tables = {column.table for column in columns if isinstance(column.table, Table)}
        readable = {
            (table, row.name)
            for table in tables
            for row in connection.execute(may_read, {"schema": table.schema, "name": table.name})
        }
        for table in tables - {table for table, _ in readable}:
            _require_table(connection, table)
        return frozenset(column for column in columns if (column.table, column.name) not in readable)

    def read_holders(self, connection: Connection) -> list[Holder] | None:
        try:
            return [Holder(row.what, float(row.held)) for row in connection.execute(_HOLDERS)]
        except DBAPIError as error:
            if number_of(error.orig) != PROCESS_MISSING:
                raise
            return None

    def read_history(self, connection: Connection) -> int | None:
        """Any user may read it."""
        return int(connection.execute(_HISTORY).scalar_one())

    def read_tables(self, connection: Connection, tables: Sequence[Table]) -> list[TableHealth]:
        names = {"schema": tables[0].schema, "tables": [table.name for table in tables]}
        return [
            TableHealth(row.name, row.alive, 0, vacuums=True, heap_bytes=row.heap, index_bytes=row.indexes)
            for row in connection.execute(_TABLES, names)
        ]

    def read_size(self, connection: Connection, table: Table) -> tuple[int | None, int]:
        rows, size_bytes = connection.execute(_SIZE, {"schema": table.schema, "table": table.name}).one()
        return rows, size_bytes

    def server_settings(self, connection: Connection) -> dict[str, Any]:
        found = dict(connection.execute(_SERVER_SETTINGS).one()._mapping)
        if not found.pop("log_bin"):
            del found["sync_binlog"]
        return found

    def cluster_settings(self, connection: Connection) -> dict[str, Any]:
        return {name.lower(): value for name, value in connection.execute(_GALERA_SETTINGS)}


def _require_table(connection: Connection, table: Table) -> None:
    """Raise `SchemaError` if the table does not exist, unless this role has no right by which to know."""
    try:
        connection.execute(select(literal(1)).select_from(table).limit(0))
    except DBAPIError as error:
        if sqlstate(error.orig) != INSUFFICIENT_PRIVILEGE:
            raise


_IDENTITY = text(f"SELECT {TIMELINE}, DATABASE()")
_STATUS = text(
    "SELECT variable_name, variable_value FROM information_schema.global_status"
    " WHERE variable_name IN ('SLAVES_RUNNING', 'WSREP_CLUSTER_STATE_UUID')"
)

_HISTORY = text(
    "SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'INNODB_HISTORY_LIST_LENGTH'"
)

_TABLES = text(
    "SELECT table_name AS name, table_rows AS alive, data_length AS heap, index_length AS indexes FROM information_schema.tables"
    " WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name IN :tables ORDER BY table_name"
).bindparams(bindparam("tables", expanding=True))

# One at READ COMMITTED keeps old versions only while a statement of it runs.
_HOLDERS = text(
    "SELECT CONCAT('the session ', p.id, ' of ', p.user, ' at ', t.trx_isolation_level) AS what,"
    " TIMESTAMPDIFF(SECOND, CONVERT_TZ(t.trx_started, 'SYSTEM', '+00:00'), UTC_TIMESTAMP()) AS held"
    " FROM information_schema.innodb_trx AS t JOIN information_schema.processlist AS p ON p.id = t.trx_mysql_thread_id"
    " WHERE p.id <> CONNECTION_ID()"
    " AND (t.trx_isolation_level IN ('REPEATABLE READ', 'SERIALIZABLE') OR t.trx_query IS NOT NULL)"
    " ORDER BY held DESC"
)

_SIZE = text(
    "SELECT table_rows, data_length + index_length FROM information_schema.tables"
    " WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :table"
)

_SERVER_SETTINGS = text(
    "SELECT @@GLOBAL.innodb_flush_log_at_trx_commit AS innodb_flush_log_at_trx_commit, @@GLOBAL.sync_binlog AS sync_binlog,"
    " @@GLOBAL.max_allowed_packet AS max_allowed_packet, @@GLOBAL.wait_timeout AS wait_timeout, @@GLOBAL.log_bin AS log_bin"
)

_GALERA_SETTINGS = text(
    "SELECT variable_name, variable_value FROM information_schema.global_variables"
    " WHERE variable_name LIKE 'WSREP%' OR variable_name IN ('READ_ONLY', 'BINLOG_FORMAT', 'INNODB_AUTOINC_LOCK_MODE')"
    " UNION ALL SELECT variable_name, variable_value FROM information_schema.global_status WHERE variable_name"
    " IN ('WSREP_CLUSTER_SIZE', 'WSREP_CLUSTER_STATUS', 'WSREP_LOCAL_STATE_COMMENT')"
)
