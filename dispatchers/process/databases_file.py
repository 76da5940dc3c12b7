"""The file that names the databases of a fleet: `name = url` in each line, and comments that begin with `#`."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import URL

from outbox.errors import ConfigurationError
from outbox.sql.connections.engines import url_of
from outbox.sql.dialect import dialect_of_url

PLACES = ("host", "hostaddr", "port", "dbname", "service", "unix_socket", "options")
"""URL parameters that name the database, or (`options=-csearch_path=...`) its schema."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def read_databases(path: str | os.PathLike[str]) -> dict[str, URL]:
    """The databases by name, in the order of the file.

    Raises `ConfigurationError` for a wrong line or a file that cannot be read. It names the line and shows no URL.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"the databases file {str(path)!r} cannot be read: {reason}") from error
    databases: dict[str, URL] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, url = (part.strip() for part in line.partition("="))
        try:
            if not equals or not url:
                raise ConfigurationError("write `name = url`")
            if " #" in url:
                raise ConfigurationError("a comment needs a line of its own; in a URL write %20 and %23")
            add_database(databases, name, url)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}, line {number}: {error}") from None
    if not databases:
        raise ConfigurationError(f"the databases file {str(path)!r} names no database: write `name = url` in each line")
    return databases


def checked_databases(given: Mapping[str, str | URL]) -> dict[str, URL]:
    """The databases that an app names. Raises `ConfigurationError`."""
    databases: dict[str, URL] = {}
    for name, url in given.items():
        add_database(databases, name, url)
    return databases


def add_database(databases: dict[str, URL], name: str, given: str | URL) -> None:
    """Add a database. Raises `ConfigurationError` for a wrong name or URL, and for a name or a database that is already there."""
    if not NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is not a name: use letters, digits, `_`, `-` and `.`, at most 63")
    if name in databases:
        raise ConfigurationError(f"the name {name!r} occurs twice")
    url = url_of(given, f"the database {name!r}")
    if url.get_dialect().is_async:
        raise ConfigurationError(f"the driver of {name!r} is asynchronous: write postgresql+psycopg://")
    same = [other for other, known in databases.items() if _place(known) == _place(url)]
    if same:
        raise ConfigurationError(f"{name!r} is the same database as {same[0]!r}")
    databases[name] = url


def _place(url: URL) -> object:
    return dialect_of_url(url).name, url.host, url.port, url.database, *(url.query.get(name) for name in PLACES)
