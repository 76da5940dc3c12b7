"""DbosAdapter in the conformance suites, with DBOS's own tables in a real PostgreSQL."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from dbos import DBOSClient
from dbos import error as dbos_error
from support.dbos_database import DbosDatabase, dbos_database

from dispatchers import (
    Absent,
    Adapter,
    CannotTell,
    Deferred,
    Delivered,
    Found,
    InProgress,
    KeyConflict,
    Rejected,
    Unknown,
)
from dispatchers.adapters import DbosAdapter
from dispatchers.testing.conformance import TAGS, AdapterSuite, Scenario
from dispatchers.testing.conformance_lookups import LookupSuite
from outbox.keys import encode_native

PASSWORD = "open-sesame-5eb63bbb"
KEY = encode_native(TAGS[0])
STATUS = "dbos.workflow_status"
NO_SERVER = "no server"


def holding(id: str, workflow: str = "orders.fulfil") -> str:
    return (
        f"INSERT INTO {STATUS} (workflow_uuid, name, status, queue_name) VALUES ('{id}', '{workflow}', 'SUCCESS', 'q')"
    )


def at(moment: str, action: str) -> str:
    """SQL that lets `action` happen in the transaction of an insert, at its statement or at its commit."""
    kind, deferred = ("CONSTRAINT", "DEFERRABLE INITIALLY DEFERRED") if moment == "commit" else ("", "")
    return f"""
        CREATE FUNCTION dbos.fault() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {action}; RETURN NULL; END $$;
        CREATE {kind} TRIGGER fault AFTER INSERT ON {STATUS} {deferred} FOR EACH ROW EXECUTE FUNCTION dbos.fault()
    """


DISCONNECT = "PERFORM pg_terminate_backend(pg_backend_pid())"
SLEEP = "PERFORM pg_sleep(60)"


RESTORED = f"""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid();
    DO $$ BEGIN IF to_regnamespace('away') IS NOT NULL THEN ALTER SCHEMA away RENAME TO dbos; END IF; END $$;
    DROP FUNCTION IF EXISTS dbos.fault CASCADE;
    DELETE FROM {STATUS}
"""


def failing(sqlstate: str) -> str:
    return f"RAISE EXCEPTION 'ada@example.com' USING ERRCODE = '{sqlstate}'"


class FaultyDbos:
    """DBOS's tables, and the inserts that reach them. A behaviour is SQL that makes the fault."""

    def __init__(self, database: DbosDatabase) -> None:
        self._database = database
        self.requests: list[bytes] = []
        self.url = database.url
        self.engines: list[sa.Engine] = []

    def engine(self) -> sa.Engine:
        engine = sa.create_engine(self.url)
        sa.event.listen(engine, "before_cursor_execute", self._seen)
        self.engines.append(engine)
        return engine

    def behave(self, behaviour: str) -> None:
        if behaviour == NO_SERVER:
            for engine in self.engines:
                engine.dialect.connect = _refused  # type: ignore[method-assign]
        elif behaviour:
            self._database.execute(behaviour)

    def _seen(self, connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if STATUS in statement.replace('"', ""):
            same = {name: value for name, value in parameters.items() if not name.endswith("_xid")}
            self.requests.append(json.dumps(same, sort_keys=True, default=str).encode())

    def close(self) -> None:
        for engine in self.engines:
            engine.dispose()


def _refused(*arguments: Any, **named: Any) -> None:
    raise sa.create_engine("postgresql+psycopg://").dialect.loaded_dbapi.OperationalError("connection refused")


@pytest.fixture(autouse=True, scope="module")
def tables(server_url: sa.URL) -> Iterator[None]:
    with dbos_database(server_url) as database:
        OfDbos.database = database
        yield


class OfDbos:
    database: ClassVar[DbosDatabase]
    operation = "orders.fulfil"
    payload: Any = {"to": "ada@example.com"}  # noqa: RUF012
    secrets = (PASSWORD,)
    private = ("ada@example.com",)

    @contextmanager
    def remote(self) -> Iterator[FaultyDbos]:
        remote = FaultyDbos(self.database)
        try:
            yield remote
        finally:
            remote.close()
            self.database.execute(RESTORED)

    def adapter(self, remote: FaultyDbos, timeout: timedelta) -> Adapter:
        return DbosAdapter(engine=remote.engine(), queue="orders", window=timedelta(days=7), timeout=timeout)


class TestDbos(OfDbos, AdapterSuite):
    client_exceptions = (dbos_error.DBOSException, sa.exc.DBAPIError, sa.exc.TimeoutError)
    scenarios = (
        Scenario("started", "", Delivered),
        Scenario("started before", holding(KEY), Delivered),
        Scenario("another workflow has the id", holding(KEY, "other"), KeyConflict),
        Scenario("a value that cannot be stored", at("insert", failing("22P05")), Rejected),
        Scenario("no tables", "ALTER SCHEMA dbos RENAME TO away", Deferred),
        Scenario("an insert that fails", at("insert", failing("53100")), Deferred),
        Scenario("disconnected at the insert", at("insert", DISCONNECT), Deferred),
        Scenario("disconnected at the commit", at("commit", DISCONNECT), Unknown),
        Scenario("a commit that fails", at("commit", failing("53100")), Unknown),
        Scenario("hangs at the insert", at("insert", SLEEP), Deferred, hangs=True),
        Scenario("hangs at the commit", at("commit", SLEEP), Unknown, hangs=True),
        Scenario("no server", NO_SERVER, Deferred, requests=0),
    )
    never = {InProgress: "a second insert of an id waits for the first one"}  # noqa: RUF012

    def exception(self, cls: type[Exception], text: str) -> Exception:
        return cls(1.0) if cls is dbos_error.DBOSQueryTimeoutError else super().exception(cls, text)

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        def fail(*arguments: object) -> None:
            raise error

        monkeypatch.setattr(DBOSClient, "enqueue_in_transaction", fail)
        return DbosAdapter(engine=self.database.url, queue="orders", window=timedelta(days=7))


class TestDbosLookups(OfDbos, LookupSuite):
    scenarios = (
        Scenario("started", holding(KEY), Found),
        Scenario("not started", "", Absent),
        Scenario("another workflow has the id", holding(KEY, "other"), CannotTell),
        Scenario("no tables", "ALTER SCHEMA dbos RENAME TO away", CannotTell),
        Scenario("hangs", at("insert", SLEEP), CannotTell, hangs=True),
        Scenario("no server", NO_SERVER, CannotTell),
    )
