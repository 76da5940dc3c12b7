"""The settings that a MariaDB server and session must have. The server is asked once for each pooled connection."""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet

from sqlalchemy import Connection, Engine, LargeBinary, TextClause, bindparam, event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import OperationalError, TimeoutError

from outbox.errors import ConfigurationError, NoTransaction, OutboxError
from outbox.sql.dialect import dialect_of
from outbox.sql.mariadb.errors import LOCK_WAIT_TIMEOUT, leaves_cluster, number_of, undoes_transaction

_CHECKED = "sqlalchemy-outbox mariadb"
"""The key in a pooled connection's `info` for a connection that was checked."""

_LEVEL = "sqlalchemy-outbox mariadb level"
"""The key for its session's own isolation level, once a transaction without another one has asked for it."""

_IS_GALERA = "sqlalchemy-outbox galera"
"""The key for whether the connection leads to a node of a Galera cluster."""

_APPLIED = "sqlalchemy-outbox galera applied"
"""The key for the last transaction that waited for its node."""

_SETTINGS = text(
    "SELECT version(), @@sql_mode, @@innodb_rollback_on_timeout, CHARSET(:bytes), @@log_bin AND @@binlog_format = 'STATEMENT',"
    " @@character_set_client, @@character_set_connection, @@character_set_results"
).bindparams(bindparam("bytes", b"", type_=LargeBinary))


class Server(NamedTuple):
    """What to ask a server, and what it is called.

    settings: asks for what `_check` reads. isolation: asks for the session's level. check: of what else each connection needs.
    """

    product: str
    version_min: tuple[int, ...]
    settings: TextClause
    isolation: TextClause
    check: Callable[[Connection], None]


def require_settings(connection: Connection, server: Server) -> None:
    """Raise `ConfigurationError` unless the server is one that the outbox runs on, the session writes what it is given, and the
    transaction is at READ COMMITTED.
    """
    if was_undone(connection):
        raise NoTransaction(
            f"{server.product} has undone this transaction, after a deadlock with another one, or a part of it, after another"
            " error: roll the session back and run the transaction again"
        )
    pooled: Any = connection.connection
    if _CHECKED not in pooled.info:
        _require_driver(connection, server)
        _check(connection, server)
        server.check(connection)
        pooled.info[_CHECKED] = True
    _require_read_committed(_level(connection, server), server.product)


def is_at_read_committed(connection: Connection, server: Server) -> bool:
    return _plain(_level(connection, server)) == "READ COMMITTED"


def _level(connection: Connection, server: Server) -> str:
    level: str = connection.get_execution_options().get("isolation_level") or _session_level(connection, server)
    return level


def _session_level(connection: Connection, server: Server) -> str:
    """The session's own level. Not asked while SQLAlchemy has set another one, which it resets when the pool gets it back."""
    pooled: Any = connection.connection
    if _LEVEL not in pooled.info:
        pooled.info[_LEVEL] = connection.execute(server.isolation).scalar_one()
    level: str = pooled.info[_LEVEL]
    return level


def is_galera_node(connection: Connection) -> bool:
    """Whether this is a node of a Galera cluster. Its locks are not those of the other nodes: a commit is refused if another node
    has committed a change of one of its rows. A row that was only locked is not compared.
    """
    pooled: Any = connection.connection
    if _IS_GALERA not in pooled.info:
        pooled.info[_IS_GALERA] = _is_replicated(connection)
    return bool(pooled.info[_IS_GALERA])


def _is_replicated(connection: Connection) -> bool:
    """Whether this is Galera. Then the new connection may lead to another node, and waits for what the others committed."""
    is_replicated = bool(connection.execute(_REPLICATED).scalar())
    if is_replicated:
        apply_all(connection)
    return is_replicated


def apply_all(connection: Connection) -> None:
    """Wait until this Galera node has applied what the others have committed. Within a transaction the server does not wait, so
    call it at the beginning of one.
    """
    try:
        connection.execute(_APPLY_ALL)
    except OperationalError as error:
        if number_of(error.orig) != LOCK_WAIT_TIMEOUT:
            raise
        raise NodeLags(
            "this Galera node has not applied in time what the other nodes have committed: use another node until it has"
        ) from error
    connection.info[_APPLIED] = connection.get_transaction()


def require_applied(connection: Connection) -> None:
    """Raise `Unseen` on a Galera node, unless `apply_all` was called in this transaction."""
    if (
        dialect_of(connection).is_galera(connection)
        and connection.info.get(_APPLIED) is not connection.get_transaction()
    ):
        raise Unseen


class Unseen(Exception):
    """A row is not here that another connection has committed, perhaps on a node that is ahead. Run the transaction again, after
    `apply_all`.
    """


class NodeLags(OutboxError, TimeoutError):
    """The server reports this wait as that for a row's lock, which another try with fewer rows might avoid."""


def _note_galera(connection: Connection) -> None:
    connection.connection.info[_IS_GALERA] = _is_replicated(connection)


_REPLICATED = text(
    "SELECT variable_value = 'ON' FROM information_schema.session_variables WHERE variable_name = 'WSREP_ON'"
)
_APPLY_ALL = text("SET STATEMENT wsrep_sync_wait = 1 FOR SELECT 1")


MARIADB = Server(
    "MariaDB",
    (10, 6, 3),  # the first stable release with SKIP LOCKED, and with an innodb_lock_wait_timeout of 0
    _SETTINGS,
    text("SELECT @@tx_isolation"),
    _note_galera,
)


def _require_driver(connection: Connection, server: Server) -> None:
    if (driver := connection.dialect.driver) not in _DRIVERS:
        raise ConfigurationError(
            f"the driver is {driver}, and the outbox runs on {server.product} with {', '.join(_DRIVERS)} only, whose errors it"
            " knows: write +pymysql:// in the URL, or +asyncmy:// for asyncio"
        )


_DRIVERS = ("pymysql", "mysqldb", "asyncmy")
"""As SQLAlchemy calls them: mysqldb is mysqlclient."""


def _check(connection: Connection, server: Server) -> None:
    version, modes, undoes, bytes_as, by_statement, *character_sets = connection.execute(server.settings).one()
    found = connection.dialect.server_version_info or ()
    if tuple(found[:3]) < server.version_min:
        least = ".".join(map(str, server.version_min))
        raise ConfigurationError(f"the outbox needs {server.product} {least} or later, not {version}")
    if not {"STRICT_TRANS_TABLES", "STRICT_ALL_TABLES"} & set(modes.split(",")):
        raise ConfigurationError(
            f"sql_mode lacks STRICT_TRANS_TABLES, so {server.product} would cut off values that are too long: leave sql_mode at"
            " its default"
        )
    if any(mode in modes for mode in _OTHER_SQL):
        raise ConfigurationError(f"sql_mode has {' or '.join(_OTHER_SQL)}: leave it at its default")
    if {*character_sets} != {"utf8mb4"}:
        (other, *_) = sorted({*character_sets} - {"utf8mb4"}, key=str)
        raise ConfigurationError(
            f"the connection's character set is {other}, and the outbox needs utf8mb4: leave `charset` out of the URL, and set"
            " none of character_set_client, character_set_connection and character_set_results to another one"
        )
    if bytes_as != "binary":
        raise ConfigurationError(
            "the driver sends bytes as text, so no key would be found: add ?binary_prefix=1 to the URL, which mysqlclient needs"
        )
    if undoes:
        raise ConfigurationError(
            "innodb_rollback_on_timeout is on, so a lock that is not free would undo the transaction: leave it at its default"
        )
    if by_statement:
        raise ConfigurationError(
            "binlog_format is STATEMENT, in which InnoDB writes nothing at READ COMMITTED: set it to MIXED, its default, or ROW"
        )


_OTHER_SQL = ("NO_BACKSLASH_ESCAPES", "ANSI_QUOTES", "EMPTY_STRING_IS_NULL")
"""The modes in which the outbox's statements mean something else."""


def _require_read_committed(level: str, product: str) -> None:
    """At REPEATABLE READ, the servers' default, a transaction would not see what the last holder of a key's lock has committed,
    and an index's gaps would be locked, so that transactions with different keys would deadlock. In autocommit each statement
    sees what is committed.
    """
    if _plain(level) not in ("READ COMMITTED", "AUTOCOMMIT"):
        raise ConfigurationError(
            f"the transaction is at {level}, and on {product} the outbox needs READ COMMITTED:"
            ' create_engine(url, isolation_level="READ COMMITTED")'
        )


def _plain(level: str) -> str:
    return level.replace("-", " ").replace("_", " ").upper()


# --- transactions that the server has ended

_undone: WeakSet[Any] = WeakSet()


def was_undone(connection: Connection) -> bool:
    """Whether the server has undone the connection's transaction. It accepts statements nevertheless, in a new one, so that an
    app that catches the error could commit the second half of its work.
    """
    return bool(_undone) and not _undone.isdisjoint((connection.get_transaction(), connection.get_nested_transaction()))


def note_undone(connection: Connection) -> None:
    """Note that the connection's transaction, or its innermost savepoint, has lost a part of what it has written."""
    transaction = connection.get_nested_transaction() or connection.get_transaction()
    if transaction is not None:
        _undone.add(transaction)


@event.listens_for(Engine, "handle_error")
def _note_undoing(context: ExceptionContext) -> None:
    if context.connection is not None and undoes_transaction(context.original_exception):
        transaction = context.connection.get_transaction()
        if transaction is not None:
            _undone.add(transaction)
    if leaves_cluster(context.original_exception):
        context.is_disconnect = (
            True  # the node refuses the ROLLBACK too, and a proxy leads a new connection to another node
        )
