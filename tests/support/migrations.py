"""What the tests of the migrations share: blank databases, and all that a catalogue says of one."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, MetaData, create_engine, text
from sqlalchemy.engine import URL
from sqlalchemy.pool import NullPool

from outbox import migrations
from outbox.migrations import scripts
from outbox.sql.schema.tables import define_tables

ROOT = Path(__file__).parents[2]
ODD = {"schema": "My Schema", "prefix": "weird-prefix_"}

NEXT = """
import sqlalchemy as sa
from alembic.operations import Operations

revision = "9999"
down_revision = {head!r}
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    for table in {tables!r}:
        op.add_column(prefix + table, sa.Column("tenant", sa.String(100), server_default="none"), schema=schema)
    op.create_table(prefix + "tenant", sa.Column("name", sa.String(100), primary_key=True), schema=schema)
    op.create_index(prefix + "queue_tenant", prefix + "queue", ["tenant", "state"], schema=schema)
"""


ALTERED = ("entry", "queue", "settlement", "event", "record")


@contextmanager
def newer_release(tmp_path: Path, altered: tuple[str, ...] = ALTERED) -> Iterator[None]:
    """Inside it the migrations are those of the next release, whose one migration is `NEXT`.

    A migration that runs under load alters one table: with two, it and a transaction that uses both can deadlock.
    """
    newer = tmp_path / "newer"
    if not newer.exists():
        shutil.copytree(ROOT / "alembic", newer)
        (newer / "versions" / "9999_tenants.py").write_text(NEXT.format(head=migrations.head(), tables=altered))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scripts, "home", lambda: newer)
        yield


@dataclass(frozen=True)
class Database:
    url: URL

    @property
    def is_postgresql(self) -> bool:
        return self.url.get_backend_name() == "postgresql"

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        with create_engine(self.url, poolclass=NullPool).begin() as connection:
            yield connection


@contextmanager
def blank_database(server_url: URL, template: Database | None = None) -> Iterator[Database]:
    """A database with nothing in it, or a copy of `template`, to which no client may be connected."""
    name = f"outbox_migrations_{uuid4().hex}"
    copied = "" if template is None else f" TEMPLATE {template.url.database}"
    with create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}{copied}")
        try:
            yield Database(server_url.set(database=name))
        finally:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


def create_all(database: Database, *, schema: str | None = None, prefix: str = "outbox_") -> None:
    with database.begin() as connection:
        if schema is not None:
            connection.exec_driver_sql(f'CREATE SCHEMA "{schema}"')
        define_tables(MetaData(), schema=schema, prefix=prefix).metadata.create_all(connection)


POSTGRESQL_CATALOG = {
    "relations": """
        SELECT n.nspname, c.relname, c.relkind, c.relpersistence, c.reloptions FROM pg_class c
        JOIN pg_namespace n ON n.oid = c.relnamespace WHERE {ours} ORDER BY 1, 2""",
    "columns": """
        SELECT n.nspname, c.relname, row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum),
               a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attstorage,
               a.attidentity, a.attgenerated, a.attcollation, pg_get_expr(d.adbin, d.adrelid) FROM pg_attribute a
        JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attnum > 0 AND NOT a.attisdropped AND {ours} ORDER BY 1, 2, 3""",
    "constraints": """
        SELECT n.nspname, c.relname, k.conname, pg_get_constraintdef(k.oid) FROM pg_constraint k
        JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE {ours} ORDER BY 1, 2, 3""",
    "indexes": """
        SELECT pg_get_indexdef(i.indexrelid), i.indisunique, i.indisprimary FROM pg_index i
        JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE {ours} ORDER BY 1""",
    "sequences": """
        SELECT n.nspname, c.relname, format_type(s.seqtypid, NULL), s.seqstart, s.seqincrement, s.seqmax, s.seqmin,
               s.seqcache, s.seqcycle,
               (SELECT max(refobjid::regclass::text || refobjsubid) FROM pg_depend WHERE objid = c.oid AND deptype = 'a')
        FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE {ours} ORDER BY 1, 2""",
    "functions": """
        SELECT n.nspname, pg_get_functiondef(c.oid), c.proacl::text FROM pg_proc c
        JOIN pg_namespace n ON n.oid = c.pronamespace WHERE {functions} ORDER BY 1, 2""",
}
OURS = r"n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema'"
BUT_THE_VERSION = r"c.relname !~ '_version(_pkc)?$'"


def snapshot(database: Database) -> dict[str, list[Any]]:
    """All that the database's catalogue says, but for the version table."""
    with database.begin() as connection:
        if database.is_postgresql:
            where = f"{OURS} AND {BUT_THE_VERSION}"
            return {
                what: [tuple(row) for row in connection.execute(text(query.format(ours=where, functions=OURS)))]
                for what, query in POSTGRESQL_CATALOG.items()
            }
        query = "SELECT type, name, sql FROM sqlite_master WHERE tbl_name NOT LIKE '%_version' ORDER BY 1, 2"
        return {
            "objects": [
                (kind, name, sql and " ".join(sql.split())) for kind, name, sql in connection.execute(text(query))
            ]
        }


def everything(database: Database) -> list[str]:
    """The name of every object, version table and schemas included."""
    with database.begin() as connection:
        if not database.is_postgresql:
            return list(connection.scalars(text("SELECT name FROM sqlite_master ORDER BY 1")))
        query = f"""SELECT 'schema ' || n.nspname FROM pg_namespace n WHERE {OURS} UNION ALL
            SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE {OURS} UNION ALL
            SELECT n.nspname || '.' || p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
            WHERE {OURS} UNION ALL
            SELECT n.nspname || '.' || t.typname FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
            WHERE {OURS} ORDER BY 1"""
        return list(connection.scalars(text(query)))


def run_script(database: Database, script: str) -> None:
    if database.is_postgresql:
        engine = create_engine(database.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:
            connection.connection.driver_connection.execute(script)
    else:
        connection = sqlite3.connect(database.url.database)
        connection.executescript(script)
        connection.close()


def names_for(database: Database) -> list[dict[str, str]]:
    return [{}, {"prefix": "weird-prefix_"}, *([ODD] if database.is_postgresql else [])]


def set_revision(database: Database, revision: str) -> None:
    with database.begin() as connection:
        connection.execute(text("UPDATE outbox_version SET version_num = :revision"), {"revision": revision})
