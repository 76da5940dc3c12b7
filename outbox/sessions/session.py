"""The outbox's state on a session (entries to write, the open claim), and the listeners of the session's events.

Entries are written by every flush that has something to flush, before each savepoint, before each commit, and by `flush_all`.
An entry lives and dies with the savepoint in which it was enqueued: `pending_entries.py` keeps count, by the session's
events alone.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, overload
from uuid import UUID

from sqlalchemy import Connection, event
from sqlalchemy.exc import InvalidRequestError, MissingGreenlet
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from outbox.configuration import Configuration
from outbox.errors import ClaimError, DuplicateEntry, NoTransaction, OutboxError
from outbox.keys import ParentKey
from outbox.sessions.entry_rows import Entry, NewEntry, PiggybackedInsert, insert_entries, stored_tags, take_tag
from outbox.sessions.hints import UnsentHints
from outbox.sessions.pending_entries import PendingEntries, PendingEntry
from outbox.sql.connections.transactions import require_transaction

Result = TypeVar("Result")
_KEY = "_sqlalchemy_outbox"
"""The attribute of a session that holds its state. Not in `session.info`: that is the app's, and it may clear it."""


class ClaimedParent(NamedTuple):
    """What an open claim gives to the entries inside it: its parent key, the kid it is pinned to, its record.

    parent, kid: None for an entry of an outbox with other settings, which derives its keys by itself.
    """

    parent: ParentKey | None
    kid: str | None
    record_id: UUID | None


class OpenClaim:
    """Hooks that the session's events call on the open claim. The default of each does nothing.

    before_commit: of a savepoint, or with None of the transaction. savepoint_ended: committed, rolled back or closed; what it
    raises keeps the session from ending the transaction around the savepoint.
    """

    def parent_for(self, configuration: Configuration) -> ClaimedParent | None: ...
    def after_begin(self, connection: Connection) -> None: ...
    def before_flush(self, session: Session) -> None: ...
    def before_commit(self, committed: SessionTransaction | None) -> None: ...
    def savepoint_ended(self, savepoint: SessionTransaction) -> None: ...
    def transaction_ended(self) -> None: ...


@dataclass(slots=True)
class SessionState:
    """What one session holds for its outbox.

    pending: the entries that it must still write. hints: those that it has written, for the dispatchers.
    commits: how many commits are in progress, of savepoints and of the transaction, that have written what was pending. No later
        event of these commits is certain, so entries that their listeners still enqueue are written at once.
    is_flushing: a flush is in progress, at whose end all is written.
    is_released: the savepoint that is about to end was released.
    committed: the transaction has committed and is about to end: too late to write anything in it.
    claim: the open idempotency claim, if any.
    rollback_only: why this transaction must not commit any more. Every later use raises it, until the transaction has ended.
    piggybacked: what may be written by the same statement as the pending entries, once.
    at_end: callbacks for when the transaction has ended and its locks are gone, called with whether it committed; they raise
        nothing.
    """

    pending: PendingEntries = field(default_factory=PendingEntries)
    hints: UnsentHints = field(default_factory=UnsentHints)
    commits: int = 0
    is_flushing: bool = False
    is_released: bool = False
    committed: bool = False
    claim: OpenClaim | None = None
    rollback_only: ClaimError | None = None
    piggybacked: PiggybackedInsert | None = None
    at_end: list[Callable[[bool], None]] = field(default_factory=list)

    def keep(self, session: Session, configuration: Configuration, entry: NewEntry) -> Entry:
        """Keep `entry` until it is written, unless one of its id is kept already. Returns the handle of the one that is kept."""
        self._require_open(session)
        kept = self.pending.add(configuration, entry, _depth_of(session.get_nested_transaction()))
        if kept.entry is not entry and not entry.keep_first:
            raise _duplicate(entry)
        self._write_in_commit(session)
        return kept.handle

    def keep_all(self, session: Session, configuration: Configuration, entries: Sequence[NewEntry]) -> list[Entry]:
        """As `keep`, of all entries or of none. Raises `DuplicateEntry` with the index of the second one."""
        self._require_open(session)
        indexes: dict[UUID, int] = {}
        for index, entry in enumerate(entries):
            first = indexes.setdefault(entry.id, index)
            if not entry.keep_first and (first != index or self.pending.has(configuration, entry.id)):
                raise _duplicate(entry, f"payloads[{index}]: ", "" if first == index else f", by payloads[{first}]")
        depth = _depth_of(session.get_nested_transaction())
        kept = [self.pending.add(configuration, entry, depth).handle for entry in entries]
        self._write_in_commit(session)
        return kept

    def _require_open(self, session: Session) -> None:
        if self.rollback_only is not None:
            raise self.rollback_only
        if self.committed:
            raise NoTransaction("enqueue in an after_commit listener is too late: the transaction has ended")
        if not session.in_transaction():
            _begin(session)  # so that an end of it comes, also if nothing else is done in it

    def _write_in_commit(self, session: Session) -> None:
        if self.commits and not self.is_flushing:
            try:
                self.write(session)
            except MissingGreenlet:
                # The commit of an AsyncSession has failed and is no longer in progress: a later one writes.
                self.commits = 0

    def write(self, session: Session, connection: Connection | None = None) -> None:
        """Insert what is pending, one statement per configuration. Raises `DuplicateEntry` when all is inserted.

        connection: the session's, by default asked for.
        """
        connection = connection or session.connection()
        depth = _depth_of(session.get_nested_transaction())
        refused: list[PendingEntry] = []
        batches = self.pending.take()
        try:
            for configuration, _ in batches:
                require_transaction(connection, configuration.schema)
            while batches:
                configuration, entries = batches[0]
                present = insert_entries(
                    connection, configuration, [each.entry for each in entries], self._piggybacked_insert(configuration)
                )
                self.pending.written(batches.pop(0), depth)
                written = [each.entry for each in entries if each.entry.id not in present]
                self.hints.written(connection, configuration, written, depth)
                if present:
                    found = [each for each in entries if each.entry.id in present]
                    refused += [each for each in found if not each.entry.keep_first]
                    _take_stored_tags(connection, configuration, [each for each in found if each.entry.keep_first])
        finally:
            self.pending.put_back(batches)  # what failed to be written must not be forgotten
        if refused:
            raise _duplicate(refused[0].entry)

    def doom(self, session: Session, error: ClaimError) -> ClaimError:
        """Keep the session's transaction from committing. Returns the error that every later use raises."""
        if self.rollback_only is None:
            self.rollback_only = error
            event.listen(session, "do_orm_execute", self._refuse)
        if not session.in_transaction():  # it has ended: another must not take its place as if nothing had happened
            with suppress(InvalidRequestError):  # within `with session.begin()`; SQLAlchemy itself refuses what follows
                session.begin()
        return self.rollback_only

    def _refuse(self, execution: object) -> None:
        if self.rollback_only is not None:
            raise self.rollback_only

    def _piggybacked_insert(self, configuration: Configuration) -> PiggybackedInsert | None:
        piggybacked = self.piggybacked
        if piggybacked is None or piggybacked.configuration != configuration or piggybacked.written is not None:
            return None
        return piggybacked

    def write_before(self, savepoint: SessionTransaction) -> None:
        """Write what is pending before `savepoint`, which is being begun, has reached the database."""
        around = savepoint.parent
        try:
            self.write(savepoint.session, around.connection(None) if around is not None else None)
        except BaseException:
            savepoint.rollback()  # no caller has it yet
            raise

    def savepoint_ended(self, savepoint: SessionTransaction) -> None:
        """Released or not: by `rollback`, by `close`, by the end of its outer transaction."""
        depth = _depth_of(savepoint)
        if self.is_released:
            self.is_released = False
            self.pending.released(depth)
            self.hints.released(depth)
        else:
            self.commits = 0
            self.pending.rolled_back(depth)
            self.hints.rolled_back(depth)
        if self.claim is not None:
            self.claim.savepoint_ended(savepoint)

    def forget_entries(self) -> None:
        """Everything that was enqueued in the transaction has been undone."""
        self.pending.clear()
        self.hints.clear()

    def transaction_ended(self, session: Session) -> None:
        self.pending.clear()
        if self.rollback_only is not None:
            self.rollback_only = None
            event.remove(session, "do_orm_execute", self._refuse)
        self.commits = 0
        self.is_flushing = self.is_released = False
        committed, self.committed = self.committed, False
        if self.claim is not None:  # it stays, to guard what its block still does
            self.claim.transaction_ended()
        if committed:
            self.hints.committed()
        else:
            self.hints.clear()
        calls, self.at_end = self.at_end, []
        for call in calls:
            call(committed)


def _begin(session: Session) -> None:
    if not session.autobegin:
        raise NoTransaction(
            "the session does not begin transactions by itself (autobegin=False): call session.begin() first"
        )
    session.begin()


def _depth_of(transaction: SessionTransaction | None) -> int:
    depth = 0
    while transaction is not None:
        depth += transaction.nested
        transaction = transaction.parent
    return depth


def _take_stored_tags(connection: Connection, configuration: Configuration, found: list[PendingEntry]) -> None:
    """Let the handles of entries that existed say what will be sent: they may have been enqueued under an older secret."""
    if not found:
        return
    tags = stored_tags(connection, configuration.tables, [each.entry.id for each in found])
    for each in found:
        take_tag(each.handle, tags.get(each.entry.id, each.entry.tag))


def flush_all(session: Session) -> None:
    """Flush, and write what is pending even if the session has nothing to flush."""
    session.flush()
    state: SessionState | None = session.__dict__.get(_KEY)
    if state is not None and state.pending:
        state.write(session)


def _duplicate(entry: NewEntry, which: str = "", by: str = "") -> DuplicateEntry:
    return DuplicateEntry(
        f"{which}{entry.operation!r} of parent {entry.parent!r} (scope {entry.scope!r}, source"
        f" {entry.source!r}) with discriminator {entry.discriminator!r} was enqueued before{by}: give another"
        " discriminator for another effect, or if_exists='ignore' to keep the first",
        entry.id,
    )


def hint_after_commit(session: Session) -> None:
    """Send hints after the commit of the transaction that `session` was joined into; the session itself does not commit."""
    state_of(session).hints.committed()


def state_of(session: Session) -> SessionState:
    """The session's state, made at its first use."""
    state: SessionState | None = session.__dict__.get(_KEY)
    if state is None:
        state = session.__dict__[_KEY] = SessionState()
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
    """The current session of a scoped_session or async_scoped_session; any other session unchanged."""
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


# --- events, on every Session of the process; each costs one check of the session


@event.listens_for(Session, "after_begin")
def _after_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    state: SessionState | None = session.__dict__.get(_KEY)
    if state is not None and state.claim is not None:
        state.claim.after_begin(connection)


@event.listens_for(Session, "after_transaction_create")
def _after_transaction_create(session: Session, transaction: SessionTransaction) -> None:
    state: SessionState | None = session.__dict__.get(_KEY)
    if state is None or transaction.parent is None:
        return
    if not transaction.nested:
        state.is_flushing = True
    elif state.pending:
        state.write_before(transaction)


@event.listens_for(Session, "before_flush")
def _before_flush(session: Session, flush_context: object, instances: object) -> None:
    state: SessionState | None = session.__dict__.get(_KEY)
    if state is None:
        return
    if state.rollback_only is not None:
        raise state.rollback_only
    if state.claim is not None:
        state.claim.before_flush(session)
    if state.pending:
        state.write(session)


@event.listens_for(Session, "after_flush_postexec")
def _after_flush(session: Session, flush_context: object) -> None:
    # What other listeners enqueued during the flush itself: the commit may not flush again.
    state: SessionState | None = session.__dict__.get(_KEY)
    if state is None:
        return
    state.is_flushing = False
    if state.pending:
        state.write(session)


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    # made here if need be: a listener that is called after this one may be the first to enqueue
    state = state_of(session)
    if state.rollback_only is not None and not session.in_nested_transaction():
        raise state.rollback_only
    if state.claim is not None:
        state.claim.before_commit(session.get_nested_transaction())
    if state.pending:
        state.write(session)
    state.commits += 1


@event.listens_for(Session, "after_commit")
def _after_commit(session: Session) -> None:
    state: SessionState | None = session.__dict__.get(_KEY)
    if state is None:
        return
    state.commits = max(0, state.commits - 1)
    if session.in_nested_transaction():  # it comes for a released savepoint, too
        state.is_released = True
    else:
        state.committed = True


@event.listens_for(Session, "after_transaction_end")
def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    state: SessionState | None = session.__dict__.get(_KEY)
    if state is None:
        return
    if transaction.parent is None:
        state.transaction_ended(session)
    elif transaction.nested:
        state.savepoint_ended(transaction)
    else:
        state.is_flushing = False
