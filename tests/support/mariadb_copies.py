"""Databases on MariaDB, each for one test at a time; one that came back as it was is emptied and used again."""

from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

import sqlalchemy as sa

from outbox.errors import SchemaError
from support.database import TABLES, Base, Database

# SQLAlchemy does not know the column that makes two orders collide, and there is the lock's table
COLUMNS = sum(len(table.columns) for made in (TABLES, Base) for table in made.metadata.tables.values()) + 2
_COLUMNS = sa.text("SELECT count(*) FROM information_schema.columns WHERE table_schema = DATABASE()")
READ_COMMITTED = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"


class MariaDBCopies:
    def __init__(self, server_url: sa.URL, create_tables: Callable[[sa.URL], None]) -> None:
        self._server_url = server_url
        self._create_tables = create_tables
        self._admin = sa.create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        self._run = uuid4().hex[:8]
        self._made: list[str] = []
        self._idle: list[sa.URL] = []

    def take(self) -> Database:
        if self._idle:
            return Database(self._idle.pop())
        name = f"outbox_test_{self._run}_{len(self._made)}"
        self._made.append(name)
        self._execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        url = self._server_url.set(database=name).update_query_dict({"init_command": READ_COMMITTED})
        self._create_tables(url)
        return Database(url)

    def give_back(self, database: Database, *, is_changed: bool) -> None:
        """is_changed: whether the test may have changed the schema."""
        database.dispose()
        name = database.owners_url.database
        with self._admin.connect() as connection:
            left = "SELECT id FROM information_schema.processlist WHERE db = :name"
            for id in connection.execute(sa.text(left), {"name": name}).scalars().all():
                with suppress(sa.exc.OperationalError):  # it ended meanwhile
                    connection.exec_driver_sql(f"KILL {id}")
            if is_changed or not _empty(connection, str(name)):
                connection.exec_driver_sql(f"DROP DATABASE {name}")
                return
        self._idle.append(database.owners_url)

    def drop(self) -> None:
        for name in self._made:
            self._execute(f"DROP DATABASE IF EXISTS {name}")

    def _execute(self, statement: str) -> None:
        with self._admin.connect() as connection:
            connection.exec_driver_sql(statement)


def _empty(connection: sa.Connection, name: str) -> bool:
    """Empty the tables of this database; returns whether all are there, with their columns and no others."""
    connection.exec_driver_sql(f"USE {name}")
    if connection.execute(_COLUMNS).scalar_one() != COLUMNS:
        return False
    try:
        for table in (*TABLES.metadata.tables, *Base.metadata.tables):
            connection.exec_driver_sql(f"DELETE FROM {table}")
    except (sa.exc.DBAPIError, SchemaError):
        return False
    return True
