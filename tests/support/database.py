"""What the tests share: a small shop, a database of one's own, and questions to its tables."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import outbox
from outbox.requests.claim_block import IdempotentBlock
from outbox.sql.schema.tables import tables_of
from outbox.times import MICROSECOND
from support.compiled_statements import SHARED
from support.kept_connections import KeptConnections

TESTS = Path(__file__).parents[1]
IMPORT_PATH = os.pathsep.join(map(str, [TESTS, TESTS / "verification", TESTS.parent]))
"""PYTHONPATH of the processes that tests start: they import this checkout, whatever version is installed."""

TABLES = tables_of(None, "outbox_")
REQUEST = {"customer": "ada", "amount": 2000}
PAYLOAD = {"amount": 2000, "currency": "eur"}
Handler = Callable[[Session, outbox.Claim], object]
CHARGE = "stripe.payment_intents.create"


class Base(DeclarativeBase):
    pass


class Order(Base):
    """The app's own row; two orders of one customer and amount 13 collide, for tests that need a failing flush."""

    __tablename__ = "shop_order"
    __table_args__ = (
        sa.Index(
            "shop_order_collision",
            "customer",
            unique=True,
            postgresql_where=sa.text("amount = 13"),
            sqlite_where=sa.text("amount = 13"),
        ).ddl_if(callable_=lambda ddl, target, bind, dialect, **rest: dialect.name not in ("mariadb", "mysql")),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(sa.String(255))
    amount: Mapped[int]


@sa.event.listens_for(Order.__table__, "after_create")
def _collide_on_mariadb(table: sa.Table, connection: sa.Connection, **rest: object) -> None:
    """MariaDB has no partial indexes, but a computed column may be unique; NULLs do not collide."""
    if connection.dialect.name in ("mariadb", "mysql"):
        collision = "VARCHAR(255) AS (IF(amount = 13, customer, NULL))"
        connection.exec_driver_sql(f"ALTER TABLE shop_order ADD collision {collision} UNIQUE INVISIBLE")


def colliding_order() -> Order:
    """The second of these in one database fails its flush with an IntegrityError."""
    return Order(customer="ada", amount=13)


ASYNC_DRIVERS = {
    "portable": "portable+psycopg",
    "postgresql": "postgresql+psycopg",
    "sqlite": "sqlite+aiosqlite",
    "mariadb": "mariadb+asyncmy",
    "mysql": "mysql+asyncmy",
}
DIALECT_SETTINGS: Mapping[str, dict[str, Any]] = {
    "postgresql": {
        "use_native_hstore": False
    },  # to search for the type hstore takes a new engine as long as to connect
    "sqlite": {},
    "portable": {},
    "mariadb": {},  # its level is in the URL: `mariadb_copies`
}


class Database:
    """One test's own database. Whatever engine it hands out is disposed of with it.

    name: by which tests choose what is different. A MySQL is a MariaDB here: with `--mysql`, its tests run there. server: what it
        is.
    roles: the logins of the app and of the dispatchers. With them `url` and all engines are the app's but `dispatchers_engine`;
    rows are looked at and changed as the owner.
    before: of the same database, as an earlier test used it: its connections are used again.
    """

    def __init__(self, url: sa.URL, roles: Mapping[str, str] | None = None, before: "Database | None" = None) -> None:
        self.owners_url = url
        self.roles = roles
        self.url = url if roles is None else url.set(username=roles["app"])
        self.server = url.get_backend_name()
        self.name = "mariadb" if self.server == "mysql" else self.server
        # asyncmy does not know what the other drivers need
        plain = self.url.difference_update_query(["ssl_disabled", "binary_prefix"])
        self.async_url = plain.set(drivername=ASYNC_DRIVERS[self.server])
        self._dialect = DIALECT_SETTINGS[self.name]
        self._engines: list[sa.Engine] = []
        self.kept = KeptConnections() if before is None else before.kept
        self.engine = self._usual_engine(self.url)
        # Unprepared on SQLite, so that it reads what is committed beside a writer instead of waiting for it.
        self.observer = (
            self._create_engine(self.owners_url, pool_pre_ping=True, execution_options=SHARED)
            if before is None
            else before.observer
        )
        self._dispatchers: sa.Engine | None = None

    def new_engine(self, **settings: Any) -> sa.Engine:
        engine = self._create_engine(**settings)
        if self.name == "sqlite":
            _prepare(engine)
        return engine

    def unprepared_engine(self, **settings: Any) -> sa.Engine:
        return self._create_engine(**settings)

    @property
    def dispatchers_engine(self) -> sa.Engine:
        if self.roles is None:
            return self.engine
        if self._dispatchers is None:
            self._dispatchers = self._usual_engine(self.url.set(username=self.roles["dispatcher"]))
        return self._dispatchers

    def dispatchers_async_engine(self, **settings: Any) -> AsyncEngine:
        return self.async_engine(None if self.roles is None else self.roles["dispatcher"], **settings)

    def _usual_engine(self, url: sa.URL) -> sa.Engine:
        if self.name == "mariadb":
            return self._create_engine(url)
        if self.name != "postgresql":
            return self.new_engine()
        engine = self.kept.engine(url, **self._dialect, execution_options=SHARED)
        self._engines.append(engine)
        return engine

    def _create_engine(self, url: sa.URL | None = None, **settings: Any) -> sa.Engine:
        engine = sa.create_engine(url or self.url, **self._dialect | (settings or {"execution_options": SHARED}))
        self._engines.append(engine)
        return engine

    def async_engine(self, role: str | None = None, **settings: Any) -> AsyncEngine:
        """An engine without a pool: nothing of it outlives the event loop."""
        url = self.async_url if role is None else self.async_url.set(username=role)
        given = settings or {"execution_options": SHARED}
        engine = create_async_engine(url, poolclass=sa.NullPool, **self._dialect | given)
        if self.name == "sqlite":
            _prepare(engine)
        return engine

    def session(self, **settings: Any) -> Session:
        return Session(self.engine, **settings)

    @contextmanager
    def begin(self) -> Iterator[Session]:
        """A session that commits at the end of the block, or rolls back for an exception."""
        with Session(self.engine) as session, session.begin():
            yield session

    def async_session(self, **settings: Any) -> AsyncSession:
        return AsyncSession(self.async_engine(), **settings)

    def dispose(self) -> None:
        for engine in {*self._engines, self.observer}:
            engine.dispose()
        self.kept.close()

    @contextmanager
    def last_connection(self) -> Iterator[sa.Connection]:
        """The owner's, when all others are closed but the kept."""
        for engine in filter(None, (self.engine, self._dispatchers)):
            self.kept.keep_one_of(engine)
        for engine in self._engines:
            if engine is not self.observer:
                engine.dispose()
        with self.observer.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            yield connection

    # --- what is committed

    def rows(self, table: sa.Table) -> list[sa.Row[Any]]:
        with self.observer.connect() as connection:
            return list(connection.execute(sa.select(table).order_by(*table.primary_key)))

    @property
    def entries(self) -> list[sa.Row[Any]]:
        return self.rows(TABLES.entry)

    @property
    def queue(self) -> list[sa.Row[Any]]:
        return self.rows(TABLES.queue)

    @property
    def records(self) -> list[sa.Row[Any]]:
        return self.rows(TABLES.record)

    @property
    def orders(self) -> list[sa.Row[Any]]:
        return self.rows(Order.__table__)  # type: ignore[arg-type]

    def operations(self) -> list[str]:
        return sorted(entry.operation for entry in self.entries)

    def counts(self) -> dict[str, int]:
        """How many rows of each kind a request leaves: the form in which tests say all or nothing."""
        return {
            "orders": len(self.orders),
            "records": len(self.records),
            "entries": len(self.entries),
            "queue": len(self.queue),
        }

    # --- making time pass

    def owner(self) -> AbstractContextManager[sa.Connection]:
        """A transaction with the rights of the tables' owner."""
        return (self.engine if self.roles is None else self.observer).begin()

    def execute(self, statement: sa.Executable) -> None:
        with self.owner() as connection:
            connection.execute(statement)

    def age_records(self, by: timedelta) -> None:
        """As if every record had been stored `by` earlier."""
        microseconds = by // MICROSECOND
        earlier = {
            "postgresql": f"- interval '{by.total_seconds():f} seconds'",
            "portable": f"- interval '{by.total_seconds():f} seconds'",
            "sqlite": f"- {microseconds}",
            "mariadb": f"- INTERVAL {microseconds} MICROSECOND",
        }[self.name]
        columns = ("created_at", "answered_at", "replay_until", "keep_until")
        changes = ", ".join(f"{column} = {column} {earlier}" for column in columns)
        self.execute(sa.text(f"UPDATE {TABLES.record.name} SET {changes}"))


def _prepare(engine: sa.Engine | AsyncEngine) -> None:
    """As an app prepares its engine; but no commit waits for the disk: a test survives a killed process, not a power cut."""
    outbox.prepare_sqlite(engine)
    pool = engine.sync_engine if isinstance(engine, AsyncEngine) else engine

    @sa.event.listens_for(pool, "connect")
    def _do_not_wait_for_the_disk(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous = OFF")
        cursor.close()


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The nodes of a plan, as `EXPLAIN (FORMAT JSON)` has them, each before those below it."""
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


@contextmanager
def statements_of(engine: sa.Engine) -> Iterator[list[str]]:
    """The SQL that the engine sends during the block."""
    sent: list[str] = []

    def before(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        sent.append(statement)

    sa.event.listen(engine, "before_cursor_execute", before)
    try:
        yield sent
    finally:
        sa.event.remove(engine, "before_cursor_execute", before)


class Client:
    """Sends one request at a time to the shop, whose handler is `handler(session, claim)`.

    The session is the handler's own transaction, of a Session or of an AsyncSession: what holds for one holds for both.
    """

    def __init__(self, database: Database, ob: outbox.Outbox, *, is_async: bool) -> None:
        self._database = database
        self._ob = ob
        self._is_async = is_async

    def request(
        self, handler: Handler | None = None, *, even_in_a_replay: bool = False, **changed: Any
    ) -> outbox.Response:
        """Handle the request and commit; `changed` are arguments of `idempotent`. Returns its response, new or replayed."""
        handle = handler or self.place_order

        def work(session: Session, claim: outbox.Claim) -> None:
            if even_in_a_replay or not claim.replayed:
                handle(session, claim)

        async def run() -> outbox.Claim:
            async with (
                self._database.async_session() as session,
                session.begin(),
                self._block(session, changed) as claim,
            ):
                await session.run_sync(work, claim)
            return claim

        if self._is_async:
            return asyncio.run(run()).require_response()
        with self._database.session() as session:
            with self._block(session, changed) as claim:
                work(session, claim)
            session.commit()
        return claim.require_response()

    def commit_despite(self, handler: Handler, **changed: Any) -> BaseException:
        """As a caller who catches what comes out of the block, and commits. Returns what was caught."""
        caught: list[BaseException] = []

        async def run() -> None:
            async with self._database.async_session() as session:
                try:
                    async with self._block(session, changed) as claim:
                        await session.run_sync(handler, claim)
                except Exception as error:
                    caught.append(error)
                    await session.commit()

        def run_sync() -> None:
            with self._database.session() as session:
                try:
                    with self._block(session, changed) as claim:
                        handler(session, claim)
                except Exception as error:
                    caught.append(error)
                    session.commit()

        with suppress(outbox.ClaimError, sa.exc.PendingRollbackError):  # the commit itself may be refused
            asyncio.run(run()) if self._is_async else run_sync()
        assert caught, "nothing came out of the block"
        return caught[0]

    def place_order(self, session: Session, claim: outbox.Claim) -> None:
        """What a good handler does."""
        session.add(Order(customer="ada", amount=2000))
        self._ob.enqueue(session, CHARGE, PAYLOAD)
        claim.respond(201, {"order": "placed"})

    def _block(self, session: Any, changed: Mapping[str, Any]) -> IdempotentBlock:
        arguments = {"key": "retry-001", "scope": "acct_1", "content": REQUEST} | changed
        return self._ob.idempotent(session, **arguments)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # A container may have no init that reaps: what is left of an orphan there is its number.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # gone meanwhile, or a system without /proc


NOTHING = {"orders": 0, "records": 0, "entries": 0, "queue": 0}
ALL = {"orders": 1, "records": 1, "entries": 1, "queue": 1}
