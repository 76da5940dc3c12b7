"""Remember a request and its response: claim, replay, or refuse.

The claim, the business rows, the response and the entries commit together. A crash rolls all of it back, so a stale
pending record cannot exist: the record is inserted with its answer, at the end of the block, under the key's lock.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from inspect import isawaitable, iscoroutine
from types import TracebackType
from typing import Any, Literal

from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.orm import ORMExecuteState, Session

from outbox.accepted import accepted_response, require_open_entries
from outbox.configuration import Configuration
from outbox.databases import is_busy
from outbox.entries import Companion
from outbox.errors import (
    AlreadyAnswered,
    ClaimError,
    ClaimLost,
    ClaimOpen,
    InvalidValue,
    NotAnswered,
    RequestRefused,
)
from outbox.key_sources import BodyRequest, choose_key
from outbox.keys import ParentKey, check_operation
from outbox.observing import ClaimWatch
from outbox.records import RecordKey, claim_key, insert_record, key_in_flight, record_companion, require_written
from outbox.responses import Response
from outbox.savepoints import Savepoint, nested_savepoint
from outbox.session import AnySession, ClaimedParent, state_of, sync_session, unscoped
from outbox.spans import NOTHING, check_span


class Claim:
    """A request's claim on its key, open for the length of the `outbox.idempotent` block.

    id: the record's id, by which `outbox.request_status` finds it.
    parent: the key from which the entries of the block derive theirs.
    replayed: whether the request was answered before; then `response` is that answer and nothing may be written.
    response: the answer, once there is one.
    """

    def __init__(
        self,
        session: Session,
        connection: Connection,
        key: RecordKey,
        response: Response | None,
        savepoint_of: Callable[[Session], Savepoint],
    ) -> None:
        self.id = key.id
        self.parent: ParentKey = key.parent
        self.replayed = response is not None
        self.response = response
        self._session = session
        self._connection = connection
        self._transaction = connection.get_transaction()
        self._key = key
        self._ended = False
        self._rejected = False
        self._completion: str | None = None
        self._savepoint_of = savepoint_of
        self._savepoint: Savepoint | None = None

    def respond(self, status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """Keep this answer for every retry of the request; it commits with the caller's transaction.

        body: `bytes` are kept as they are, `str` as UTF-8 text, None as nothing, anything else as JSON; a Content-Type
        is added unless `headers` names one. A status from 400 on is a failure that the app chose to keep (402, say).
        Raises `AlreadyAnswered` for a second answer or inside a replay, `InvalidValue` for a status or header that
        cannot be kept (Set-Cookie never is).
        """
        self._require_unanswered("respond")
        self.response = Response.of(status, body, headers, bytes_max=self._key.configuration.payload_bytes_max)
        return self.response

    def reject(self, status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """Like `respond`, but undo what the block has written and enqueued: only the answer is kept."""
        self._require_unanswered("reject")
        response = Response.of(status, body, headers, bytes_max=self._key.configuration.payload_bytes_max)
        self._require_savepoint().undo()
        self._savepoint = self._savepoint_of(self._session)
        self._rejected = True
        self.response = response
        return response

    def accept(self, completion: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """Answer 202 now; the final response is built when every entry of the request has ended.

        That is done by the dispatcher's `on_completed(completion)`, in the transaction that settles the last entry. Until
        then a retry gets this 202 again, after it the final response.

        body: by default JSON with the request's `id`, `state` and `status_url`. headers: Location is the status URL, by
        default made of `configure(status_url=...)`; Retry-After says when to ask there first.
        Raises what `respond` raises, `InvalidValue` for a malformed name, and `ConfigurationError` without a status URL; at the
        block's end `ClaimError` if it has enqueued nothing: there would be nothing to wait for.
        """
        self._require_unanswered("accept")
        check_operation(completion, "completion")
        self.response = accepted_response(self._key.configuration, self.id, body, headers)
        self._completion = completion
        return self.response

    @property
    def answer(self) -> Response:
        """The response; raises `NotAnswered` while there is none."""
        if self.response is None:
            raise NotAnswered(f"the request with key {self.parent.key!r} has no answer yet")
        return self.response

    # --- what the session's events ask

    def parent_for(self, configuration: Configuration) -> ClaimedParent | None:
        if self.replayed:
            raise AlreadyAnswered(f"enqueue inside a replay: {self._story()}")
        if self._is_lost():
            raise self._lost()
        if self._rejected:
            raise self._after_rejection()
        if configuration is not self._key.configuration:
            return None
        return ClaimedParent(self.parent, self._key.kid, self._key.id)

    def after_begin(self, connection: Connection) -> None:
        if connection is not self._connection and self._savepoint is not None and not self._is_lost():
            self._savepoint.cover(connection)

    def before_flush(self, session: Session) -> None:
        if not (self.replayed or self._is_lost() or self._rejected):
            return
        if session.new or session.deleted or any(map(session.is_modified, session.dirty)):
            raise self._after_rejection() if self._rejected else self._doom()

    def before_orm_execute(self, execution: ORMExecuteState) -> None:
        if execution.is_insert or execution.is_update or execution.is_delete:
            raise self._doom()

    def before_execute(self, connection: Connection, statement: Any, *_: object) -> None:
        if getattr(statement, "is_dml", False):
            raise self._doom()

    def before_commit(self) -> None:
        if self._is_lost():
            raise self._lost()
        raise ClaimOpen(
            f"the session was committed inside the outbox.idempotent block of key {self.parent.key!r}: the record, the"
            " rows and the entries must commit together, so commit after the block"
        )

    def transaction_ended(self) -> None:
        self._ended = True

    # --- the block's two ends

    def open(self) -> None:
        if self.replayed:
            for target, name, listener in self._guards():
                event.listen(target, name, listener)
        else:
            self._savepoint = self._savepoint_of(self._session)

    def close(self) -> None:
        """Insert the record. Raises what makes the block's work unfit to commit."""
        if self.replayed:
            self._session.flush()
            return
        savepoint = self._require_savepoint()
        if self.response is None:
            raise NotAnswered(
                f"the outbox.idempotent block of key {self.parent.key!r} ended without claim.respond(), claim.accept() or"
                " claim.reject()"
            )
        if self._completion is not None:
            savepoint.release()
            require_open_entries(self._session.connection(), self._key)
            insert_record(self._session.connection(), self._key, self.response, self._completion)
            return
        companion = record_companion(self._session.connection(), self._key, self.response)
        self._release_with(savepoint, companion)
        if companion is None or companion.written is None:  # no entries went to the database that it could go with
            insert_record(self._session.connection(), self._key, self.response)
        else:
            require_written(self._key, companion.written)

    def _release_with(self, savepoint: Savepoint, companion: Companion | None) -> None:
        state = state_of(self._session)
        state.companion = companion
        try:
            savepoint.release()
        finally:
            state.companion = None

    def abandon(self) -> None:
        """Undo the block's work, so that a caller who goes on and commits keeps neither it nor a record."""
        if self.replayed:
            return
        if self._is_lost():
            if self._session.in_transaction() or self._session.new:
                self._doom()
            return
        if self._savepoint is not None and self._savepoint.is_open:
            # On a connection that broke: nothing of the block can be committed over it.
            with suppress(DBAPIError, PendingRollbackError):
                self._savepoint.undo()
                return
        self._doom()

    def forget(self) -> None:
        for target, name, listener in self._guards():
            event.remove(target, name, listener)

    def _guards(self) -> list[tuple[Any, str, Any]]:
        """What keeps a replay from writing past the unit of work: through the session, or through its connection."""
        if not self.replayed:
            return []
        return [
            (self._session, "do_orm_execute", self.before_orm_execute),
            (self._connection, "before_execute", self.before_execute),
        ]

    def _doom(self) -> ClaimError:
        """Keep the transaction from committing, also if the caller survives the error that is to be raised."""
        error = AlreadyAnswered(f"a write inside a replay: {self._story()}") if self.replayed else self._lost()
        state_of(self._session).doomed = error
        return error

    def _require_unanswered(self, verb: str) -> None:
        if self.replayed:
            raise AlreadyAnswered(f"{verb} inside a replay: {self._story()}")
        if self.response is not None:
            raise AlreadyAnswered(f"{verb} after an answer: the block of key {self.parent.key!r} has one already")
        self._require_savepoint()

    def _require_savepoint(self) -> Savepoint:
        if self._savepoint is None or not self._savepoint.is_active or self._is_lost():
            raise self._lost()
        return self._savepoint

    def _is_lost(self) -> bool:
        """Whether the claim's transaction has ended: with the session's, or behind its back, on the connection itself."""
        return self._ended or self._connection.get_transaction() is not self._transaction

    def _after_rejection(self) -> AlreadyAnswered:
        return AlreadyAnswered(
            f"a write after claim.reject() of key {self.parent.key!r}: a rejected request keeps its answer and nothing else"
        )

    def _lost(self) -> ClaimLost:
        return ClaimLost(
            f"the transaction of the claim on key {self.parent.key!r} was rolled back or committed inside its block;"
            " roll the session back and run the request anew"
        )

    def _story(self) -> str:
        return (
            f"the request with key {self.parent.key!r} was answered before. Check claim.replayed first and return"
            " claim.response, or use outbox.run_idempotent, which does"
        )


def check_in_flight(mode: object, wait: object) -> None:
    """Raise `InvalidValue` unless these say what a request does whose key is held, before one is."""
    if mode not in ("conflict", "wait"):
        raise InvalidValue("in_flight", mode, "must be 'conflict' or 'wait'")
    check_span("wait", wait, least=NOTHING)


class IdempotentBlock:
    """What `outbox.idempotent` returns: `with` it on a Session, `async with` it on an AsyncSession.

    savepoint_of: begins the savepoint of what is done in it.
    """

    savepoint_of: Callable[[Session], Savepoint] = staticmethod(nested_savepoint)

    def __init__(
        self,
        session: AnySession,
        key: RecordKey | BodyRequest,
        in_flight: Literal["conflict", "wait"],
        wait: timedelta,
    ) -> None:
        self._session = unscoped(session)
        self._key = key
        self._in_flight: Literal["conflict", "wait"] = in_flight
        self._wait = wait
        self._claim: Claim | None = None

    def __enter__(self) -> Claim:
        if hasattr(self._session, "run_sync"):
            raise ClaimError(f"'with' needs a Session, not {type(self._session).__name__}: use 'async with'")
        return self._open(sync_session(self._session))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(sync_session(self._session), error)

    async def __aenter__(self) -> Claim:
        claim: Claim = await self._run_async(self._open)
        return claim

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._run_async(lambda session: self._close(session, error))

    def _open(self, session: Session) -> Claim:
        state = state_of(session)
        if state.claim is not None:
            raise ClaimOpen("an outbox.idempotent or outbox.inbox block is open on this session already: one at a time")
        watch = self._watch()
        claim = self._claim = self._take_watched(session, watch) if watch else self._take(session, None)
        claim.open()
        state.claim = claim
        return claim

    def _watch(self) -> ClaimWatch | None:
        observer = self._key.configuration.observer
        return None if observer is None else ClaimWatch(observer, self._key.source)

    def _take_watched(self, session: Session, watch: ClaimWatch) -> Claim:
        state_of(session).at_end.append(lambda committed: watch.report())
        try:
            claim = self._take(session, watch)
        except RequestRefused as error:
            watch.refused(error)
            raise
        watch.claimed("hit" if claim.replayed else "miss")
        return claim

    def _take(self, session: Session, watch: ClaimWatch | None) -> Claim:
        connection = self._begin(session)
        key = choose_key(connection, self._key, self._in_flight, self._wait, watch)
        response = claim_key(connection, key, self._in_flight, self._wait, watch)
        return Claim(session, connection, key, response, self.savepoint_of)

    def _begin(self, session: Session) -> Connection:
        try:
            session.flush()
            return session.connection()
        except DBAPIError as error:
            if is_busy(error):  # SQLite: another writer outlasted the busy timeout
                raise key_in_flight(self._key.name) from error
            raise

    def _close(self, session: Session, error: BaseException | None) -> None:
        claim, state = self._claim, state_of(session)
        if claim is None:
            raise ClaimError("the outbox.idempotent block was never entered")
        try:
            if error is not None:
                claim.abandon()
                return
            try:
                claim.close()
            except BaseException:
                claim.abandon()
                raise
        finally:
            claim.forget()
            if state.claim is claim:
                state.claim = None

    async def _run_async(self, work: Any) -> Any:
        run_sync = getattr(self._session, "run_sync", None)
        if run_sync is None:
            raise ClaimError(f"'async with' needs an AsyncSession, not {type(self._session).__name__}: use 'with'")
        return await run_sync(work)


def run(block: IdempotentBlock, fn: Callable[[Claim], object]) -> Response:
    """`fn(claim)` in `block`, unless the request was answered before."""
    with block as claim:
        if not claim.replayed and isawaitable(done := fn(claim)):
            if iscoroutine(done):
                done.close()
            raise ClaimError(
                "outbox.run_idempotent on a Session calls a plain function, and this one returned an awaitable: give it an"
                " AsyncSession, or a plain function"
            )
    return claim.answer


async def run_async(block: IdempotentBlock, fn: Callable[[Claim], object]) -> Response:
    """The same with a coroutine function."""
    async with block as claim:
        if not claim.replayed:
            done = fn(claim)
            if not isawaitable(done):
                raise ClaimError(
                    "outbox.run_idempotent on an AsyncSession awaits what its function returns, and this one returned"
                    f" {type(done).__name__}: make it an 'async def', also if it awaits nothing"
                )
            await done
    return claim.answer
