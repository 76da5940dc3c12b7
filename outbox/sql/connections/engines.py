"""Engines made from a URL that a user typed: errors do not show the URL."""

import re
from collections.abc import Callable
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from outbox.errors import ConfigurationError
from outbox.sql.connections.forks import watch
from outbox.sql.connections.requirements import refuse_other_encoding
from outbox.sql.connections.servers import banner_of, refuse_other_host, refuse_other_server
from outbox.sql.dialect import Dialect, dialect_of_url


def engine_of(url: URL, **settings: Any) -> Engine:
    """`create_engine(url)`. Raises `ConfigurationError` for another database, and for a driver that is not installed."""
    dialect = dialect_of_url(url)
    refuse_other_host(url)
    settings = dialect.engine_settings(url, settings)
    try:
        made = create_engine(url, hide_parameters=True, **settings)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the driver {error.name!r} of the URL {url.drivername}://... is not installed:"
            f" pip install {driver_of(url)}"
        ) from None
    watch(made)
    event.listen(made, "connect", _refusing(dialect), insert=True)  # before SQLAlchemy's own, which names no way out
    if made.dialect.driver == "psycopg":
        event.listen(made, "connect", _refuse_bytes, insert=True)  # before SQLAlchemy's own
        event.listen(made, "connect", _read_instants)
    return made


def driver_of(url: URL) -> str:
    """What to install for a URL whose driver is not, and what to write then."""
    return dialect_of_url(url).driver_to_install


def _refusing(dialect: Dialect) -> Callable[[Any, Any], None]:
    def refuse(connection: Any, record: Any) -> None:
        refuse_other_server(banner_of(record.driver_connection), portable=dialect.takes_compatible_servers)

    return refuse


def _refuse_bytes(connection: Any, record: Any) -> None:
    """Refuse the client encoding SQL_ASCII, with which psycopg returns bytes for text, and SQLAlchemy fails."""
    if connection.info.parameter_status("client_encoding") == "SQL_ASCII":
        refuse_other_encoding(connection.info.parameter_status("server_encoding"))


def _read_instants(connection: Any, record: Any) -> None:
    """Set the DateStyle ISO, the only one that psycopg reads. The role or the database may have another."""
    style = connection.info.parameter_status("DateStyle")
    if style is not None and not style.startswith("ISO"):
        connection.execute("SET DateStyle = ISO")
        connection.commit()


def url_of(target: str | URL, user: str) -> URL:
    """The URL that `user` needs. Raises `ConfigurationError`, hiding passwords, for other text and other databases."""
    try:
        url = make_url(target)
        dialect_of_url(url)
        url.get_dialect()
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise ConfigurationError(
            f"{user} needs a SQLAlchemy URL of a known driver, such as postgresql+psycopg://user@host/name, not {_shown(target)}"
        ) from None
    if "@" in (url.host or ""):
        raise ConfigurationError(
            f"the host in the URL of {user} contains an @, so it may contain the end of the password and is not shown: write an @"
            " in a password as %40"
        )
    return url


def _shown(target: str | URL) -> str:
    driver = re.match(r"[\w+.]{1,40}://", str(target))
    return f"{driver[0]}..." if driver else "this text, which is not shown because it may be a password"
