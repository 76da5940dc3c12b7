"""DBOS's tables in a database of their own, and what tests do there as its owner."""

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import sqlalchemy as sa
from dbos import run_dbos_database_migrations


class DbosDatabase:
    """DBOS's system database. url: of its owner."""

    def __init__(self, url: sa.URL) -> None:
        self.url = url
        self.engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")

    def execute(self, statement: str) -> None:
        with self.engine.connect() as connection:
            connection.exec_driver_sql(statement)

    def rows(self) -> list[tuple[str, str, str]]:
        """The id, name and queue of each workflow."""
        with self.engine.connect() as connection:
            found = connection.exec_driver_sql(
                "SELECT workflow_uuid, name, queue_name FROM dbos.workflow_status ORDER BY created_at"
            )
            return [(id, name, queue) for id, name, queue in found]


@contextmanager
def dbos_database(server_url: sa.URL) -> Iterator[DbosDatabase]:
    name = f"dbos_{uuid4().hex[:8]}"
    server = DbosDatabase(server_url)
    server.execute(f"CREATE DATABASE {name}")
    url = server_url.set(database=name)
    run_dbos_database_migrations(system_database_url=url.render_as_string(hide_password=False))
    try:
        yield DbosDatabase(url)
    finally:
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")
