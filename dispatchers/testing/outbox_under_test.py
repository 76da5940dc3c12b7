"""The outbox of a test: what the fixtures of the plugin read from it, and what they send."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, Unpack

from sqlalchemy import Connection, MetaData
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateSchema

from dispatchers.delivery import Adapter
from dispatchers.operations import Operations
from dispatchers.process.dispatcher import Dispatcher, work_of
from dispatchers.testing.clock import PassedTime
from dispatchers.testing.database_access import DatabaseAccess, async_engine
from dispatchers.testing.draining import drain
from dispatchers.testing.loop_thread import LoopThread
from dispatchers.threads import is_async
from outbox.configuration import Configuration
from outbox.entries.status import State, every_status
from outbox.errors import ConfigurationError
from outbox.instance import Outbox
from outbox.sessions.session import unscoped
from outbox.sql.dialect import dialect_of, dialect_of_url
from outbox.sql.schema.tables import Tables, tables_of
from outbox.testing import (
    Conditions,
    Counted,
    Enqueued,
    all_enqueued,
    read_entries,
    require_enqueued,
    require_not_enqueued,
)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Enqueued):
    """An entry that a drain has sent or settled.

    state: delivered, failed and cancelled are final. result: the part of the service's answer that the adapter kept.
    reason: why the entry failed, waits or is uncertain, if so. attempts: how many sends may have left.
    """

    state: State
    result: Any
    reason: str | None
    attempts: int


# --- tables


def table_creator(metadata: MetaData | Collection[MetaData], outbox: Outbox) -> Callable[[Connection], None]:
    """Creates the app's tables, and the outbox's if they are not among them."""

    def create(connection: Connection) -> None:
        tables = tables_under_test(outbox)
        for each in [metadata] if isinstance(metadata, MetaData) else metadata:
            each.create_all(connection)
        if tables.entry.schema is not None and dialect_of(connection).has_functions:
            connection.execute(CreateSchema(tables.entry.schema, if_not_exists=True))
        tables.metadata.create_all(connection)

    return create


def tables_under_test(outbox: Outbox) -> Tables:
    """The outbox's tables. The default ones for an app that configures the outbox only after its database exists."""
    try:
        return outbox.configuration.tables
    except ConfigurationError:
        return tables_of(None, "outbox_")


# --- reading


class OutboxUnderTest:
    """Reads what a test sees.

    session: the fixture `outbox_session`, if the test uses it. In its open transaction, what it has not committed is read too.
    """

    def __init__(self, outbox: Outbox, access: DatabaseAccess, session: Any = None) -> None:
        self.outbox = outbox
        self.access = access
        self._session = session

    def read(self, work: Callable[[Session], Result]) -> Result:
        """Run `work`, which only reads, on a session of the test's database."""
        if self._session is None:
            return self.read_committed(work)
        session = unscoped(self._session)
        if hasattr(session, "run_sync"):
            raise ConfigurationError(
                "outbox_session is an AsyncSession, which a fixture cannot read: use `await` with the functions of"
                " outbox.testing, as in `await assert_enqueued(session, ...)`"
            )
        if session.in_transaction():
            return work(session)
        with Session(session.get_bind(), join_transaction_mode="create_savepoint") as beside:
            return work(beside)

    def read_committed(self, work: Callable[[Session], Result]) -> Result:
        """Run `work`, which only reads, on a connection of its own."""

        def run(connection: Connection) -> Result:
            with Session(connection) as session:
                return work(session)

        return self.access.run(run)

    def entries(self, outbox: Outbox | None = None) -> list[Enqueued]:
        """Every entry, oldest first. outbox: another one in the same database."""
        return self.read(partial(read_entries, configuration=(outbox or self.outbox).configuration))

    def require_committed(self) -> None:
        """Raise `ConfigurationError` if the session's transaction has what a dispatcher cannot see, or locks the file."""
        __tracebackhide__ = True
        if self._session is None or not _is_in_transaction(unscoped(self._session)):
            return
        if dialect_of_url(self.access.url).is_file:
            raise ConfigurationError(
                "outbox_session has an open transaction, which locks SQLite's file, also after a read: call"
                " outbox_session.commit() before outbox_drain"
            )
        committed = {entry.id for entry in self.read_committed(self._read)}
        if missing := [entry for entry in self.entries() if entry.id not in committed]:
            raise ConfigurationError(
                f"outbox_session has an open transaction with {len(missing)} entries that are not committed, and"
                " outbox_drain sends what is committed: call outbox_session.commit() before it. In a test that is rolled back at"
                " its end, assert what is enqueued, and drain in another test"
            )

    def _read(self, session: Session) -> list[Enqueued]:
        return read_entries(session, self.outbox.configuration)

    @property
    def tables(self) -> Tables:
        return self.outbox.configuration.tables


def _is_in_transaction(session: Any) -> bool:
    """Whether the session has a transaction open, or its connection one that is rolled back at the test's end."""
    if hasattr(session, "run_sync"):
        return bool(session.in_transaction())
    bind = session.get_bind()
    return bool(session.in_transaction() or (isinstance(bind, Connection) and bind.in_transaction()))


class OutboxEntries:
    """What the app has enqueued: `outbox_entries()`, or `outbox_entries("email.send", parent="order:42")`."""

    def __init__(self, tested: OutboxUnderTest) -> None:
        self._tested = tested

    def __call__(self, operation: str | None = None, **conditions: Unpack[Conditions]) -> list[Enqueued]:
        """Return the entries that match, oldest first; sent ones too."""
        asked: Conditions = {"outbox": self._tested.outbox, **conditions}
        return self._tested.read(lambda session: all_enqueued(session, operation, **asked))


class AssertEnqueued:
    """`outbox.testing.assert_enqueued` without a session."""

    def __init__(self, tested: OutboxUnderTest) -> None:
        self._tested = tested

    def __call__(self, operation: str, payload: Any = None, **conditions: Unpack[Counted]) -> list[Enqueued]:
        """Assert that exactly `count` entries match, and return them; see `outbox.testing.assert_enqueued`."""
        __tracebackhide__ = True
        return require_enqueued(self._tested.entries(conditions.get("outbox")), operation, payload, conditions)


class AssertNotEnqueued:
    """`outbox.testing.assert_not_enqueued` without a session."""

    def __init__(self, tested: OutboxUnderTest) -> None:
        self._tested = tested

    def __call__(
        self, operation: str | None = None, payload: Any = None, **conditions: Unpack[Conditions]
    ) -> list[Enqueued]:
        """Assert that no entry matches, or without an operation that there is none."""
        __tracebackhide__ = True
        return require_not_enqueued(self._tested.entries(conditions.get("outbox")), operation, payload, conditions)


# --- sending


def make_dispatcher(
    outbox: Outbox,
    access: DatabaseAccess,
    operations: Operations | Collection[Operations],
    adapters: Mapping[str, Adapter],
    **settings: Any,
) -> Dispatcher:
    """A dispatcher for the test's database. With an async callback it has an AsyncEngine, which the callback needs."""
    include = [operations] if isinstance(operations, Operations) else list(operations)
    has_async = any(is_async(function) for each in include for function in each.callbacks.values())
    needs_async = has_async and "callback_transactions" not in settings
    engine = async_engine(access.url) if needs_async or access.engine is None else access.engine
    return Dispatcher(engine, include=include, adapters=adapters, outbox=outbox, **settings)


class OutboxDrain:
    """Sends what is enqueued: `outbox_drain()`, or `outbox_drain(ahead=True)`, which waits for nothing.

    It works in a sync test and in an async one. An async test's own loop waits meanwhile: if an adapter needs it, use
    `await dispatchers.testing.drain(dispatcher)`.
    """

    def __init__(self, tested: OutboxUnderTest, dispatcher: Dispatcher, loop: LoopThread, passed: PassedTime) -> None:
        self._tested = tested
        self._dispatcher = dispatcher
        self._loop = loop
        self._passed = passed

    def __call__(self, *, ahead: bool = False) -> list[Drained]:
        """Send until nothing is due, with what callbacks enqueue. Return each entry that changed, oldest first.

        ahead: also send what is due later, such as a retry after its backoff, as if the time had passed: see `outbox_clock`.
        Raises `ConfigurationError` if entries are not committed, and if no adapter serves one of them.
        """
        __tracebackhide__ = True
        self._tested.require_committed()
        before = {entry.id: (entry.state, entry.attempts) for entry in self._served()}
        self._loop.run(drain(self._dispatcher, ahead=ahead, passed=self._passed))
        after = self._served()
        return [entry for entry in after if (entry.state, entry.attempts) != before.get(entry.id, ("pending", 0))]

    def close(self) -> None:
        """Close the dispatcher."""
        self._loop.run(self._dispatcher.close())

    def _served(self) -> list[Drained]:
        """Every entry. One that no adapter serves would wait permanently."""
        __tracebackhide__ = True
        entries = self._tested.read_committed(partial(_read_drained, configuration=self._tested.outbox.configuration))
        served = work_of(self._dispatcher).serves
        waiting = {entry.operation for entry in entries if entry.state in ("pending", "retry")}
        if unserved := sorted(operation for operation in waiting if not served(operation)):
            name = unserved[0].partition(".")[0]
            raise ConfigurationError(
                f"no adapter serves {', '.join(map(repr, unserved))}, so outbox_drain cannot send it: let the fixture"
                f" outbox_adapters return {{{name!r}: MemoryAdapter()}} or your own adapter, or outbox_operations your Operations"
            )
        return entries


def _read_drained(session: Session, configuration: Configuration) -> list[Drained]:
    statuses = {status.id: status for status in every_status(session.connection(), configuration)}
    return [
        Drained(
            **{name: getattr(entry, name) for name in Enqueued.__slots__},
            state=status.state,
            result=status.result,
            reason=status.reason,
            attempts=status.attempts,
        )
        for entry in read_entries(session, configuration)
        if (status := statuses.get(entry.id)) is not None
    ]
