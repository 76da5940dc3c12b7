"""Databases on MariaDB, or on MySQL, each for one test at a time; one that came back as it was is emptied and used again."""

from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

import sqlalchemy as sa

from outbox import migrations
from outbox.errors import SchemaError
from support.database import TABLES, Base, Database

# SQLAlchemy does not know the column that makes two orders collide, and there is the lock's table
COLUMNS = sum(len(table.columns) for made in (TABLES, Base) for table in made.metadata.tables.values()) + 2
_COLUMNS = sa.text("SELECT count(*) FROM information_schema.columns WHERE table_schema = DATABASE()")
PARTS = ("app", "dispatcher", "maintenance", "dashboard", "operator")
READ_COMMITTED = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"


class MariaDBCopies:
    def __init__(self, server_url: sa.URL, create_tables: Callable[[sa.URL], None]) -> None:
        self._server_url = server_url
        self._create_tables = create_tables
        self._admin = sa.create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        self._run = uuid4().hex[:8]
        self._made: list[str] = []
        self._idle: list[sa.URL] = []
        self._roles = {kind: f"{kind}_{self._run}" for kind in ("app", "dispatcher")}
        self._parts = {kind: f"{kind}_rights_{self._run}" for kind in PARTS}
        self._with_rights: set[sa.URL] = set()

    def take(self, *, as_roles: bool = False) -> Database:
        """as_roles: with the rights of `outbox db roles`, as its app and its dispatchers."""
        url = self._idle.pop() if self._idle else self._make()
        if not as_roles:
            return Database(url)
        if url not in self._with_rights:
            self._give_rights(url)
        return Database(url, self._roles)

    def _give_rights(self, url: sa.URL) -> None:
        """Those of the app's own tables are both roles', as they are the app's in life."""
        script = migrations.roles(url.get_backend_name(), **self._parts)
        to = "TO" if url.get_backend_name() == "mysql" else "FOR"
        password = f" IDENTIFIED BY '{url.password}'" if url.password else ""
        with sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool).connect() as connection:
            for statement in script.splitlines():
                connection.exec_driver_sql(statement)
            for kind, login in self._roles.items():
                connection.exec_driver_sql(f"CREATE USER IF NOT EXISTS {login}{password}")
                connection.exec_driver_sql(f"GRANT {self._parts[kind]} TO {login}")
                connection.exec_driver_sql(f"SET DEFAULT ROLE {self._parts[kind]} {to} {login}")
                for table in Base.metadata.tables:
                    connection.exec_driver_sql(f"GRANT ALL ON {table} TO {self._parts[kind]}")
        self._with_rights.add(url)

    def _make(self) -> sa.URL:
        name = f"outbox_test_{self._run}_{len(self._made)}"
        self._made.append(name)
        self._execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        url = self._server_url.set(database=name).update_query_dict({"init_command": READ_COMMITTED})
        self._create_tables(url)
        return url

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
        for name in self._roles.values() if self._with_rights else ():
            self._execute(f"DROP USER IF EXISTS {name}")
        for name in self._parts.values() if self._with_rights else ():
            self._execute(f"DROP ROLE IF EXISTS {name}")

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
