"""The dialect of MySQL: that of MariaDB, but for the statements that MySQL does not have."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Column, Connection, Row, Table, and_, delete, or_, select
from sqlalchemy.sql import ColumnElement

from outbox.sql import key_locks
from outbox.sql.dialect import Lock, Writes
from outbox.sql.mariadb.dialect import MariaDB, options_of
from outbox.sql.mysql import key_lock, settings
from outbox.sql.mysql.statistics import MySQLStatistics
from outbox.sql.schema.tables import Tables


class MySQL(MySQLStatistics, MariaDB):
    """No statement returns what it writes: it locks and reads the rows first, or counts, and reads the others afterwards."""

    name = "mysql"
    server = settings.MYSQL
    # MySQL reads all rows of a small table in spite of sql_safe_updates
    deletion = "DELETE /*+ INDEX({1} {2}) */ FROM {0}"

    # unlike MariaDB's, its JSON_EXTRACT fails for what is not JSON
    json_member = """(IF(JSON_VALID(CONVERT({0} USING utf8mb4)),
        NULLIF(JSON_UNQUOTE(JSON_EXTRACT(CONVERT({0} USING utf8mb4), CONCAT('$."', REPLACE({1}, '.', '"."'), '"'))), 'null'),
        NULL) COLLATE utf8mb4_0900_bin)"""

    writes = Writes.BATCHES
    table_options = options_of("utf8mb4_0900_bin")  # like MariaDB's, it is without PAD SPACE
    driver_to_install = "'sqlalchemy-outbox[mariadb]' and write mysql+pymysql://..."

    def delete_returning(
        self, connection: Connection, table: Table, columns: Sequence[Column[Any]], *conditions: ColumnElement[bool]
    ) -> Sequence[Row[Any]]:
        key = [*table.primary_key]
        rows = connection.execute(select(*columns, *key).where(*conditions).with_for_update(of=table)).all()
        if rows:
            keys = [and_(*(c == value for c, value in zip(key, row[len(columns) :], strict=True))) for row in rows]
            connection.execute(delete(table).where(or_(*keys)))
        return rows

    def lock_key(self, connection: Connection, tables: Tables, id: UUID) -> Lock:
        return Lock(key_lock.insert_lock(connection, tables, id), keeps_snapshot=False)

    def wait_for_key(self, connection: Connection, tables: Tables, id: UUID, budget: timedelta) -> bool:
        return key_locks.insert_lock_within(connection, tables, id, budget, key_lock.insert_lock)

    def lock_ids(self, connection: Connection, tables: Tables, ids: Sequence[UUID]) -> None:
        key_lock.lock_ids(connection, tables, ids)

    def is_galera(self, connection: Connection) -> bool:
        return False

    def session_limits(self, milliseconds: int, lock_milliseconds: int) -> str | None:
        waits = max(1, lock_milliseconds // 1000)
        return f"SET SESSION max_execution_time = {milliseconds}, innodb_lock_wait_timeout = {waits}"


DIALECT = MySQL()
