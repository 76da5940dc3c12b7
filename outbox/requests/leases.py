"""A leased claim, for work that cannot be one transaction: the claim commits first, and its lease can be renewed.

    with outbox.leased(engine, key, scope=customer, content=body, lease=timedelta(minutes=1)) as claim:
        if claim.replayed:
            return claim.response
        intent = stripe.PaymentIntent.create(..., idempotency_key=claim.child_key("stripe.payment_intents.create"))
        with Session(engine) as session, session.begin(), claim.fence(session) as fence:
            session.add(Order(...))
            fence.respond(201, {"order": 42})

Only the attempt that holds the lease can store something. When the lease has expired, another attempt may take the request
over, and later writes of the first attempt are refused. Both attempts use the same child keys, so the outside service
deduplicates what both sent.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox.configuration import Configuration
from outbox.errors import AlreadyAnswered, ClaimError, KeyInFlight, LeaseLost, NotAnswered
from outbox.keys import ChildKey, ParentKey, derive_tag, encode_native, key_fields
from outbox.observer import ClaimObservation, observed
from outbox.requests import lease_records
from outbox.requests.body_key import BodyRequest
from outbox.requests.claim_block import IdempotentBlock
from outbox.requests.idempotency import OpenRequest, response_of
from outbox.requests.lease_records import Lease, Taken
from outbox.requests.lease_renewal import TaskRenewal, ThreadRenewal
from outbox.requests.records import RecordKey, key_in_flight
from outbox.requests.responses import Response, response_to_keep
from outbox.requests.savepoints import nested_savepoint
from outbox.requests.short_transactions import Source, checked_source, run, run_async
from outbox.sessions.session import AnySession, ClaimedParent, state_of
from outbox.sql.errors.driver import SERIALIZATION_FAILURE, is_busy, is_timeout, sqlstate

log = logging.getLogger("outbox.leases")

POLL = timedelta(milliseconds=100)
"""How often a request that waits asks whether the request is answered: one indexed read each time."""


class LeasedAttempt:
    """One attempt at a request under a lease, for sync and async handlers.

    parent: the parent key of the entries that are enqueued in a fence.
    replayed: whether the request was answered before. Then `response` is that answer, and the block must do nothing.
    """

    def __init__(self, taken: Taken, source: Any) -> None:
        self._source = source
        self.parent: ParentKey = taken.key.parent
        self.replayed = taken.response is not None
        self.response = taken.response
        self._is_stored = self.replayed  # for certain: a fence's answer is when its transaction has committed
        self._key = taken.key
        self._lease = taken.lease

    def child_key(self, operation: str, discriminator: str = "") -> ChildKey:
        """Return the key for a call of an outside service. Every attempt at the request gets the same key. Pure.

        `enqueue` in a fence derives this key too. So either call or enqueue an effect, or use different discriminators.
        """
        lease = self._current_lease("child_key")
        configuration = self._key.configuration
        fields = key_fields(configuration.env, self.parent, operation, discriminator)
        return encode_native(derive_tag(configuration.keyring, lease.kid, fields))

    def fence(self, session: AnySession) -> "FencedBlock":
        """A block in the app's own transaction in which the lease cannot be lost: `with`, or `async with`.

        The block first locks the request's record. What it writes and enqueues, and its answer (`respond` or `reject`),
        commit together. Without an answer the fence is an intermediate step. At REPEATABLE READ or SERIALIZABLE the fence
        must be the first statement of its transaction. The parent of the entries is the claim's.
        Raises `LeaseLost`; the transaction can then not be committed.
        """
        return FencedBlock(session, self, self._own_lease())

    def require_response(self) -> Response:
        """Return the response. Raises `NotAnswered` while there is none."""
        return response_of(self)

    def _own_lease(self) -> Lease:
        """The lease. Raises `AlreadyAnswered` in a replay."""
        if self._lease is None:
            raise self._answered("work inside a replay")
        return self._lease

    def _keep(self, response: Response) -> None:
        self.response = response
        self._is_stored = True

    def _fence_ended(self, committed: bool) -> None:
        """The transaction in which a fence has answered is over; if it was rolled back, there is no answer."""
        if committed:
            self._is_stored = True
        elif not self._is_stored:
            self.response = None

    def _current_lease(self, verb: str) -> Lease:
        if self.response is not None:
            raise self._answered(f"{verb} after an answer")
        return self._own_lease()

    def _answered(self, what: str) -> AlreadyAnswered:
        return AlreadyAnswered(
            f"{what}: the request with key {self.parent.key!r} has one already. Check claim.replayed first and return"
            " claim.response"
        )

    def _response(self, status: int, body: Any, headers: Mapping[str, str] | None) -> Response:
        self._current_lease("respond")
        return response_to_keep(status, body, headers, max_bytes=self._key.configuration.max_payload_bytes)


class LeasedClaim(LeasedAttempt):
    """A leased claim for `with`; see `LeasedAttempt`."""

    def renew(self) -> None:
        """Renew the lease, in a short transaction. Raises `LeaseLost`."""
        lease = self._current_lease("renew")
        try:
            run(self._source, lambda connection: lease_records.renew(connection, lease))
        except LeaseLost:
            self._current_lease("renew")  # an answer of our own, given meanwhile, is no loss
            raise

    def respond(self, status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """Store the answer now, in a short transaction of its own, for a request that writes no rows.

        If you write rows or enqueue entries, use `fence(session)` instead. See `Claim.respond` for the body. Raises
        `LeaseLost`.
        """
        lease, response = self._current_lease("respond"), self._response(status, body, headers)
        run(self._source, lambda connection: lease_records.answer(connection, lease, response))
        self._keep(response)
        return response


class AsyncLeasedClaim(LeasedAttempt):
    """A leased claim for `async with`; see `LeasedAttempt`."""

    async def renew(self) -> None:
        """See `LeasedClaim.renew`."""
        lease = self._current_lease("renew")
        try:
            await run_async(self._source, lambda connection: lease_records.renew(connection, lease))
        except LeaseLost:
            self._current_lease("renew")
            raise

    async def respond(self, status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """See `LeasedClaim.respond`."""
        lease, response = self._current_lease("respond"), self._response(status, body, headers)
        await run_async(self._source, lambda connection: lease_records.answer(connection, lease, response))
        self._keep(response)
        return response


# --- a transaction of the app's in which the lease holds


class _OpenFence(OpenRequest):
    """A fence in its transaction: the record of its request already exists."""

    def __init__(self, session: Session, connection: Connection, attempt: LeasedAttempt, lease: Lease) -> None:
        super().__init__(session, connection, lease.key, None, nested_savepoint)
        self._attempt = attempt
        self._lease = lease

    def parent_for(self, configuration: Configuration) -> ClaimedParent | None:
        claimed = super().parent_for(configuration)
        return claimed._replace(kid=self._lease.kid) if claimed is not None and claimed.kid is not None else claimed

    def accept(self, completion: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """Not possible here, because the caller waits for the one answer of a leased claim. Raises `ClaimError`."""
        raise ClaimError(
            "accept inside a fence: a leased claim ends with its final answer, so call fence.respond(); to answer a request"
            " later, call claim.accept() in an outbox.idempotent block"
        )

    def close(self) -> None:
        self._require_savepoint().release()
        if self.response is not None:
            lease_records.answer(self._session.connection(), self._lease, self.response)
            self._attempt.response = self.response
            state_of(self._session).at_end.append(self._attempt._fence_ended)


class FencedBlock(IdempotentBlock):
    """What `claim.fence(session)` returns."""

    def __init__(self, session: AnySession, attempt: LeasedAttempt, lease: Lease) -> None:
        super().__init__(session, lease.key, timedelta(0))
        self._attempt = attempt
        self._lease = lease

    def _observation(self) -> None:
        return None  # it is no claim of its own

    def _take(self, session: Session, observation: ClaimObservation | None) -> OpenRequest:
        connection = self._begin(session)
        try:
            lease_records.require_lease(connection, self._lease, lock=True)
        except LeaseLost as error:
            state_of(session).doom(session, error)
            # An answer of our own is another error; one whose commit failed may be given again.
            self._attempt._current_lease("fence")
            raise
        return _OpenFence(session, connection, self._attempt, self._lease)


# --- the block


class LeasedBlock:
    """What `outbox.leased` returns: use `with` on an Engine or a sessionmaker, and `async with` on an async one."""

    def __init__(
        self,
        source: Source,
        request: RecordKey | BodyRequest,
        lease: timedelta,
        renew_for: timedelta | None,
        wait: timedelta,
    ) -> None:
        self._source = checked_source(source)
        self._request = request
        self._length = lease
        self._renew_for = renew_for
        self._wait = wait
        self._claim: LeasedClaim | AsyncLeasedClaim | None = None
        self._renewal: ThreadRenewal | TaskRenewal | None = None

    def __enter__(self) -> LeasedClaim:
        with self._observed() as observation:
            give_up_at = None
            while True:
                try:
                    with _in_flight_if_slower(self._request.name):
                        taken = run(self._source, self._take)
                    break
                except KeyInFlight:
                    give_up_at = give_up_at or time.monotonic() + self._wait.total_seconds()
                    if time.monotonic() >= give_up_at:
                        raise
                    with observation.waiting():
                        time.sleep(POLL.total_seconds())
            observation.claimed(taken.outcome)
        claim = self._claim = LeasedClaim(taken, self._source)
        if taken.lease is not None and self._renew_for is not None:
            self._renewal = ThreadRenewal(claim.renew, taken.key.id, self._length, self._renew_for)
        return claim

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._renewal, ThreadRenewal):
            self._renewal.stop()
        lease = self._lease_to_end(error)
        if lease is not None:
            with logged(lease):
                run(self._source, lambda connection: lease_records.end(connection, lease))
        self._require_answer(error)

    async def __aenter__(self) -> AsyncLeasedClaim:
        with self._observed() as observation:
            give_up_at = None
            while True:
                try:
                    with _in_flight_if_slower(self._request.name):
                        taken = await run_async(self._source, self._take)
                    break
                except KeyInFlight:
                    give_up_at = give_up_at or time.monotonic() + self._wait.total_seconds()
                    if time.monotonic() >= give_up_at:
                        raise
                    with observation.waiting():
                        await asyncio.sleep(POLL.total_seconds())
            observation.claimed(taken.outcome)
        claim = self._claim = AsyncLeasedClaim(taken, self._source)
        if taken.lease is not None and self._renew_for is not None:
            self._renewal = TaskRenewal(claim.renew, taken.key.id, self._length, self._renew_for)
        return claim

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._renewal, TaskRenewal):
            await self._renewal.stop()
        lease = self._lease_to_end(error)
        if lease is not None:
            with logged(lease):
                await run_async(self._source, lambda connection: lease_records.end(connection, lease))
        self._require_answer(error)

    def _observed(self) -> AbstractContextManager[ClaimObservation]:
        return observed(self._request.configuration.observer, self._request.source)

    def _take(self, connection: Connection) -> Taken:
        return lease_records.take(connection, self._request, self._length)

    def _lease_to_end(self, error: BaseException | None) -> Lease | None:
        """The lease, if the handler has come to its end without an answer that is stored for certain.

        After a cancellation, an interrupt or an exit it has not: a call in a thread may be running. Such a lease runs out.
        """
        claim = self._claim
        if claim is None:
            raise ClaimError("the outbox.leased block was never entered")
        if claim.replayed or (error is not None and not isinstance(error, Exception)):
            return None
        return claim._own_lease() if error is not None or not claim._is_stored else None

    def _require_answer(self, error: BaseException | None) -> None:
        if error is None and self._claim is not None and not self._claim._is_stored:
            raise NotAnswered(
                f"the outbox.leased block of key {self._claim.parent.key!r} ended without an answer that is stored:"
                " claim.respond(...) stores one, or fence.respond(...) in a claim.fence(session) whose transaction is"
                " committed inside the block"
            )


@contextmanager
def logged(lease: Lease) -> Iterator[None]:
    """An error when the lease is ended must not hide the handler's own error: the lease expires by itself."""
    try:
        yield
    except Exception as error:
        log.warning(
            "cannot release the lease of request %s: %s; the lease expires by itself",
            lease.key.id,
            type(error).__name__,
        )


@contextmanager
def _in_flight_if_slower(name: str) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        # under REPEATABLE READ another transaction was quicker
        if sqlstate(error.orig) == SERIALIZATION_FAILURE or is_busy(error) or is_timeout(error):
            raise key_in_flight(name) from error
        raise
