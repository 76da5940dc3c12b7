"""Django's test database, as the plugin for pytest uses it: pytest-django makes it, and decides what a test commits."""

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import URL, Connection
from sqlalchemy.orm import Session

from dispatchers.testing.database_access import DatabaseAccess, sync_engine
from dispatchers.testing.outbox_under_test import OutboxUnderTest
from outbox.errors import ConfigurationError
from outbox.extras import missing
from outbox.instance import Outbox
from outbox.sql.schema.identifiers import quoted_table
from outbox.sql.schema.tables import Tables

try:
    from django.db import connections
except ModuleNotFoundError as error:
    raise missing("outbox_database_url = django", "django", error) from error

from dispatchers.django import DjangoTransactions
from outbox.django import joined_session

__all__ = ["DjangoTransactions", "DjangoUnderTest", "create_tables", "empty", "is_open", "url_of"]

Result = TypeVar("Result")

DJANGOS_OWN = ("assume_role", "isolation_level", "pool", "server_side_binding")
"""Options of Django's backend that are none of the driver's."""


def url_of(using: str) -> URL:
    """The URL of Django's database. Raises `ConfigurationError` for another database than PostgreSQL."""
    connection: Any = connections[using]
    settings = connection.settings_dict
    if connection.vendor != "postgresql":
        raise ConfigurationError(
            f"the outbox works with Django only on PostgreSQL with psycopg 3, but {using!r} is {connection.vendor}"
        )
    options = {name: str(value) for name, value in settings.get("OPTIONS", {}).items() if name not in DJANGOS_OWN}
    return URL.create(
        "postgresql+psycopg",
        username=settings["USER"] or None,
        password=settings["PASSWORD"] or None,
        host=settings["HOST"] if not settings["HOST"].startswith("/") else None,
        port=int(settings["PORT"]) if settings["PORT"] else None,
        database=settings["NAME"],
        query=options | ({"host": settings["HOST"]} if settings["HOST"].startswith("/") else {}),
    )


class DjangoUnderTest(OutboxUnderTest):
    """Reads in the transaction that Django has open, if it has one; a test with the mark `django_db` has one until its end."""

    def __init__(self, outbox: Outbox, access: DatabaseAccess, session: Any, *, using: str) -> None:
        super().__init__(outbox, access, session)
        self._using = using

    def read(self, work: Callable[[Session], Result]) -> Result:
        if not is_open(self._using):
            return super().read(work)
        with joined_session(self._using) as session:
            return work(session)

    def require_committed(self) -> None:
        __tracebackhide__ = True
        if is_open(self._using):
            raise ConfigurationError(
                "the test runs in a transaction that Django rolls back at its end, and outbox_drain sends what is committed: mark"
                " it with @pytest.mark.django_db(transaction=True)"
            )
        super().require_committed()


def is_open(using: str) -> bool:
    """Whether Django has a transaction open in this thread."""
    connection: Any = connections[using]
    return bool(connection.in_atomic_block)


def create_tables(url: URL, create: Callable[[Connection], None]) -> None:
    """Create the outbox's tables in Django's test database. Tables that Django's migrations have made stay."""
    engine = sync_engine(url)
    with engine.begin() as connection:
        create(connection)
    engine.dispose()


def empty(access: DatabaseAccess, tables: Tables) -> None:
    """Delete what a test has committed: Django empties the tables of its models only."""
    names = ", ".join(quoted_table(table) for table in tables.metadata.tables.values())

    def truncate(connection: Connection) -> None:
        connection.exec_driver_sql("SET LOCAL lock_timeout = '10s'")
        connection.exec_driver_sql(f"TRUNCATE {names} RESTART IDENTITY CASCADE")

    access.run(truncate)
