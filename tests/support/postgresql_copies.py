"""Databases on PostgreSQL, each for one test at a time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from uuid import uuid4

import sqlalchemy as sa

import outbox.migrations
from support.database import TABLES, Base, Database

LEFT_OPEN_SECONDS = 0.02  # a closed connection is gone from the server long before


class PostgreSQLCopies:
    """Databases copied from a template, each for one test at a time.

    A copy is a thousand small files, a third of a second here: one that came back as it was is emptied and used again.
    """

    def __init__(self, server_url: sa.URL, create_tables: Callable[[sa.URL], None], *, has_roles: bool = True) -> None:
        self._server_url = server_url
        self._admin = sa.create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        self._run = uuid4().hex[:8]  # several pytest-xdist workers may share one server
        self._template = f"outbox_template_{self._run}"
        self._made = [self._template]
        self._idle: list[Database] = []
        _execute(self._admin, f"CREATE DATABASE {self._template}")
        url = server_url.set(database=self._template)
        create_tables(url)
        self._roles = {"app": f"app_{self._run}", "dispatcher": f"dispatcher_{self._run}"}
        if has_roles:
            _give_rights(url, self._roles)
        with _autocommit(url) as connection:
            self._shape = connection.execute(_SHAPE).one()

    def take(self, *, as_roles: bool = False) -> Database:
        roles = self._roles if as_roles else None
        if self._idle:
            used = self._idle.pop()
            return Database(used.owners_url, roles, used)
        name = f"outbox_test_{self._run}_{len(self._made)}"
        self._made.append(name)
        _execute(self._admin, f"CREATE DATABASE {name} TEMPLATE {self._template}")
        return Database(self._server_url.set(database=name), roles)

    def give_back(self, database: Database) -> None:
        """Keep it for another test, unless this one changed its schema or left a client connected."""
        with suppress(sa.exc.OperationalError), database.last_connection() as connection:
            if connection.execute(_SHAPE).one() == self._shape and _is_left_alone(connection, database.kept.pids()):
                if used := connection.execute(_USED, {"tables": OURS}).scalars().all():
                    connection.exec_driver_sql(f"TRUNCATE {', '.join(used)} RESTART IDENTITY CASCADE")
                if database.name == "postgresql":
                    connection.exec_driver_sql("SELECT setval('outbox_position', 1, false)")
                connection.exec_driver_sql("SELECT pg_stat_reset()")
                connection.exec_driver_sql(
                    "DELETE FROM pg_statistic"
                )  # an emptied table keeps what ANALYZE found in it
                self._idle.append(database)
                return
        database.dispose()

    def close(self) -> None:
        for database in self._idle:
            database.dispose()

    def drop(self) -> None:
        for name in self._made:
            _execute(self._admin, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        for role in (*self._roles.values(), *(f"{kind}_{self._run}" for kind in ("upkeep", "dashboard", "operator"))):
            _execute(self._admin, f"DROP ROLE IF EXISTS {role}")


# What is created, dropped or altered shows in one of these; emptying a table does not. Objects of a database's own have numbers
# from 16384, and an index over them; to count the system's as well takes the server ten times as long.
_SHAPE = sa.text(
    "SELECT (SELECT count(*) FROM pg_class), (SELECT max(oid) FROM pg_class), (SELECT count(*) FROM pg_trigger),"
    " (SELECT md5(string_agg(concat(prosrc, proacl), ',' ORDER BY oid)) FROM pg_proc WHERE oid >= 16384),"
    " (SELECT count(*) FROM pg_attribute WHERE attrelid >= 16384 AND attisdropped),"
    " (SELECT md5(string_agg(concat(reloptions, relacl, relpersistence, relrowsecurity), ',' ORDER BY oid))"
    " FROM pg_class WHERE oid >= 16384),"
    " (SELECT count(*) FROM pg_constraint WHERE oid >= 16384), (SELECT max(oid) FROM pg_constraint),"
    " (SELECT count(*) FROM pg_attrdef), (SELECT max(oid) FROM pg_attrdef),"
    " (SELECT md5(string_agg(setconfig::text, ',' ORDER BY setrole)) FROM pg_db_role_setting JOIN pg_database d"
    " ON d.oid = setdatabase WHERE datname = current_database())"
)
OURS = [name for metadata in (TABLES.metadata, Base.metadata) for name in metadata.tables]

# A table that was written to, if only by what was rolled back, has pages; or a number was drawn for it; or it was analyzed.
# To empty one takes new files, for each of its indexes too.
_USED = sa.text(
    "SELECT oid::regclass::text FROM pg_class WHERE relname = ANY(:tables) AND relkind = 'r'"
    " AND (pg_relation_size(oid) > 0 OR reltuples >= 0"
    " OR EXISTS (SELECT FROM pg_depend d JOIN pg_sequence ON seqrelid = d.objid"
    " WHERE d.refobjid = pg_class.oid AND d.deptype IN ('a', 'i') AND pg_sequence_last_value(seqrelid) IS NOT NULL))"
)
_OTHERS = sa.text(
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    " AND pid <> ALL(:kept)"
)
_END_OTHERS = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    " AND pid <> ALL(:kept)"
)


def _is_left_alone(connection: sa.Connection, kept: Sequence[int]) -> bool:
    """Whether no other client is connected but the kept connections. A connection that was just closed takes the server a moment.

    One that the test left open is ended: a framework's app keeps its engine until it is collected.
    """
    started = time.monotonic()
    while connection.scalar(_OTHERS, {"kept": kept}):
        if (waited := time.monotonic() - started) > 1:
            return False
        if waited > LEFT_OPEN_SECONDS:
            connection.execute(_END_OTHERS, {"kept": kept})
        time.sleep(0.01)  # each question takes CPU time from the other tests
    return True


@contextmanager
def _autocommit(url: sa.URL) -> Iterator[sa.Connection]:
    with sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool).connect() as connection:
        yield connection


def _execute(engine: sa.Engine, statement: str) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)


def _give_rights(url: sa.URL, roles: Mapping[str, str]) -> None:
    """What `outbox db roles` prints; and the app's own tables are both roles', as they are the app's in life."""
    run = roles["app"].partition("_")[2]
    others = {"maintenance": f"upkeep_{run}", "dashboard": f"dashboard_{run}", "operator": f"operator_{run}"}
    script = outbox.migrations.roles(**roles, **others)
    names = ", ".join(roles.values())
    ours = ", ".join(Base.metadata.tables)
    password = "NULL" if url.password is None else f"'{url.password}'"
    with _autocommit(url) as connection:
        connection.connection.driver_connection.execute(script)
        for role in roles.values():
            connection.exec_driver_sql(f"ALTER ROLE {role} LOGIN PASSWORD {password}")
        connection.exec_driver_sql(f"GRANT ALL ON {ours} TO {names}")
        connection.exec_driver_sql(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {names}")
        for kind in ("TABLES", "SEQUENCES"):
            connection.exec_driver_sql(f"ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT ALL ON {kind} TO {names}")
