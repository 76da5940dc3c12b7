"""What a connection must be: UTF-8 on both sides, and our tables where they are said to be."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from support.cli_runner import command, refused
from support.dashboard import Browser, signed_in
from support.database import Database, statements_of
from support.entries import run_once

import outbox
from dispatchers import Operations
from dispatchers.adapters import MemoryAdapter
from dispatchers.dashboard import Dashboard
from outbox import migrations

CRM = {"crm": MemoryAdapter()}
NOW = sa.text("SELECT now()")
USES: dict[str, Callable[[Session, outbox.Outbox], Any]] = {
    "enqueue": lambda session, ob: ob.enqueue(session, "crm.upsert", {}, parent="order:1") and session.commit(),
    "claim": lambda session, ob: ob.idempotent(session, "retry-1", scope="ada", content=b"{}").__enter__(),
    "status": lambda session, ob: ob.status(session, "order:1"),
    "request_status": lambda session, ob: ob.request_status(session, uuid4(), scope="ada"),
    "cancel": lambda session, ob: ob.cancel(session, uuid4()),
}


@pytest.fixture(scope="module")
def latin(server_url: sa.URL) -> Iterator[sa.URL]:
    with in_encoding("LATIN1", server_url) as url:
        yield url


@contextmanager
def in_encoding(encoding: str, server_url: sa.URL) -> Iterator[sa.URL]:
    name = f"{encoding.lower()}_{uuid4().hex[:8]}"
    admin = sa.create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with admin.connect() as connection:
        settings = f"ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        connection.exec_driver_sql(f"CREATE DATABASE {name} {settings}")
        yield server_url.set(database=name)
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.parametrize("driver", ["psycopg", "psycopg_async", "asyncpg"])
def test_a_database_of_another_encoding_is_refused_at_the_first_use(
    latin: sa.URL, ob: outbox.Outbox, driver: str
) -> None:
    url = latin.set(drivername=f"postgresql+{driver}")

    async def main() -> None:
        async with AsyncSession(create_async_engine(url, poolclass=sa.NullPool)) as session:
            ob.enqueue(session, "crm.upsert", {"name": "zoë"}, parent="café:1")
            await session.commit()

    def run() -> None:
        with Session(sa.create_engine(url, poolclass=sa.NullPool)) as session:
            USES["enqueue"](session, ob)

    with pytest.raises(outbox.ConfigurationError, match="the database's encoding is LATIN1, and the outbox needs UTF8"):
        run() if driver == "psycopg" else asyncio.run(main())


def test_a_database_of_another_encoding_is_refused_at_the_start(latin: sa.URL, ob: outbox.Outbox) -> None:
    problem = "the database's encoding is LATIN1"
    for work in (migrations.check, migrations.upgrade):
        with pytest.raises(outbox.ConfigurationError, match=problem):
            work(latin)
    with pytest.raises(outbox.ConfigurationError, match=problem):
        run_once(sa.create_engine(latin, poolclass=sa.NullPool), ob, adapters=CRM)
    shown = latin.render_as_string(hide_password=False)
    for name in ("check", "upgrade"):
        status, text = refused("db", name, "--database", shown)
        assert (status, problem in text) == (1, True)


def test_a_database_without_an_encoding_is_refused_at_the_start(server_url: sa.URL, ob: outbox.Outbox) -> None:
    """From SQL_ASCII psycopg gives bytes, with which SQLAlchemy fails before any check of ours."""
    problem = "the database's encoding is SQL_ASCII"
    with in_encoding("SQL_ASCII", server_url) as url:
        with pytest.raises(outbox.ConfigurationError, match=problem):
            run_once(url, ob, adapters=CRM)
        for name in (("db", "upgrade"), ("db", "check"), ("list",)):
            status, text = refused(*name, "--database", url.render_as_string(hide_password=False))
            assert (status, problem in text) == (1, True)
        app = Dashboard(url, authenticate=signed_in("viewer"))
        answer = Browser(app).api("/entries")
        app.close()

    assert (answer.status_code, answer.json()["code"], problem in answer.text) == (503, "encoding", True)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_client_of_another_encoding_is_refused(
    postgresql: Database, ob: outbox.Outbox, use: Callable[[Session, outbox.Outbox], Any]
) -> None:
    engine = postgresql.new_engine(client_encoding="latin1")

    with Session(engine) as session:
        with pytest.raises(outbox.ConfigurationError, match="client_encoding is LATIN1, and the outbox needs UTF8"):
            use(session, ob)
        session.rollback()

    assert postgresql.entries == []
    with pytest.raises(outbox.ConfigurationError, match="client_encoding is LATIN1"):
        run_once(engine, ob, adapters=CRM)


def test_a_dispatcher_and_a_command_take_every_date_style(postgresql: Database, ob: outbox.Outbox) -> None:
    effects = Operations()
    ended: list[datetime] = []
    effects.on_settled("crm.upsert")(lambda session, settlement: ended.append(session.execute(NOW).scalar_one()))
    settings: dict[str, Any] = {"adapters": CRM, "include": [effects]}
    with postgresql.owner() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE \"{postgresql.url.database}\" SET DateStyle = 'German'")
    own = create_async_engine(postgresql.url, poolclass=sa.NullPool)  # the app's, of psycopg's both kinds

    for number, target in enumerate((postgresql.url, postgresql.new_engine(), own)):
        with postgresql.begin() as session:
            ob.enqueue(session, "crm.upsert", {}, parent=f"order:{number}")
        assert "crm.upsert" in command("list", database=postgresql).stdout
        assert run_once(target, ob, **settings) == 1
    assert len(ended) == 3


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("name", ["UTF8", "utf-8", "utf_8", "UNICODE", "unicode"])
def test_utf8_goes_by_every_name_that_the_server_knows(
    postgresql: Database, ob: outbox.Outbox, driver: str, name: str
) -> None:
    async def enqueue() -> None:
        settings: dict[str, Any] = {"connect_args": {"server_settings": {"client_encoding": name}}}
        url = postgresql.url.set(drivername="postgresql+asyncpg")
        engine = create_async_engine(url, poolclass=sa.NullPool, **settings)
        async with AsyncSession(engine) as session, session.begin():
            ob.enqueue(session, "crm.upsert", {}, parent="order:1")

    if driver == "asyncpg":
        asyncio.run(enqueue())
    else:
        with Session(postgresql.new_engine(client_encoding=name)) as session, session.begin():
            ob.enqueue(session, "crm.upsert", {}, parent="order:1")

    assert len(postgresql.entries) == 1


def test_the_encoding_costs_no_question_to_the_server(postgresql: Database, ob: outbox.Outbox) -> None:
    with statements_of(postgresql.engine) as statements, postgresql.begin() as session:
        ob.enqueue(session, "crm.upsert", {}, parent="order:1")

    assert len(statements) == 1


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("schema", [None, "shop"])
def test_a_map_that_leads_our_tables_elsewhere_is_refused(
    database: Database, ob: outbox.Outbox, schema: str | None, use: Callable[[Session, outbox.Outbox], Any]
) -> None:
    translated = database.new_engine().execution_options(schema_translate_map={schema: "tenant_1"})
    of_schema = outbox.Outbox(ob.configuration.keyring, env="test", schema=schema)

    with Session(translated) as session:
        with pytest.raises(outbox.ConfigurationError, match="schema_translate_map replaces schema"):
            use(session, of_schema)
        session.rollback()
    with pytest.raises(outbox.ConfigurationError, match="schema_translate_map replaces schema"):
        run_once(translated, of_schema, adapters=CRM)

    assert database.entries == []


def test_a_map_of_other_schemas_is_no_matter(database: Database, ob: outbox.Outbox) -> None:
    """An app with a schema for each tenant keeps the outbox in one that its map leaves alone."""
    translated = database.new_engine().execution_options(schema_translate_map={"tenant": "tenant_1"})

    with Session(translated) as session:
        ob.enqueue(session, "crm.upsert", {}, parent="order:1")
        session.commit()
        assert run_once(translated, ob, adapters=CRM) == 1
        (entry,) = ob.status(session, "order:1")

    assert entry.state == "delivered"
