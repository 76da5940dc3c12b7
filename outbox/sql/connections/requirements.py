"""Requirements for a connection before the outbox uses it: its encoding and dates, the schema of its tables, and the locks of its
transaction.
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, text

from outbox.errors import ConfigurationError
from outbox.sql.connections.forks import require_own
from outbox.sql.connections.servers import banner_of, refuse_other_host, refuse_other_server
from outbox.sql.dialect import dialect_of

_LEVEL = "sqlalchemy-outbox portable"
"""The key in a pooled connection's `info` for its isolation level, once a connection of the portable mode was checked."""

_IS_UTF8 = "sqlalchemy-outbox utf8"
"""The key in a pooled connection's `info` for a connection that was checked."""


def require_connection(connection: Connection, schema: str | None) -> None:
    """Raise `ConfigurationError` unless the connection leads to our tables in `schema`, and writes text in UTF-8."""
    require_schema(connection.get_execution_options(), schema)
    require_utf8(connection)


def require_utf8(connection: Connection) -> None:
    """Raise `ConfigurationError` unless a PostgreSQL database, and this connection to it, write text in UTF-8; or unless a
    MariaDB is set as it must be. A server that is another database is refused by its name.

    A connection that another process has opened is refused too.

    Keys are derived from UTF-8, and services answer in UTF-8. Another encoding could not store every text, and would change
    some without an error. Each pooled connection is checked once. psycopg and asyncpg need no query for it.
    """
    require_own(connection)
    dialect_of(connection).require_usable(connection)


def require_encodings(connection: Connection) -> None:
    """Raise unless this server is PostgreSQL, and its encodings are UTF-8."""
    pooled: Any = connection.connection
    if _IS_UTF8 in pooled.info:
        return
    refuse_other_host(connection.engine.url)
    refuse_other_server(banner_of(pooled.driver_connection))
    _require_encodings(connection)
    pooled.info[_IS_UTF8] = True


def require_portable(connection: Connection) -> None:
    """Raise `ConfigurationError` unless a transaction of the portable mode is at SERIALIZABLE, on a server for this mode."""
    pooled: Any = connection.connection
    if _LEVEL not in pooled.info:
        refuse_other_host(connection.engine.url)
        refuse_other_server(banner_of(pooled.driver_connection), portable=True)
        _require_encodings(connection)
        pooled.info[_LEVEL] = connection.execute(text("SHOW transaction_isolation")).scalar_one()
    level = connection.get_execution_options().get("isolation_level") or pooled.info[_LEVEL]
    if level.upper() not in ("SERIALIZABLE", "AUTOCOMMIT"):
        raise ConfigurationError(
            f"the transaction is at {level}, and in the portable mode the outbox needs SERIALIZABLE, the default of"
            " portable+psycopg://: leave isolation_level out of create_engine"
        )


def _require_encodings(connection: Connection) -> None:
    server, client = _encodings(connection)
    refuse_other_encoding(server)
    if "".join(filter(str.isalnum, client or "")).upper() not in _UTF8_CLIENTS:
        raise ConfigurationError(
            f"the connection's client_encoding is {client}, and the outbox needs UTF8: leave client_encoding out of the URL,"
            " of create_engine and of PGCLIENTENCODING, or set it to utf8"
        )


def refuse_other_encoding(server: str | None) -> None:
    """Raise `ConfigurationError` for a database in another encoding than UTF-8."""
    if server != "UTF8":
        raise ConfigurationError(
            f"the database's encoding is {server}, and the outbox needs UTF8: it could not store every key and every answer;"
            " create the database with ENCODING 'UTF8', and restore its dump there"
        )


def _encodings(connection: Connection) -> tuple[str | None, str | None]:
    driver: Any = connection.connection.driver_connection
    match connection.dialect.driver:
        case "psycopg" | "psycopg_async":
            found = driver.info.parameter_status("server_encoding"), driver.info.parameter_status("client_encoding")
        case "asyncpg":
            settings = driver.get_settings()
            found = getattr(settings, "server_encoding", None), getattr(settings, "client_encoding", None)
        case _:
            found = None, None
    if all(found):  # a proxy may omit them
        return found
    server, client = connection.execute(_ASKED).one()
    return server, client


def write_iso_dates(connection: Connection) -> None:
    """Whatever DateStyle an app's own engine has: psycopg reads instants in ISO's style only. Until the transaction's end.

    It asks the server nothing, and changes nothing where the style is ISO's, as it is by default.
    """
    if connection.dialect.driver not in ("psycopg", "psycopg_async"):
        return
    driver: Any = connection.connection.driver_connection
    if not (driver.info.parameter_status("DateStyle") or "ISO").startswith("ISO"):
        connection.execute(_ISO_DATES)


_ISO_DATES = text("SET LOCAL DateStyle = ISO")
_UTF8_CLIENTS = ("UTF8", "UNICODE")
"""The names of UTF-8. PostgreSQL reports its own name for other spellings such as `utf-8`, but reports UNICODE unchanged.
PgBouncer reports the client's text: asyncpg's `'utf-8'`, with the quotes.
Source: check_client_encoding in its src/backend/commands/variable.c, and clean_encoding_name in its src/common/encnames.c.
"""

_ASKED = text("SELECT current_setting('server_encoding'), current_setting('client_encoding')")


def require_schema(options: Mapping[str, Any], schema: str | None) -> None:
    """Raise `ConfigurationError` if these execution options lead our tables to another schema than `schema`.

    SQLAlchemy translates the schema in its own constructs only, not in SQL text. So writes and reads could use two schemas.
    """
    translated = options.get("schema_translate_map")
    if translated and translated.get(schema, schema) != schema:
        raise ConfigurationError(
            f"schema_translate_map replaces schema {schema!r}, which contains the outbox's tables, by {translated[schema]!r}:"
            " put the tables into a schema that the map does not name, and set outbox.configure(schema=...); or, if each"
            " tenant has its own tables, create one outbox.Outbox for each tenant's schema"
        )


class LockBudget:
    """How many locks one transaction may take, of a kind that it keeps to its end.

    All of a server's databases share PostgreSQL's lock table: max_locks_per_transaction times max_connections places, 6,400 by
    default. A transaction that fills it makes every other one fail. Locks that a savepoint's rollback gave back stay counted.
    """

    def __init__(self, max_locks: int) -> None:
        self.max_locks = max_locks
        self._taken: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def take(self, connection: Connection, locks: int) -> bool:
        """Whether the connection's transaction may take so many more; if so, they are counted."""
        transaction = connection.get_transaction() or connection
        taken = self._taken.get(transaction, 0) + locks
        if taken > self.max_locks:
            return False
        self._taken[transaction] = taken
        return True
