"""What differs between databases: one `Dialect` for each of them.

Nothing else asks for a database's name. `dialect_of` gives the dialect of a connection or an engine. Each dialect is one class
without state, in a file of its own; CONTRIBUTING.md says what a new one must have.
"""
# ruff: noqa: B027  # the default of an operation may be to do nothing

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from enum import Enum
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol
from uuid import UUID

from sqlalchemy import URL, Column, Connection, DateTime, Engine, Row, Select, Table, delete, inspect, text
from sqlalchemy import Dialect as DriverDialect
from sqlalchemy.dialects import registry
from sqlalchemy.sql import ColumnElement
from sqlalchemy.types import TypeEngine

from outbox.errors import ConfigurationError
from outbox.sql.connections.servers import DIALECTS, refused
from outbox.sql.errors.driver import CONFLICTS, LOCK_NOT_AVAILABLE, sqlstate
from outbox.sql.server_reports import Holder, ServerIdentity, TableHealth

if TYPE_CHECKING:
    from outbox.sql.schema.tables import Tables

SUPPORTED_NAMES = "postgresql, sqlite, mariadb and mysql"

_FILES = {
    "postgresql": "outbox.sql.postgresql.dialect",
    "portable": "outbox.sql.postgresql.portable_dialect",
    "mariadb": "outbox.sql.mariadb.dialect",
    "mysql": "outbox.sql.mysql.dialect",
    "sqlite": "outbox.sql.sqlite",
}

SUPPORTED = tuple(_FILES)


for _name, _class in (
    ("portable", "PortablePsycopg"),
    ("portable.psycopg", "PortablePsycopg"),
    ("portable.psycopg_async", "PortableAsyncPsycopg"),
    ("portable.asyncpg", "PortableAsyncpg"),
):
    registry.register(_name, "outbox.sql.postgresql.portable", _class)


class _Bound(Protocol):
    """What has a dialect of SQLAlchemy: a connection, an engine, a compiler, a context of an error or of Alembic."""

    @property
    def dialect(self) -> DriverDialect: ...


def dialect_of(bind: _Bound) -> "Dialect":
    """Raises `ConfigurationError` for a database that the outbox does not run on."""
    return dialect_named(_name_of(bind.dialect))


def dialect_of_url(url: URL) -> "Dialect":
    return dialect_named(url.get_backend_name())


def dialect_if_supported(bind: _Bound) -> "Dialect | None":
    """The dialect, or None for another database: for listeners that hear of every engine of the process."""
    return dialect_of(bind) if bind.dialect.name in SUPPORTED else None


def _name_of(driver: DriverDialect) -> str:
    """The dialect's name. SQLAlchemy has one for `mysql://`, and knows after the first connection whether it is a MariaDB."""
    return "mariadb" if driver.name == "mysql" and getattr(driver, "is_mariadb", False) else driver.name


def dialect_rendered(driver: DriverDialect) -> "Dialect":
    """The dialect for text of a SQLAlchemy dialect; PostgreSQL's if there is no database, as in `str(statement)`."""
    return dialect_named(_name_of(driver) if driver.name in SUPPORTED else "postgresql")


def dialect_named(name: str) -> "Dialect":
    found = _loaded.get(name)
    return _load(name) if found is None else found


_loaded: dict[str, "Dialect"] = {}


def _load(name: str) -> "Dialect":
    """A process loads the dialects that it uses."""
    if name not in SUPPORTED:
        raise not_supported(name)
    loaded: Dialect = import_module(_FILES[name]).DIALECT
    return _loaded.setdefault(name, loaded)


class OtherDatabase(ConfigurationError):
    """The name is not that of a database that the outbox knows."""


def not_supported(database: str) -> ConfigurationError:
    if database in DIALECTS:
        return refused(DIALECTS[database])
    return OtherDatabase(f"the outbox runs on {SUPPORTED_NAMES}, not on {database!r}")


class Writes(Enum):
    """How many rows one statement writes, and which module of the store claims and settles."""

    ARRAYS = "one statement for a batch, with arrays as parameters, CTEs that write, and UPDATE ... RETURNING"
    COMPOUND = "a few statements of text for a batch, some of them BEGIN NOT ATOMIC ... END"
    BATCHES = "a few statements of text for a batch, none of which returns what it writes"
    ROWS = "plain SQL: a few statements for a batch, and one INSERT for each new entry"


class Lock(NamedTuple):
    """The result of a lock attempt: whether the lock is held now, and whether the transaction keeps its snapshot."""

    taken: bool
    keeps_snapshot: bool


class Dialect(ABC):
    """One database. What is not abstract here is what a server with plain SQL has.

    An attribute is a fact, or SQL text, in which `{0}` and `{1}` are the arguments. A method is an operation.
    """

    name: ClassVar[str]

    # --- SQL text

    clock: ClassVar[str]
    """The database's clock now, not the transaction's start."""

    later: ClassVar[str]
    """The instant {0}, {1} seconds later."""

    deletion: ClassVar[str] = "DELETE FROM {0}"
    """The beginning of a DELETE from the table {0}, whose name without a schema is {1}, that finds rows by the index {2}."""

    timeline: ClassVar[str] = "NULL"
    """What a claim compares with the stored timeline, in its own statement: it changes when a replica is promoted."""

    id_text: ClassVar[str] = "CAST({0} AS VARCHAR)"
    """The id {0} as text for an operator."""

    stored_body: ClassVar[str] = "{0}"
    """The body of a record: its column, the day of its partition, and the call that reads it from there."""

    json_member: ClassVar[str]
    """The text of the member {1}, a path with points, of the JSON object in the bytes {0}; NULL if it is not there."""

    @abstractmethod
    def filled_id(self, kept_bytes: int, digit: str) -> str:
        """The id whose first bytes are those of the id {0}, and which has this hexadecimal digit in all other places."""

    # --- facts: how entries are written and claimed

    writes: ClassVar[Writes] = Writes.ROWS

    has_functions: ClassVar[bool] = False
    """Whether the outbox has functions and a sequence of its own there: `outbox.sql.schema.functions`."""

    has_catalog: ClassVar[bool] = False
    """Whether PostgreSQL's catalogs can be asked for partitions, comments, storage parameters and plans."""

    has_lateral: ClassVar[bool] = False
    """Whether a list reads the first rows of each destination in one statement."""

    has_update_returning: ClassVar[bool] = True

    correlates_ctes: ClassVar[bool] = True
    """Whether a subquery in the SELECT list may refer to the rows of a CTE that has a subquery in its FROM."""

    has_notify: ClassVar[bool] = False
    """Whether hints go to other processes, by LISTEN and NOTIFY."""

    has_key_locks: ClassVar[bool] = False
    """Whether the lock of a key is a row of the table `key_lock`."""

    is_file: ClassVar[bool] = False
    """Whether the database is a file, with one writer, who has every lock: nothing waits for a server that does not answer."""

    # --- facts: transactions

    isolation: ClassVar[str | None] = "READ COMMITTED"
    """The level of the outbox's own transactions; None: there is one level."""

    snapshot: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Execution options of a transaction that sees one moment of the database, and cannot write where that is possible."""

    repeats_conflicts: ClassVar[bool] = False
    """Whether a transaction, or a migration, is repeated that the server ended in favour of another one."""

    requires_isolation: ClassVar[bool] = False
    """Whether a connection is refused whose transaction is at another level, also one that only reads."""

    has_limits: ClassVar[bool] = False
    """Whether each transaction has its own limits, by `set_config`: of a statement, of a wait, of silence."""

    has_settings: ClassVar[bool] = False
    """Whether `set_config` and SET LOCAL change a setting until the transaction's end."""

    is_watched: ClassVar[bool] = False
    """Whether the watchdog can break off a connection whose server is silent."""

    answer_timeouts: ClassVar[tuple[str, ...]] = ()
    """The driver's arguments that limit, in seconds, the wait for an answer; where the watchdog does not."""

    errors_quote_values: ClassVar[bool] = True
    """Whether the text of an error may quote what a statement has stored."""

    # --- facts: the server and its tables

    sessions_right: ClassVar[str | None] = None
    """The right by which a role sees the sessions of others; None without statistics of tables and sessions."""

    has_server_checks: ClassVar[bool] = False
    """Whether the doctor compares settings of the server and its cluster: `server_settings`, `cluster_settings`."""

    takes_compatible_servers: ClassVar[bool] = False
    """Whether a server that is only compatible with PostgreSQL is taken."""

    table_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Arguments of each `Table`, from when it is created."""

    driver_to_install: ClassVar[str] = "'sqlalchemy-outbox[postgresql]' and write postgresql+psycopg://..."

    commits_ddl: ClassVar[bool] = False
    """Whether each statement of a migration may commit by itself, so that one may have been interrupted."""

    hides_tables: ClassVar[bool] = False
    """Whether a table looks missing to a user without rights on it."""

    # --- types

    def instant_type(self) -> TypeEngine[Any]:
        return DateTime(timezone=True)

    def stored_instant(self, value: datetime) -> Any:
        return value

    def read_instant(self, value: Any) -> datetime:
        """The instant in UTC."""
        instant: datetime = value.astimezone(UTC)
        return instant

    def scripted_type(self, type: TypeEngine[Any]) -> TypeEngine[Any] | None:
        """The type as a script of Alembic can name it without importing the outbox; None: as on most databases."""
        return None

    # --- statements

    def transaction_start(self) -> ColumnElement[Any] | None:
        """The clock of a claim in the same transaction, if that is another one than `clock`."""
        return None

    @abstractmethod
    def insert_unless_present(self, table: Table) -> Any:
        """An INSERT that does nothing if the primary key exists. An error would end the transaction."""

    @abstractmethod
    def upsert(
        self,
        connection: Connection,
        table: Table,
        rows: Sequence[Mapping[str, Any]],
        *,
        added: Collection[str] = (),
        kept: Collection[str] = (),
    ) -> None:
        """Insert rows, or change those that exist.

        rows: all with the same columns, the primary key among them. An existing row gets the new values, except in columns that
        are `kept`, and in columns that are `added`, which get the sum of the old and the new value.
        """

    def among(self, column: Column[Any], ids: Collection[Any]) -> ColumnElement[bool]:
        """The condition that the column is one of `ids`."""
        return column.in_(ids)

    def delete(self, connection: Connection, column: Column[Any], ids: Collection[Any]) -> None:
        """Delete the rows with these ids."""
        connection.execute(delete(column.table).where(self.among(column, ids)))

    def delete_returning(
        self, connection: Connection, table: Table, columns: Sequence[Column[Any]], *conditions: ColumnElement[bool]
    ) -> Sequence[Row[Any]]:
        """Delete the rows that meet the conditions; returns these columns of them."""
        return connection.execute(delete(table).where(*conditions).returning(*columns)).all()

    def read_by_index(self, connection: Connection) -> None:
        """Make the rest of the transaction read its tables by their indexes, in the index's order.

        For a page of rows in an index's order, the planner may choose to read and sort the whole table, because its statistics
        of a queue are seldom right.
        """

    def planned_rows(self, connection: Connection, rows: Select[Any]) -> int:
        """How many rows the planner expects, from its statistics; 0 if it does not say."""
        return 0

    # --- locks

    @abstractmethod
    def lock_key(self, connection: Connection, tables: "Tables", id: UUID) -> Lock:
        """Take the transaction-level lock of `id` if it is free."""

    @abstractmethod
    def wait_for_key(self, connection: Connection, tables: "Tables", id: UUID, budget: timedelta) -> bool:
        """`lock_key` that waits, at most for `budget`. The caller can continue its transaction in each case."""

    def lock_ids(self, connection: Connection, tables: "Tables", ids: Sequence[UUID]) -> None:
        """Take the locks, waiting for each as the session waits for any row. Only where entries are written in batches."""
        raise NotImplementedError

    def is_galera(self, connection: Connection) -> bool:
        """Whether this is a node of a Galera cluster. Its locks are not those of the other nodes: a commit is refused if another
        node has committed a change of one of its rows. A row that was only locked is not compared.
        """
        return False

    def without_waiting(self, connection: Connection, write: Callable[[], bool]) -> bool:
        """The result of `write`, which skips locked rows; False if it would wait for one."""
        return write()

    # --- connections and transactions

    def require_usable(self, connection: Connection) -> None:
        """Raise `ConfigurationError` unless the database and this connection store every text and see what they must."""

    def require_prepared(self, connection: Connection) -> None:
        """Raise unless a claim can read and then write in this connection's transactions."""

    def prepare(self, engine: Engine) -> None:
        """Let an engine of our own begin its transactions so that they can read and then write."""

    def is_driver_in_autocommit(self, connection: Connection) -> bool:
        """Whether the driver commits each statement by itself."""
        opened = connection.connection.dbapi_connection
        return opened is not None and connection.dialect.detect_autocommit_setting(opened)

    def at_own_level(self, engine: Engine) -> Engine:
        """The engine, whose transactions are at the level that the outbox needs, whatever level the app's engine has."""
        return engine

    def set_usable_level(self, connection: Connection) -> None:
        """Switch an idle connection to READ COMMITTED, until it returns to its pool, if the outbox cannot write at its level."""

    def isolation_level(self, connection: Connection) -> str:
        """The level of the present transaction, or of the session, with a space between words."""
        level: str = connection.execute(_ISOLATION).scalar_one()
        return level.replace("-", " ").upper()

    def engine_settings(self, url: URL, settings: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `create_engine` for an engine of our own. settings: those of its user."""
        return settings

    def session_limits(self, milliseconds: int, lock_milliseconds: int) -> str | None:
        """The first statement of the dashboard's own connections, where limits are of the session: of a statement and a wait."""
        return None

    def place(self, engine: Engine) -> str:
        """Equal for engines of one database, if their URLs name it alike: others are reached by NOTIFY."""
        url: Any = engine.url
        host, port = url.host or url.query.get("host"), url.port or url.query.get("port")
        return f"postgresql {host} {port} {url.database or url.query.get('dbname')}"

    # --- errors

    def missing_name(self, error: BaseException, statement: str) -> tuple[str, list[str]]:
        """ "table" or "function", and the words of an error that says that one is missing; else no words."""
        kind = UNDEFINED.get(sqlstate(error) or "", "")
        return kind, words(first_line(error)) if kind else []

    def is_passing_in_statement(self, error: BaseException | None) -> bool:
        """Whether a statement of the app may succeed later without a change: the database is full, or had a conflict."""
        return (sqlstate(error) or "").startswith(_PASSING_IN_A_STATEMENT)

    # --- what the server says

    @abstractmethod
    def server_identity(self, connection: Connection, meta: Table, *, reads_server: bool) -> ServerIdentity:
        """The server's present identity. Raises DBAPIError if this user may not read it.

        reads_server: whether to ask for what only some users may read.
        """

    def suspension(self, meta: Table) -> str | None:
        """The condition, as text, that sending is suspended, or has to be; None: what is stored says it."""
        return None

    def unreadable(self, connection: Connection, columns: Sequence[Column[Any]]) -> frozenset[Column[Any]]:
        """The columns that this role may not read."""
        return frozenset()

    def read_holders(self, connection: Connection) -> list[Holder] | None:
        """What holds back the removal of dead rows, the longest first; None for a role that may not see it."""
        return []

    def read_tables(self, connection: Connection, tables: Sequence[Table]) -> list[TableHealth]:
        return []

    def read_history(self, connection: Connection) -> int | None:
        """How many transactions the server has not purged yet: a claim reads what they have deleted."""
        return None

    def read_size(self, connection: Connection, table: Table) -> tuple[int | None, int | None] | None:
        """The estimated rows of a table, and its bytes; None: they must be counted."""
        return None

    def server_settings(self, connection: Connection) -> dict[str, Any]:
        return {}

    def cluster_settings(self, connection: Connection) -> dict[str, Any]:
        return {}

    def serving_pid(self, connection: Connection) -> int | None:
        """The server's process that serves the transaction, which a pooler changes."""
        return None

    # --- migrations

    @abstractmethod
    def migrating(self, connection: Connection, *, is_callers: bool) -> AbstractContextManager[None]:
        """A block for a migration: it runs alone, and never blocks others for long."""

    @abstractmethod
    def script_frame(self, driver: DriverDialect, schema: str | None) -> tuple[list[str], list[str]]:
        """The statements before and after those of a migration, for someone who runs them by hand."""

    def why_no_schema(self, schema: str) -> str | None:
        """Why a migration cannot create a schema; None if it can."""
        return None

    def require_prefix(self, connection: Connection, prefix: str) -> None:
        """Raise ConfigurationError if the server would store the tables under other names, by which they would not be found."""

    def has_table(self, connection: Connection, name: str, schema: str | None) -> bool:
        return inspect(connection).has_table(name, schema=schema)

    def columns_of(self, connection: Connection, schema: str | None, names: Collection[str]) -> dict[str, set[str]]:
        """The names of the columns of each of these tables that exists."""
        reflected = inspect(connection).get_multi_columns(schema=schema, filter_names=[*names])
        return {name: {column["name"] for column in columns} for (_, name), columns in reflected.items()}


_ISOLATION = text("SHOW transaction_isolation")

UNDEFINED = {"42P01": "table", "42883": "function"}
"""Source: PostgreSQL, appendix A: undefined_table, undefined_function."""

# PostgreSQL, appendix A: victims of a conflict, resources, lock_timeout. Codes of lost connections are not in the list: the
# callback may use a connection to another database, so only the state of our own connection counts.
_PASSING_IN_A_STATEMENT = (*CONFLICTS, "53", LOCK_NOT_AVAILABLE)


def changes(
    table: Table, proposed: Any, columns: Collection[str], *, added: Collection[str], kept: Collection[str]
) -> dict[str, Any]:
    """The values that an upsert gives to a row that exists. proposed: the columns of the row that was not inserted."""
    left = (*table.primary_key.columns.keys(), *kept)
    replaced = {column: proposed[column] for column in columns if column not in left}
    return replaced | {column: table.c[column] + proposed[column] for column in added}


def first_line(error: BaseException) -> str:
    return str(error.args[0]).partition("\n")[0] if error.args else ""


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)
