"""The dialect of MariaDB, with or without Galera; that of MySQL changes a part of it."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any
from uuid import UUID

from sqlalchemy import BINARY, URL, Column, Connection, LargeBinary, Table, Text, Uuid, insert, inspect, text
from sqlalchemy import Dialect as DriverDialect
from sqlalchemy.dialects import mysql
from sqlalchemy.types import TypeEngine

from outbox.errors import ConfigurationError
from outbox.sql import key_locks, migration_locks
from outbox.sql.connections.transactions import is_in_autocommit
from outbox.sql.dialect import UNDEFINED, Lock, Writes, changes, words
from outbox.sql.errors.driver import sqlstate
from outbox.sql.mariadb import settings as mariadb_settings
from outbox.sql.mariadb.statistics import Statistics
from outbox.sql.schema.column_types import Instant
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import deleting_by_index

SHORT_WAITS = "SET SESSION innodb_lock_wait_timeout = 5"
"""The default is 50 s, and a dispatcher waits for an app that has locked the next entry of an ordering group."""

_MYSQLCLIENT = {"binary_prefix": True}
"""What mysqlclient needs, SQLAlchemy's default for `mariadb://`: without this it sends bytes as text."""


def options_of(collation: str) -> Mapping[str, str]:
    """The options of a table, under each of SQLAlchemy's names for the server: a URL may be `mariadb://` or `mysql://`."""
    options = {"engine": "InnoDB", "charset": "utf8mb4", "collate": collation}
    names = ("mariadb", "mysql")
    return MappingProxyType({f"{name}_{option}": value for name in names for option, value in options.items()})


class MariaDB(Statistics):
    """READ COMMITTED, with locks that are rows; a batch is a few statements of text."""

    name = "mariadb"
    server = mariadb_settings.MARIADB
    deletion = "SET STATEMENT sql_safe_updates = 1 FOR DELETE FROM {0}"

    clock = "UTC_TIMESTAMP(6)"  # the statement's start
    later = "{0} + INTERVAL ROUND({1} * 1000000) MICROSECOND"
    json_member = """(NULLIF(JSON_UNQUOTE(JSON_EXTRACT(CONVERT({0} USING utf8mb4),
        CONCAT('$."', REPLACE({1}, '.', '"."'), '"'))), 'null') COLLATE utf8mb4_nopad_bin)"""

    id_text = "LOWER(HEX({0}))"  # a cast shows the bytes, and on MySQL it is NULL if they are not UTF-8

    writes = Writes.COMPOUND
    has_update_returning = False
    correlates_ctes = False
    has_key_locks = True
    # At READ COMMITTED, which it requires, its snapshot would be that of each statement.
    snapshot = MappingProxyType({"isolation_level": "REPEATABLE READ"})
    requires_isolation = True
    answer_timeouts = ("read_timeout", "write_timeout")
    sessions_right = "GRANT PROCESS ON *.* TO it"
    has_server_checks = True
    # Under its other collations keys are equal that differ in case, accents or spaces at the end.
    table_options = options_of("utf8mb4_nopad_bin")
    driver_to_install = "'sqlalchemy-outbox[mariadb]' and write mariadb+pymysql://..."
    commits_ddl = True
    hides_tables = True

    def filled_id(self, kept_bytes: int, digit: str) -> str:
        return f"CONCAT(SUBSTR({{0}}, 1, {kept_bytes}), X'{digit.upper() * (32 - 2 * kept_bytes)}')"

    def instant_type(self) -> TypeEngine[Any]:
        return mysql.DATETIME(fsp=6)

    def stored_instant(self, value: datetime) -> Any:
        return value.astimezone(UTC).replace(tzinfo=None)

    def read_instant(self, value: Any) -> datetime:
        """The instant in UTC. A value is text if it was a parameter in a list of columns."""
        naive = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        return naive.replace(tzinfo=UTC)

    def scripted_type(self, type: TypeEngine[Any]) -> TypeEngine[Any] | None:
        """The type as the server names it after our migrations, because Alembic compares these names."""
        if isinstance(type, Instant):
            return mysql.DATETIME(fsp=6)
        if isinstance(type, Uuid):
            return BINARY(16)
        if isinstance(type, LargeBinary):
            return mysql.TINYBLOB() if type.length else mysql.LONGBLOB()
        return mysql.LONGTEXT() if isinstance(type, Text) else None

    def insert_unless_present(self, table: Table) -> Any:
        """IGNORE also lets pass what is too long or breaks a CHECK: insert only what was checked. ON DUPLICATE KEY UPDATE would
        count an existing row as written, because SQLAlchemy asks the drivers for the number of rows found.
        """
        return insert(table).prefix_with("IGNORE")

    def upsert(
        self,
        connection: Connection,
        table: Table,
        rows: Sequence[Mapping[str, Any]],
        *,
        added: Collection[str] = (),
        kept: Collection[str] = (),
    ) -> None:
        inserting = mysql.insert(table).values(rows)
        changed = changes(table, inserting.inserted, rows[0], added=added, kept=kept)
        connection.execute(inserting.on_duplicate_key_update(changed))

    def delete(self, connection: Connection, column: Column[Any], ids: Collection[Any]) -> None:
        connection.execute(deleting_by_index(connection.dialect, column), {"ids": list(ids)})

    def lock_key(self, connection: Connection, tables: Tables, id: UUID) -> Lock:
        return Lock(key_locks.insert_lock(connection, tables, id), keeps_snapshot=False)

    def wait_for_key(self, connection: Connection, tables: Tables, id: UUID, budget: timedelta) -> bool:
        return key_locks.insert_lock_within(connection, tables, id, budget)

    def lock_ids(self, connection: Connection, tables: Tables, ids: Sequence[UUID]) -> None:
        key_locks.lock_ids(connection, tables, ids)

    def is_galera(self, connection: Connection) -> bool:
        return mariadb_settings.is_galera_node(connection)

    def require_usable(self, connection: Connection) -> None:
        mariadb_settings.require_settings(connection, self.server)

    def set_usable_level(self, connection: Connection) -> None:
        is_usable = mariadb_settings.is_at_read_committed(connection, self.server) and not is_in_autocommit(connection)
        connection.rollback()  # the question has begun a transaction
        if not is_usable:
            connection.execution_options(isolation_level=self.isolation)

    def isolation_level(self, connection: Connection) -> str:
        """The isolation level of the session."""
        level: str = connection.execute(self.server.isolation).scalar_one()
        return level.replace("-", " ").upper()

    def engine_settings(self, url: URL, settings: dict[str, Any]) -> dict[str, Any]:
        driver = _MYSQLCLIENT if url.get_driver_name() == "mysqldb" else {}
        waits = {} if "init_command" in url.query else {"init_command": SHORT_WAITS}
        given = driver | waits | settings.get("connect_args", {})
        return {"isolation_level": "READ COMMITTED"} | settings | {"connect_args": given}  # see `mariadb_settings`

    def session_limits(self, milliseconds: int, lock_milliseconds: int) -> str | None:
        limits = {"max_statement_time": milliseconds / 1000, "innodb_lock_wait_timeout": lock_milliseconds // 1000}
        return "SET SESSION " + ", ".join(f"{name} = {value}" for name, value in limits.items())

    def missing_name(self, error: BaseException, statement: str) -> tuple[str, list[str]]:
        kind = UNDEFINED.get(sqlstate(error) or "", "")
        # SQLAlchemy itself asks so whether a table exists, and needs this error
        is_inspection = statement.startswith(("DESCRIBE", "SHOW"))
        return kind, words(str(error.args[-1])) if kind and not is_inspection else []

    def migrating(self, connection: Connection, *, is_callers: bool) -> AbstractContextManager[None]:
        return migration_locks.alone_in_session(connection)

    def script_frame(self, driver: DriverDialect, schema: str | None) -> tuple[list[str], list[str]]:
        """Only settings: each statement commits by itself."""
        return [migration_locks.MARIADB_SESSION], []

    def why_no_schema(self, schema: str) -> str | None:
        product = self.server.product
        return (
            f"on {product} a schema is a database, and there is none named {schema!r}: leave it out, or create it first"
        )

    def require_prefix(self, connection: Connection, prefix: str) -> None:
        if prefix == prefix.lower() or connection.scalar(text("SELECT @@lower_case_table_names")) != 1:
            return
        raise ConfigurationError(
            f"the prefix {prefix!r} has capital letters, and this server stores the names of tables in lower case"
            f" (lower_case_table_names is 1): use the prefix {prefix.lower()!r}"
        )

    def has_table(self, connection: Connection, name: str, schema: str | None) -> bool:
        """A role gets an error when it asks for a table that does not exist."""
        return name in inspect(connection).get_table_names(schema=schema)


DIALECT = MariaDB()
