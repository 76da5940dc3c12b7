"""The block in which a request's key is claimed: how it begins, and its two ends."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from inspect import isawaitable, iscoroutine
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox.errors import ClaimError, ClaimLost, ClaimOpen, RequestError
from outbox.observer import ClaimObservation
from outbox.requests.body_key import BodyRequest, choose_key
from outbox.requests.idempotency import Claim, OpenRequest
from outbox.requests.records import LockWait, RecordKey, claim_key, key_in_flight
from outbox.requests.responses import Response
from outbox.requests.savepoints import Savepoint, nested_savepoint
from outbox.sessions.session import AnySession, flush_all, state_of, sync_session, unscoped
from outbox.sql.errors.driver import is_busy, is_timeout
from outbox.sql.key_locks import wait_for_lock
from outbox.times import NOTHING, check_span

Entered = TypeVar("Entered")


def checked_wait(wait: timedelta | None) -> timedelta:
    """How long a request waits whose key is held: not at all with None. Raises `InvalidValue`."""
    if wait is None:
        return NOTHING
    check_span("wait", wait, least=NOTHING, otherwise=", or None to refuse immediately")
    return wait


class BlockOptions(NamedTuple):
    """How a block works in its session. A request over HTTP changes them: see `change_options`.

    savepoint_of: begins the savepoint of what is done in it. lock_wait: waits for the request in flight.
    owns_transaction: whether the opener of the block always ends the session's transaction with it. Then nothing can commit
        after the block has lost its work, so an error or a rollback of the handler passes unchanged.
    """

    owns_transaction: bool = False
    savepoint_of: Callable[[Session], Savepoint] = nested_savepoint
    lock_wait: LockWait = wait_for_lock


class ClaimBlock(Generic[Entered]):
    """A block on a Session or an AsyncSession; `_entered` makes of the claim what it hands out.

    wait: how long for another request in flight.
    """

    def __init__(self, session: AnySession, key: RecordKey | BodyRequest, wait: timedelta) -> None:
        self._session = unscoped(session)
        self._key = key
        self._wait = wait
        self._options = BlockOptions()
        self._claim: OpenRequest | None = None

    def _entered(self, claim: OpenRequest) -> Entered:
        raise NotImplementedError

    def __enter__(self) -> Entered:
        if hasattr(self._session, "run_sync"):
            raise ClaimError(f"'with' needs a Session, not {type(self._session).__name__}: use 'async with'")
        return self._entered(self._open(sync_session(self._session)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(sync_session(self._session), error)
        if isinstance(error, ClaimLost) and (interruption := _interruption(error)) is not None:
            raise interruption

    async def __aenter__(self) -> Entered:
        return self._entered(await self._run_async(self._open))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._run_async(lambda session: self._close(session, error))
        task = asyncio.current_task()
        if isinstance(error, ClaimLost) and task is not None and task.cancelling():
            raise asyncio.CancelledError from error

    def _open(self, session: Session) -> OpenRequest:
        state = state_of(session)
        if state.claim is not None:
            raise ClaimOpen(
                "this session already has an open outbox.idempotent or outbox.inbox block: close it before opening another"
            )
        if state.rollback_only is not None:
            raise state.rollback_only
        observation = self._observation()
        claim = self._claim = (
            self._take_observed(session, observation) if observation else self._take_checked(session, None)
        )
        claim.open()
        state.claim = claim
        return claim

    def _observation(self) -> ClaimObservation | None:
        observer = self._key.configuration.observer
        return None if observer is None else ClaimObservation(observer, self._key.source)

    def _take_observed(self, session: Session, observation: ClaimObservation) -> OpenRequest:
        state_of(session).at_end.append(lambda committed: observation.report())
        try:
            claim = self._take_checked(session, observation)
        except RequestError as error:
            observation.refused(error)
            raise
        observation.claimed("hit" if claim.replayed else "miss")
        return claim

    def _take_checked(self, session: Session, observation: ClaimObservation | None) -> OpenRequest:
        """No savepoint is around the claim's own statements: where one fails, PostgreSQL answers a COMMIT with a ROLLBACK."""
        try:
            return self._take(session, observation)
        except DBAPIError as error:
            name = self._key.name
            failed = ClaimLost(
                f"the claim on key {name!r} failed in the database, so its transaction cannot be committed: roll the session"
                " back, and do not answer or acknowledge anything that was done in this transaction"
            )
            state_of(session).doom(session, failed)
            if is_timeout(error):
                raise key_in_flight(name) from error
            raise

    def _take(self, session: Session, observation: ClaimObservation | None) -> OpenRequest:
        connection = self._begin(session)
        owns_transaction, savepoint_of, lock_wait = self._options
        key = choose_key(connection, self._key, self._wait, observation, lock_wait)
        response = claim_key(connection, key, self._wait, observation, lock_wait)
        return OpenRequest(session, connection, key, response, savepoint_of, owns_transaction)

    def _begin(self, session: Session) -> Connection:
        try:
            flush_all(session)
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
            if error is None:
                claim.close()
            else:
                self._abandon(claim, error)
        except BaseException as failed:
            if error is None:
                self._abandon(claim, failed)
            raise
        finally:
            claim.forget()
            if state.claim is claim:
                state.claim = None

    def _abandon(self, claim: OpenRequest, error: BaseException) -> None:
        """Make a later commit raise the error, if the caller has handled it: the transaction has lost work."""
        lost = claim.abandon()
        if lost is None or lost is error or self._options.owns_transaction or not isinstance(error, Exception):
            return
        raise lost from error

    async def _run_async(self, work: Any) -> Any:
        run_sync = getattr(self._session, "run_sync", None)
        if run_sync is None:
            raise ClaimError(f"'async with' needs an AsyncSession, not {type(self._session).__name__}: use 'with'")
        return await run_sync(work)


class IdempotentBlock(ClaimBlock[Claim]):
    """What `outbox.idempotent` returns: `with` it on a Session, `async with` it on an AsyncSession."""

    def _entered(self, claim: OpenRequest) -> Claim:
        return Claim(claim)


def change_options(block: ClaimBlock[Any], **options: Any) -> None:
    """Change these options of a block that was not entered yet."""
    block._options = block._options._replace(**options)


def _interruption(error: BaseException | None) -> BaseException | None:
    """The exit or interrupt at which a handler rolled back, if one did. The rollback's own error must not replace it."""
    while isinstance(error, Exception):
        error = error.__context__
    return error


def run(block: IdempotentBlock, fn: Callable[[Claim], object]) -> Response:
    """`fn(claim)` in `block`, unless the request was answered before."""
    with block as claim:
        if not claim.replayed and isawaitable(done := fn(claim)):
            if iscoroutine(done):
                done.close()
            raise ClaimError(
                "outbox.run_idempotent got a Session, but its function returned an awaitable: pass an AsyncSession, or a"
                " function that is not async"
            )
    return claim.require_response()


async def run_async(block: IdempotentBlock, fn: Callable[[Claim], object]) -> Response:
    """`run_idempotent` with a coroutine function."""
    async with block as claim:
        if not claim.replayed:
            done = fn(claim)
            if not isawaitable(done):
                raise ClaimError(
                    f"outbox.run_idempotent got an AsyncSession, but its function returned {type(done).__name__} and not an"
                    " awaitable: make the function an 'async def', even if it awaits nothing"
                )
            await done
    return claim.require_response()
