"""Store a request with its response: claim its key, replay its answer, or refuse it.

The claim, the business rows, the response and the entries commit together. A crash rolls all of it back, so a stale
pending record cannot exist: the record is inserted with its answer, at the end of the block, under the key's lock.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.orm import Session, SessionTransaction

from outbox.configuration import Configuration
from outbox.errors import AlreadyAnswered, ClaimError, ClaimLost, ClaimOpen, NotAnswered
from outbox.keys import ParentKey, check_operation
from outbox.requests.accepted import accepted_response, require_open_entries
from outbox.requests.records import RecordKey, insert_record, record_insert, require_written
from outbox.requests.replay_guard import ReplayGuard
from outbox.requests.responses import Response, response_to_keep
from outbox.requests.savepoints import Savepoint, nested_savepoint, request_savepoint
from outbox.sessions.entry_rows import PiggybackedInsert
from outbox.sessions.session import ClaimedParent, OpenClaim, state_of


class OpenRequest(OpenClaim):
    """A claim in its transaction: the savepoint of its block, its answer, and what the session's events ask of it."""

    def __init__(
        self,
        session: Session,
        connection: Connection,
        key: RecordKey,
        response: Response | None,
        savepoint_of: Callable[[Session], Savepoint],
        owns_transaction: bool = False,
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
        self._owns_transaction = owns_transaction
        self._savepoint: Savepoint | None = None
        self._guard: ReplayGuard | None = None

    def respond(self, status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """See `Claim.respond`."""
        self._require_unanswered("respond")
        self.response = response_to_keep(status, body, headers, max_bytes=self._key.configuration.max_payload_bytes)
        return self.response

    def reject(self, status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """See `Claim.reject`."""
        self._require_unanswered("reject")
        response = response_to_keep(status, body, headers, max_bytes=self._key.configuration.max_payload_bytes)
        self._require_savepoint().undo()
        self._savepoint = self._savepoint_of(self._session)
        self._rejected = True
        self.response = response
        return response

    def accept(self, completion: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """See `Claim.accept`."""
        self._require_unanswered("accept")
        check_operation(completion, "completion")
        self.response = accepted_response(self._key.configuration, self.id, body, headers)
        self._completion = completion
        return self.response

    # --- what the session's events ask

    def parent_for(self, configuration: Configuration) -> ClaimedParent | None:
        if self.replayed:
            raise AlreadyAnswered(f"enqueue inside a replay: {self._misuse()}")
        if self._is_lost():
            raise self._lost()
        if self._rejected:
            raise self._after_rejection()
        ours = self._key.configuration
        if configuration == ours:
            return ClaimedParent(self.parent, self._key.kid, self._key.id)
        # In the same tables it is an entry of the request all the same: the request has not ended before it.
        is_beside = (configuration.schema, configuration.prefix) == (ours.schema, ours.prefix)
        return ClaimedParent(None, None, self._key.id) if is_beside else None

    def after_begin(self, connection: Connection) -> None:
        if self._savepoint is not None and not self._is_lost():
            self._savepoint.cover(connection)

    def before_flush(self, session: Session) -> None:
        if not (self.replayed or self._is_lost() or self._rejected):
            return
        if session.new or session.deleted or any(map(session.is_modified, session.dirty)):
            if self._is_lost():
                raise self._doom()
            raise self._after_rejection() if self._rejected else self._write_in_replay()

    def before_commit(self, committed: SessionTransaction | None) -> None:
        if self._is_lost():
            raise self._doom()
        if committed is None or (self._savepoint is not None and self._savepoint.is_taken_away(committed)):
            raise self._open()

    def savepoint_ended(self, savepoint: SessionTransaction) -> None:
        """The savepoint was ended by `session.rollback()` or `close()`. If this raises, the transaction around the block stays
        open with the work of other blocks, so its later commit must fail.
        """
        if self._savepoint is not None and self._savepoint.is_taken_away(savepoint):
            if self._owns_transaction:  # all of it goes with the block, and the handler may answer with an error
                self._ended = True
                self._doom()
                return
            with suppress(
                InvalidRequestError, DBAPIError
            ):  # inside a `with session.begin_nested()` of the handler's own
                self._savepoint.renew()  # the handler may roll back and then close
            self._ended = True
            raise self._doom()

    def transaction_ended(self) -> None:
        self._ended = True

    # --- the block's two ends

    def open(self) -> None:
        if not self.replayed:
            self._savepoint = self._savepoint_of(self._session)
        elif self._savepoint_of is not request_savepoint:  # no handler is called for a request that has its answer
            self._savepoint = nested_savepoint(self._session)
            self._guard = ReplayGuard(self._session, self._connection, self._write_in_replay)
            self._guard.start()

    def close(self) -> None:
        """Insert the record. Raises what makes the block's work unfit to commit."""
        if self.replayed and self._savepoint is None:
            return
        savepoint = self._require_savepoint()
        if savepoint.is_aborted:
            raise self._statement_failed()
        if self.replayed:
            self._session.flush()  # raises if there is anything to write
            savepoint.leave()
            return
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
        piggybacked = record_insert(self._session.connection(), self._key, self.response)
        self._release_with(savepoint, piggybacked)
        if piggybacked is None or piggybacked.written is None:  # no entries went to the database that it could go with
            insert_record(self._session.connection(), self._key, self.response)
        else:
            require_written(self._key, piggybacked.written)

    def _release_with(self, savepoint: Savepoint, piggybacked: PiggybackedInsert | None) -> None:
        state = state_of(self._session)
        state.piggybacked = piggybacked
        try:
            savepoint.release()
        finally:
            state.piggybacked = None

    def abandon(self) -> ClaimError | None:
        """Undo the block's work, so that a caller who continues and commits keeps neither it nor a record.

        Returns why that caller must not commit, if the transaction ended in the block.
        """
        if self.replayed and self._savepoint is None:
            return None
        lost = self._doom() if self._is_lost() else None
        if self._savepoint is not None and self._savepoint.is_open:
            # On a connection that broke: nothing of the block can be committed over it.
            with suppress(DBAPIError, InvalidRequestError):
                self._savepoint.undo()
                return lost
        self._doom()
        return lost

    def forget(self) -> None:
        if self._guard is not None:
            self._guard.stop()

    def _write_in_replay(self) -> AlreadyAnswered:
        return AlreadyAnswered(f"a write inside a replay: {self._misuse()}")

    def _doom(self) -> ClaimError:
        """Keep the transaction from committing, also if the caller survives the error that must be raised."""
        return state_of(self._session).doom(self._session, self._lost())

    def _require_unanswered(self, verb: str) -> None:
        if self.replayed:
            raise AlreadyAnswered(f"{verb} inside a replay: {self._misuse()}")
        if self.response is not None:
            raise AlreadyAnswered(f"{verb} after an answer: the block of key {self.parent.key!r} already has one")
        self._require_savepoint()

    def _require_savepoint(self) -> Savepoint:
        if self._savepoint is None or self._is_lost():
            raise self._doom()
        if not self._savepoint.is_active:
            raise self._statement_failed()
        return self._savepoint

    def _is_lost(self) -> bool:
        """Whether the claim's transaction has ended: with the session's, or outside it, on the connection itself."""
        if self._ended or self._connection.get_transaction() is not self._transaction:
            return True
        return self._savepoint is not None and self._savepoint.is_gone

    def _open(self) -> ClaimOpen:
        return ClaimOpen(
            f"the session was committed inside the outbox.idempotent block of key {self.parent.key!r}: the record, the"
            " rows and the entries must commit together, so commit after the block"
        )

    def _after_rejection(self) -> AlreadyAnswered:
        return AlreadyAnswered(
            f"a write after claim.reject() of key {self.parent.key!r}: a rejected request keeps its answer and nothing else"
        )

    def _statement_failed(self) -> ClaimLost:
        return ClaimLost(
            f"a statement failed inside the block of key {self.parent.key!r}, and the handler continued: nothing of the block is"
            " kept. Let the statement's error leave the block"
        )

    def _lost(self) -> ClaimLost:
        return ClaimLost(
            f"the transaction of the claim on key {self.parent.key!r} was rolled back, closed or committed inside its block, and"
            " cannot be committed any more: roll the session back after the block and run the request again"
        )

    def _misuse(self) -> str:
        return (
            f"the request with key {self.parent.key!r} was answered before. Check claim.replayed first and return"
            " claim.response, or use outbox.run_idempotent, which does"
        )


class Claim:
    """A request's claim on its key. It is open for the length of the `outbox.idempotent` block, which makes it."""

    __slots__ = ("_request",)

    def __init__(self, request: OpenRequest) -> None:
        self._request = request

    @property
    def id(self) -> UUID:
        """The id of the request's record, for `outbox.request_status`."""
        return self._request.id

    @property
    def parent(self) -> ParentKey:
        """The parent key of the entries that the block enqueues."""
        return self._request.parent

    @property
    def replayed(self) -> bool:
        """Whether the request was answered before. Then `response` is that answer, and the block must write nothing."""
        return self._request.replayed

    @property
    def response(self) -> Response | None:
        """The response. None while there is none."""
        return self._request.response

    def require_response(self) -> Response:
        """Return the response. Raises `NotAnswered` while there is none."""
        return response_of(self._request)

    def respond(self, status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """Keep this answer for every retry of the request. It commits with the caller's transaction.

        body: `bytes` are kept as they are, `str` as UTF-8 text, None as an empty body, anything else as JSON. A Content-Type
            is added unless `headers` names one.
        status: 400 or more is a failure that the app chooses to keep, for example 402.
        Raises `AlreadyAnswered` for a second answer or inside a replay, and `InvalidValue` for a status or a header that
        cannot be kept (Set-Cookie is never kept).
        """
        return self._request.respond(status, body, headers)

    def reject(self, status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """Undo what the block has written and enqueued, and keep only this answer. Arguments and errors: see `respond`."""
        return self._request.reject(status, body, headers)

    def accept(self, completion: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """Answer 202 now. The final response is built when every entry of the request has ended.

        The function of `on_completed(completion)` builds it, in the transaction in which a dispatcher settles the last entry.
        Until then a retry gets this 202 again; after that it gets the final response.

        body: by default JSON with the request's `id`, `state` and `status_url`.
        headers: by default `Location` is the status URL (from `configure(status_url=...)`), and `Retry-After` says when to
            ask there first.
        Raises what `respond` raises, `InvalidValue` for a malformed name, and `ConfigurationError` if there is no status URL.
        The end of the block raises `ClaimError` if it has enqueued nothing, because then there is nothing to wait for.
        """
        return self._request.accept(completion, body, headers)


class HasResponse(Protocol):
    """A request that has a response, or none yet."""

    @property
    def parent(self) -> ParentKey: ...
    @property
    def response(self) -> Response | None: ...


def response_of(request: HasResponse) -> Response:
    """The response of a request. Raises `NotAnswered` while there is none."""
    if request.response is None:
        raise NotAnswered(f"the request with key {request.parent.key!r} has no answer yet")
    return request.response
