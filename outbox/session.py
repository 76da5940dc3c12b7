"""What we keep on a session: the entries that wait for its next flush, the open claim; and the events that tend to them.

An entry lives and dies with its savepoint: `begin_nested()` flushes first, so what was enqueued before a savepoint
survives its rollback, and what was enqueued inside goes with it, flushed or not.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, overload
from uuid import UUID

from sqlalchemy import Column, Connection, Integer, MetaData, Table, event
from sqlalchemy.orm import Session, SessionTransaction, registry, scoped_session
from sqlalchemy.orm.attributes import flag_dirty
from sqlalchemy.orm.session import make_transient_to_detached

from outbox.configuration import Configuration
from outbox.databases import require_transaction
from outbox.entries import Companion, NewEntry, insert_entries
from outbox.errors import ClaimError, DuplicateEntry, NoTransaction, OutboxError
from outbox.keys import ParentKey

Result = TypeVar("Result")
_KEY = "sqlalchemy-outbox"


class ClaimedParent(NamedTuple):
    """What an open claim gives to the entries inside it: its parent key, the kid it is pinned to, its record."""

    parent: ParentKey
    kid: str
    record_id: UUID | None


class OpenClaim(Protocol):
    """What the session's events ask of a claim."""

    def parent_for(self, configuration: Configuration) -> ClaimedParent | None: ...
    def after_begin(self, connection: Connection) -> None: ...
    def before_flush(self, session: Session) -> None: ...
    def before_commit(self) -> None: ...
    def transaction_ended(self) -> None: ...


class _Marker:
    """A persistent object without columns to change: while it is flagged dirty the unit of work has something to flush."""


registry().map_imperatively(_Marker, Table("outbox_marker", MetaData(), Column("id", Integer, primary_key=True)))


class SessionState:
    """What one session holds for its outbox.

    pending: entries that wait for the next flush, each with the savepoint it was enqueued in, by configuration and id;
        no configuration without any.
    claim: the open idempotency claim, if any.
    doomed: why this transaction must not commit any more.
    companion: what may be written by the same statement as the pending entries.
    committed: the transaction has committed and is about to end: too late to write anything in it.
    at_end: what to call when the transaction has ended and its locks are gone, and tell whether it committed; it raises nothing.
    """

    __slots__ = ("at_end", "claim", "committed", "companion", "doomed", "marker", "pending")

    def __init__(self) -> None:
        self.pending: dict[Configuration, dict[UUID, tuple[NewEntry, SessionTransaction | None]]] = {}
        self.claim: OpenClaim | None = None
        self.companion: Companion | None = None
        self.doomed: ClaimError | None = None
        self.committed = False
        self.at_end: list[Callable[[bool], None]] = []
        self.marker: _Marker | None = None

    def keep(self, session: Session, configuration: Configuration, entry: NewEntry) -> NewEntry:
        """Keep `entry` for the session's next flush, unless one of its id is kept already. Returns the one that is kept."""
        if self.committed:
            raise NoTransaction("enqueue in an after_commit listener comes too late: the transaction is over")
        if not self.pending and not session.new:
            self._mark(session)
        pending = self.pending.setdefault(configuration, {})
        kept, _ = pending.setdefault(entry.id, (entry, session.get_nested_transaction()))
        return kept

    def _mark(self, session: Session) -> None:
        """Give the unit of work something to flush."""
        if self.marker is None or self.marker not in session:
            self.marker = _Marker()
            self.marker.id = 1  # type: ignore[attr-defined]  # mapped imperatively
            make_transient_to_detached(self.marker)
            session.add(self.marker)
        flag_dirty(self.marker)

    def drop(self, rolled_back: SessionTransaction) -> None:
        """Forget what was enqueued in a savepoint, or a transaction, that was rolled back."""
        standing = list(_enclosing(rolled_back))
        outermost = rolled_back.parent is None
        for configuration, pending in list(self.pending.items()):
            for id, (_, savepoint) in list(pending.items()):
                if outermost or (savepoint is not None and savepoint not in standing):
                    del pending[id]
            if not pending:
                del self.pending[configuration]

    def _companion_of(self, configuration: Configuration) -> Companion | None:
        companion = self.companion
        return companion if companion is not None and companion.configuration is configuration else None

    def write(self, session: Session) -> None:
        """Insert what is pending, one statement per configuration. Raises `DuplicateEntry` when all is inserted."""
        connection = session.connection()
        require_transaction(connection)
        found: list[NewEntry] = []
        for configuration, pending in self.pending.items():
            entries = [entry for entry, _ in pending.values()]
            if present := insert_entries(connection, configuration, entries, self._companion_of(configuration)):
                found += [entry for entry in entries if entry.id in present]
        self.pending = {}  # only now: what failed to be written must not be forgotten
        for entry in found:
            if not entry.keep_first:
                raise duplicate(entry)


def _enclosing(transaction: SessionTransaction) -> Iterator[SessionTransaction]:
    while transaction.parent is not None:
        transaction = transaction.parent
        yield transaction


def duplicate(entry: NewEntry) -> DuplicateEntry:
    return DuplicateEntry(
        f"{entry.operation!r} of parent {entry.parent!r} (scope {entry.scope!r}, source"
        f" {entry.source!r}) with discriminator {entry.discriminator!r} was enqueued before: give another"
        " discriminator for another effect, or if_exists='ignore' to keep the first",
        entry.id,
    )


def state_of(session: Session) -> SessionState:
    """The session's state, made at its first use."""
    state: SessionState | None = session.info.get(_KEY)
    if state is None:
        state = session.info[_KEY] = SessionState()
    return state


# --- Session and AsyncSession alike


class AsyncSessionLike(Protocol):
    """An `AsyncSession`, known by its shape: naming the class would make the asyncio extra a requirement."""

    @property
    def sync_session(self) -> Session: ...

    async def run_sync(self, fn: Callable[..., Result], *args: Any, **kw: Any) -> Result: ...


AnySession = Session | scoped_session[Any] | AsyncSessionLike


def sync_session(session: Any) -> Session:
    """The plain Session in which the work is done, whatever was handed in."""
    if isinstance(session, Session):
        return session
    inner = getattr(unscoped(session), "sync_session", None) or unscoped(session)
    if not isinstance(inner, Session):
        raise OutboxError(f"a Session or AsyncSession is needed, not {type(session).__name__}")
    return inner


def unscoped(session: Any) -> Any:
    """The session that a scoped_session or async_scoped_session stands for here; any other as it is."""
    return session() if hasattr(session, "registry") else session


@overload
def in_session(session: Session | scoped_session[Any], work: Callable[[Session], Result]) -> Result: ...
@overload
def in_session(session: AsyncSessionLike, work: Callable[[Session], Result]) -> Awaitable[Result]: ...
def in_session(session: Any, work: Callable[[Session], Result]) -> Result | Awaitable[Result]:
    """Do `work` on the plain Session: at once for a Session, as an awaitable for an AsyncSession."""
    session = unscoped(session)
    if not hasattr(session, "run_sync"):
        return work(sync_session(session))
    awaitable: Awaitable[Result] = session.run_sync(work)
    return awaitable


# --- events, on every Session of the process; each costs one look into `session.info`


@event.listens_for(Session, "after_begin")
def _after_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    state: SessionState | None = session.info.get(_KEY)
    if state is not None and state.claim is not None:
        state.claim.after_begin(connection)


@event.listens_for(Session, "before_flush")
def _before_flush(session: Session, flush_context: object, instances: object) -> None:
    state: SessionState | None = session.info.get(_KEY)
    if state is None:
        return
    if state.marker is not None and state.marker in session:
        session.expunge(state.marker)
    if state.claim is not None:
        state.claim.before_flush(session)
    if state.pending:
        state.write(session)


@event.listens_for(Session, "after_flush_postexec")
def _after_flush(session: Session, flush_context: object) -> None:
    # What other listeners enqueued during the flush itself: the commit may not flush again.
    state: SessionState | None = session.info.get(_KEY)
    if state is not None and state.pending:
        state.write(session)


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    state: SessionState | None = session.info.get(_KEY)
    if state is None:
        return
    if not session.in_nested_transaction():
        if state.doomed is not None:
            raise state.doomed
        if state.claim is not None:
            state.claim.before_commit()
    if state.pending:  # nothing else may be left to flush: an entry is not lost by that
        state.write(session)


@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    state: SessionState | None = session.info.get(_KEY)
    if state is not None and not session.in_nested_transaction():  # it comes for a released savepoint, too
        state.committed = True


@event.listens_for(Session, "after_soft_rollback")
def _after_soft_rollback(session: Session, previous: SessionTransaction) -> None:
    state: SessionState | None = session.info.get(_KEY)
    if state is not None and state.pending:
        state.drop(previous)


@event.listens_for(Session, "after_transaction_end")
def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    state: SessionState | None = session.info.get(_KEY)
    if state is None or transaction.parent is not None:
        return
    state.pending.clear()
    state.doomed = None
    committed, state.committed = state.committed, False
    if state.claim is not None:  # it stays, to guard what its block still does
        state.claim.transaction_ended()
    calls, state.at_end = state.at_end, []
    for call in calls:
        call(committed)
