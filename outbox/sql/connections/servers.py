"""Databases that speak the protocol of PostgreSQL or MySQL and are others: known by what they call themselves, refused by name.

The drivers know a server's name from its first answer, so it costs no query. Aurora DSQL calls itself PostgreSQL, and is known by
its host. docs/distributed.md has the sources.
"""

import re
from collections.abc import Iterable
from typing import Any

from sqlalchemy import URL

from outbox.errors import ConfigurationError

USE_ANOTHER = (
    "use PostgreSQL 14 to 18, MariaDB 10.6.3 or later, or MySQL 8.4 or later, for the database that has your rows"
)
USE_PORTABLE = "write portable+psycopg://... in the URL, which chooses the portable mode"
WAYS_OUT = {"CockroachDB": f"use 26.3 or later, and {USE_PORTABLE}", "YugabyteDB": USE_PORTABLE}

REFUSED = {
    "CockroachDB": (
        "its SKIP LOCKED passes over rows that are free, before 26.3 its advisory locks lock nothing, and it has no timeline by"
        " which a failover is noticed"
    ),
    "YugabyteDB": (
        "it has no timeline by which a failover is noticed, and its connections take sequence numbers in blocks, so entries of an"
        " ordering key would leave their order"
    ),
    "Aurora DSQL": "it has no savepoints, sequences, PL/pgSQL functions and advisory locks",
    "TiDB": "it has no FOR UPDATE SKIP LOCKED",
    "Vitess": "a transaction over several shards is not atomic",
}
"""Why the outbox does not run on each of them."""

DIALECTS = {"cockroachdb": "CockroachDB", "yugabytedb": "YugabyteDB", "tidb": "TiDB"}
"""The dialects that were written for them."""

COCKROACHDB_MIN = (26, 3)

_BANNERS = {
    "CockroachDB": re.compile(r"CockroachDB\b(?:\D*?(?P<version>v\d\S*))?"),
    "YugabyteDB": re.compile(r"-YB-(?P<version>[\d.]+)"),
    "TiDB": re.compile(r"-TiDB-(?P<version>v[\d.]+)"),
    "Vitess": re.compile(r"^(?P<version>[\d.]+)-Vitess", re.IGNORECASE),
}
_DSQL_HOST = re.compile(r"\.dsql(-\w+)?\.[a-z0-9-]+\.on\.aws\.?$")


def refuse_other_server(banner: str | None, *, portable: bool = False) -> None:
    """Raise `ConfigurationError` if a server with this version text is another database. None: unknown.

    portable: whether the engine is in the portable mode, in which YugabyteDB and a new CockroachDB are not refused.
    """
    for name, pattern in _BANNERS.items():
        found = pattern.search(banner or "")
        if found and not (portable and _runs_portable(name, found["version"])):
            raise refused(name, found["version"])


def _runs_portable(name: str, version: str | None) -> bool:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version or "")[:2])
    return name == "YugabyteDB" or (name == "CockroachDB" and numbers >= COCKROACHDB_MIN)


def refuse_other_host(url: URL) -> None:
    """Raise `ConfigurationError` if the address is one of Aurora DSQL."""
    hosts = (url.host, *_each(url.query.get("host")))
    if any(_DSQL_HOST.search(host) for host in hosts if host is not None):
        raise refused("Aurora DSQL")


def refused(name: str, version: str | None = None) -> ConfigurationError:
    named = name if version is None else f"{name} {version}"
    way_out = WAYS_OUT.get(name, USE_ANOTHER)
    return ConfigurationError(f"the server is {named}, and the outbox does not run on it: {REFUSED[name]}; {way_out}")


def banner_of(driver: Any) -> str | None:
    """The version text that a connection of psycopg, asyncpg, PyMySQL or mysqlclient has received; None with another driver."""
    found: str | None = None
    reported = getattr(getattr(driver, "info", None), "parameter_status", None)  # mysqlclient's `info` is a method
    if reported is not None:
        found = reported("crdb_version") or reported("server_version")
    elif hasattr(driver, "get_settings"):
        settings = driver.get_settings()
        found = getattr(settings, "crdb_version", None) or getattr(settings, "server_version", None)
    elif hasattr(driver, "get_server_info"):
        found = driver.get_server_info()
    return found


def _each(given: str | Iterable[str] | None) -> Iterable[str]:
    return (given,) if isinstance(given, str) else given or ()
