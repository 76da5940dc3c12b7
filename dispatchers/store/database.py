"""The store on a real database: leases entries, and settles them only while their leases are valid.

Every method uses short transactions of its own, which are committed before anything is sent. `claims_postgresql` and
`claims_rows` have the SQL.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import URL, Connection, Engine, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from dispatchers.callbacks import AppTransactions, Calls, OnCompleted
from dispatchers.database_identity import DatabaseIdentity, IdentityCheck
from dispatchers.flow_control.fair_share import FairCursor
from dispatchers.flow_control.state import FlowUpdate
from dispatchers.periodic.schedules import Schedule, Tick
from dispatchers.store.app_code import callback_registry
from dispatchers.store.app_code.callback_plan import Calling, call_completed, call_settled
from dispatchers.store.app_code.callback_transactions import CALLBACK_TIMEOUT, CallbackTransactions
from dispatchers.store.app_code.schedule_calls import call_tick
from dispatchers.store.connections.guards import Guards, guard
from dispatchers.store.connections.listener import Listener
from dispatchers.store.connections.transactions import MAINTENANCE, Transactions
from dispatchers.store.protocol import Exchange, Survey
from dispatchers.store.queue import claims_postgresql, claims_rows
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.store.queue.exchange import Exchanges, QueueSql
from dispatchers.store.queue.sealed_entries import open_claimed, seal_endings
from dispatchers.store.queue.stuck_groups import StuckGroups
from dispatchers.store.queue.throttling import make_rows, read_flow_states
from dispatchers.store.queue.unstarted_leases import read_leased
from dispatchers.store.records import identity as store_identity
from dispatchers.store.records.queries import (
    Accepted,
    Wanted,
    destination_names,
    known_destinations,
    next_accepted,
    request_lookups,
)
from dispatchers.threads import on_own_thread
from dispatchers.transitions import ClaimedEntry, End, Ending, Release
from outbox import migrations
from outbox.configuration import Configuration
from outbox.errors import ConfigurationError
from outbox.keys import KeyFields, Keyring, ParentKey, key_fields
from outbox.sql.connections.engines import engine_of, url_of
from outbox.sql.connections.forks import watch
from outbox.sql.connections.requirements import require_schema
from outbox.sql.deployment import record_data_keys, record_secrets, require_data_keys, require_usable
from outbox.sql.dialect import Writes, dialect_of, dialect_of_url
from outbox.sql.mariadb.settings import Unseen, apply_all
from outbox.sql.schema.tables import ENCRYPTED_VERSION, Tables

Result = TypeVar("Result")

log = logging.getLogger("outbox.dispatcher")

KEY_THREAD = "outbox-keys"

SERVER_UNREADABLE = (
    "this role may not read the server's system identifier, timeline and log position, so failovers, and some restores and"
    " copies, are not detected"
)


class DatabaseStore:
    """The store on a real database. Takes a URL, an Engine or an AsyncEngine.

    Blocking work runs on a thread; with an AsyncEngine, on the event loop through SQLAlchemy's `run_sync`.
    lease: the dispatcher's lease, from which the time limits of the transactions are calculated.
    """

    def __init__(
        self,
        target: Any,
        configuration: Configuration,
        *,
        lease: timedelta = timedelta(seconds=60),
        callback_timeout: timedelta = CALLBACK_TIMEOUT,
        callback_transactions: AppTransactions | None = None,
        promotions_lose_nothing: bool = False,
    ) -> None:
        self._async_engine = target if hasattr(target, "sync_engine") else None
        self._engine: Engine = getattr(target, "sync_engine", None) or _engine(target)
        self._is_ours = isinstance(target, str | URL)  # the app disposes of an engine that it passed in
        dialect = dialect_of(self._engine)
        watch(self._engine)
        dialect.prepare(self._engine)
        self._configuration = configuration
        require_schema(self._engine.get_execution_options(), configuration.schema)
        self.tables: Tables = configuration.tables
        self._transactions = Transactions(self._engine, self._async_engine, lease)
        self._run = self._transactions.run
        self._callback_guards = Guards()  # `CallbackTransactions` sets the limits of that transaction
        sql: QueueSql = claims_postgresql if dialect.writes is Writes.ARRAYS else claims_rows
        rounds = FairCursor(configuration.fair)
        exchange = partial(self._transactions.run_unguarded, what="settling and claiming")
        run_one = partial(exchange, is_one_statement=True) if dialect.has_limits else None
        self._exchanges = Exchanges(exchange, self.tables, sql, rounds, self._transactions.guards, run_one=run_one)
        self._takes_async_callbacks = self._async_engine is not None or callback_transactions is not None
        self._callbacks = CallbackTransactions(
            self._engine,
            self._async_engine,
            callback_timeout,
            schema=configuration.schema,
            run=self._run,
            app=callback_transactions,
        )
        self._stuck_groups = StuckGroups(self.tables)
        names = destination_names(self.tables)
        self._names = select(names.c.name).where(names.c.name.is_not(None))
        self._callbacks_read: str | None = None
        self._made_rows: set[str] = set()
        self._reads_server = True
        self._promotions_lose_nothing = promotions_lose_nothing

    async def exchange(self, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        read = self._callbacks_read  # before any wait: the caller has decided by this record
        flow_update = request.flow_update if request else None
        if flow_update is not None:
            await self._make_rows(flow_update)
        if request is not None and self._configuration.encryption is not None:
            request = replace(request, readable=ENCRYPTED_VERSION)
        exchange = await self._exchanges.exchange(await self._sealed(settlements), request, read)
        if flow_update is not None and exchange.flow_states is not None:
            asked = flow_update.decided.union(flow_update.news)
            self._made_rows -= (
                asked - exchange.flow_states.of.keys()
            )  # another transaction has locked or deleted these rows
        return await self._opened(exchange) if exchange.claimed else exchange

    async def _opened(self, exchange: Exchange) -> Exchange:
        """The exchange with decrypted entries. A key service is called on a thread."""
        encryption = self._configuration.encryption
        if encryption is None:
            return exchange
        if encryption.calls_out:
            claimed, unopened = await on_own_thread(KEY_THREAD, open_claimed, encryption, exchange.claimed)
        else:
            claimed, unopened = open_claimed(encryption, exchange.claimed)
        return replace(exchange, claimed=claimed, unopened=unopened)

    async def _sealed(self, settlements: Sequence[Ending]) -> Sequence[Ending]:
        """The transitions with encrypted results."""
        encryption = self._configuration.encrypting
        if encryption is None or not settlements:
            return settlements
        if not encryption.calls_out:
            return seal_endings(encryption, settlements)
        sealed: Sequence[Ending] = await on_own_thread(KEY_THREAD, seal_endings, encryption, settlements)
        return sealed

    async def _make_rows(self, flow_update: FlowUpdate) -> None:
        """Insert missing rows in a transaction without other locks: two that insert the same row wait for each other."""
        missing = flow_update.decided.union(flow_update.news) - self._made_rows
        if missing:
            await self._run(lambda connection: make_rows(connection, self.tables, missing))
            self._made_rows |= missing

    @property
    def listener(self) -> Listener | None:
        if not self._configuration.hints:
            return None
        is_async = self._async_engine is not None
        return Listener(self._engine, is_async=is_async, configuration=self._configuration, run=self._run)

    @property
    def max_connections(self) -> int | None:
        pool = self._engine.pool
        overflow = getattr(pool, "_max_overflow", -1)  # SQLAlchemy has no public name for it; only reports use it
        return pool.size() + overflow if isinstance(pool, QueuePool) and overflow >= 0 else None

    @property
    def has_server_checks(self) -> bool:
        return dialect_of(self._engine).has_server_checks

    @property
    def place(self) -> str:
        url = self._engine.url
        # Other parameters may contain a password.
        kept = {name: url.query[name] for name in ("host", "port") if name in url.query}
        return url.set(query=kept).render_as_string(hide_password=True)

    @property
    def takes_async_callbacks(self) -> bool:
        return self._takes_async_callbacks

    def release(self, entries: Sequence[ClaimedEntry], tokens: Collection[UUID], reason: str) -> int:
        def work(connection: Connection) -> int:
            guards = self._transactions.guards
            guard(connection, guards)
            leased = [*entries, *read_leased(connection, self.tables, tokens)]
            released = [(entry, Release(reason)) for entry in leased]
            return len(self._exchanges.settle(connection, released, guards, None)) if released else 0

        return self._transactions.run_blocking(work)

    async def settle_with(self, entry: ClaimedEntry, end: End, calls: Calls) -> bool:
        read = self._callbacks_read  # before any wait: the caller has decided by this record
        stored = await self._sealed([(entry, end)])

        def calling(connection: Connection, session: Session) -> Calling:
            if not self._exchanges.settle(connection, stored, self._callback_guards, read):
                return False
            return (yield from call_settled(connection, self._configuration, session, entry, end, calls))

        def calling_when_applied(connection: Connection, session: Session) -> Calling:
            apply_all(connection)
            return (yield from calling(connection, session))

        try:
            return await self._callbacks.run(calling)
        except Unseen:
            return await self._callbacks.run(calling_when_applied)

    async def callbacks(self, registered: Collection[str] = ()) -> frozenset[str]:
        on_record = await self._run(lambda connection: callback_registry.register(connection, self.tables, registered))
        self._callbacks_read = callback_registry.summary(on_record)
        return on_record

    async def take_over(self, callbacks: Collection[str]) -> int:
        return await self._run(lambda connection: callback_registry.take_over(connection, self.tables, callbacks))

    async def accepted(self, after: Accepted | None) -> list[Accepted]:
        return await self._run(lambda connection: next_accepted(connection, self.tables, after))

    async def complete(self, record_id: UUID, function: OnCompleted) -> bool:
        def calling(connection: Connection, session: Session) -> Calling:
            return call_completed(connection, self._configuration, session, record_id, function)

        return await self._callbacks.run(calling)

    async def request_lookups(self, wanted: Wanted, fencing_delay: timedelta, after: UUID | None) -> UUID | None:
        return await self._run(
            lambda connection: request_lookups(connection, self.tables, wanted, fencing_delay, after)
        )

    async def call_schedule(self, schedule: Schedule, tick: Tick) -> bool:
        def calling(connection: Connection, session: Session) -> Calling:
            return call_tick(connection, self._configuration, session, schedule, tick)

        return await self._callbacks.run(calling)

    async def check_identity(self, env: str, known: DatabaseIdentity | None) -> IdentityCheck:
        def work(connection: Connection) -> IdentityCheck:
            trusted = self._promotions_lose_nothing
            return store_identity.check_identity(
                connection, self.tables, env, known, reads_server=self._reads_server, promotions_lose_nothing=trusted
            )

        try:
            return await self._run(work)
        except DBAPIError as error:
            if not (self._reads_server and store_identity.refuses(error)):
                raise
            log.warning("%s", SERVER_UNREADABLE)
            self._reads_server = False
            return await self._run(work)

    async def survey(self) -> Survey:
        def work(connection: Connection) -> Survey:
            self._stuck_groups.sweep(connection)
            destinations = list(connection.execute(self._names).scalars())
            return Survey(
                destinations,
                read_flow_states(connection, self.tables),
                known_destinations(connection, self.tables),
            )

        return await self._run(work)

    async def key_fields(self, entry_id: UUID) -> KeyFields:
        entry = self.tables.entry

        def work(connection: Connection) -> KeyFields:
            row = connection.execute(select(entry).where(entry.c.id == entry_id)).one()
            parent = ParentKey(row.parent, scope=row.scope, source=row.source)
            return key_fields(row.env, parent, row.operation, row.discriminator)

        return await self._run(work)

    async def require_usable(self, env: str, keyring: Keyring) -> None:
        schema, prefix = self._configuration.schema, self._configuration.prefix
        await self._run(partial(migrations.check, schema=schema, prefix=prefix))
        await self._run(lambda connection: require_usable(connection, self.tables, env, keyring))
        encryption = self._configuration.encryption
        if encryption is not None and encryption.checks:
            await self._run(lambda connection: require_data_keys(connection, self.tables, encryption))
        await self._callbacks.require_same_database()

    async def record_secrets(self, keyring: Keyring) -> None:
        await self._run(lambda connection: record_secrets(connection, self.tables, keyring))
        encryption = self._configuration.encryption
        if encryption is not None and encryption.checks:
            await self._run(lambda connection: record_data_keys(connection, self.tables, encryption))

    async def close(self) -> None:
        """Close the pooled connections, unless the app passed the engine in."""
        await self._transactions.close(dispose=self._is_ours)

    async def run(self, work: Callable[[Connection], Result]) -> Result:
        return await self._run(work, MAINTENANCE)

    async def run_apart(self, work: Callable[[Connection], Result]) -> Result:
        return await self._transactions.run_apart(work)


def _engine(target: Any) -> Engine:
    if isinstance(target, Engine):
        return target
    if not isinstance(target, str | URL):
        raise ConfigurationError(f"a dispatcher needs a URL, an Engine or an AsyncEngine, not {type(target).__name__}")
    url = url_of(target, "a dispatcher")
    if url.get_dialect().is_async:
        raise ConfigurationError(f"the driver of {url.drivername!r} is asynchronous: pass create_async_engine(url)")
    return engine_of(url, connect_args=_waits(url))


MAX_ANSWER_SECONDS = 30
"""How long to wait for an answer where nothing watches for a silent connection: `watchdog`. Longer than any statement
of a dispatcher takes, and half the default lease. A URL may have another `read_timeout` or `write_timeout`."""


def _waits(url: URL) -> dict[str, int]:
    return {name: MAX_ANSWER_SECONDS for name in dialect_of_url(url).answer_timeouts if name not in url.query}
