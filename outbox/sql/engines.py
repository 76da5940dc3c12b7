"""Engines made from a URL that a user typed: errors do not show the URL."""

from typing import Any

from sqlalchemy import URL, Engine, create_engine

from outbox.errors import ConfigurationError
from outbox.sql.dialect import SUPPORTED


def engine_of(url: URL, **settings: Any) -> Engine:
    """`create_engine(url)`. Raises `ConfigurationError` for another database, and for a driver that is not installed."""
    require_supported(url.get_backend_name())
    try:
        return create_engine(url, hide_parameters=True, **settings)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the driver {error.name!r} of the URL {url.drivername}://... is not installed:"
            " pip install 'sqlalchemy-outbox[postgresql]' and write postgresql+psycopg://..."
        ) from None


def require_supported(database: str) -> None:
    """Raise `ConfigurationError` for a database that the outbox does not run on."""
    if database not in SUPPORTED:
        raise ConfigurationError(f"the outbox runs on {' and '.join(SUPPORTED)}, not on {database!r}")
