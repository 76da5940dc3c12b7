"""Engines made from a URL that a user typed: errors do not show the URL."""

import re
from collections.abc import Callable
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from outbox.errors import ConfigurationError
from outbox.sql.connections import refuse_other_encoding
from outbox.sql.dialect import SUPPORTED, not_supported
from outbox.sql.forks import watch
from outbox.sql.servers import banner_of, refuse_other_host, refuse_other_server

SHORT_WAITS = "SET SESSION innodb_lock_wait_timeout = 5"
"""For MariaDB, whose default is 50 s: a dispatcher waits for an app that has locked the next entry of an ordering group."""


_MYSQLCLIENT = {"binary_prefix": True}
"""What mysqlclient needs, SQLAlchemy's default for `mariadb://`: without this it sends bytes as text."""

_INSTALLED = {
    "postgresql": "'sqlalchemy-outbox[postgresql]' and write postgresql+psycopg://...",
    "mariadb": "'sqlalchemy-outbox[mariadb]' and write mariadb+pymysql://...",
}


def engine_of(url: URL, **settings: Any) -> Engine:
    """`create_engine(url)`. Raises `ConfigurationError` for another database, and for a driver that is not installed."""
    require_supported(url.get_backend_name())
    refuse_other_host(url)
    if url.get_backend_name() == "mariadb":
        settings.setdefault("isolation_level", "READ COMMITTED")  # see `outbox.sql.mariadb_settings`
        driver = _MYSQLCLIENT if url.get_driver_name() == "mysqldb" else {}
        waits = {} if "init_command" in url.query else {"init_command": SHORT_WAITS}
        settings["connect_args"] = driver | waits | settings.get("connect_args", {})
    try:
        made = create_engine(url, hide_parameters=True, **settings)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the driver {error.name!r} of the URL {url.drivername}://... is not installed:"
            f" pip install {driver_of(url)}"
        ) from None
    watch(made)
    event.listen(
        made, "connect", _refusing(url.get_backend_name()), insert=True
    )  # before SQLAlchemy's own, which names no way out
    if made.dialect.driver == "psycopg":
        event.listen(made, "connect", _refuse_bytes, insert=True)  # before SQLAlchemy's own
        event.listen(made, "connect", _read_instants)
    return made


def driver_of(url: URL) -> str:
    """What to install for a URL whose driver is not, and what to write then."""
    return _INSTALLED.get(url.get_backend_name(), _INSTALLED["postgresql"])


def _refusing(database: str) -> Callable[[Any, Any], None]:
    def refuse(connection: Any, record: Any) -> None:
        refuse_other_server(banner_of(record.driver_connection), portable=database == "portable")

    return refuse


def _refuse_bytes(connection: Any, record: Any) -> None:
    """From a client of this encoding psycopg gives bytes for text, with which SQLAlchemy fails at once."""
    if connection.info.parameter_status("client_encoding") == "SQL_ASCII":
        refuse_other_encoding(connection.info.parameter_status("server_encoding"))


def _read_instants(connection: Any, record: Any) -> None:
    """Whatever DateStyle the role or the database has: psycopg reads instants in ISO's style only."""
    style = connection.info.parameter_status("DateStyle")
    if style is not None and not style.startswith("ISO"):
        connection.execute("SET DateStyle = ISO")
        connection.commit()


def url_of(target: str | URL, user: str) -> URL:
    """The URL that `user` needs. Raises `ConfigurationError`, hiding passwords, for other text and other databases."""
    try:
        url = make_url(target)
        require_supported(url.get_backend_name())
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


def require_supported(database: str) -> None:
    """Raise `ConfigurationError` for a database that the outbox does not run on."""
    if database not in SUPPORTED:
        raise not_supported(database)
