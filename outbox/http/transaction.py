"""One request's transaction: the session, the claim on its key, and how the two end. Does blocking I/O."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from outbox.errors import ClaimLost, RequestError, RequestUndone
from outbox.http.answers import Verdict, as_it_travels, first_answer, judge, kept_headers, replay
from outbox.http.policy import Policy, block_of
from outbox.requests.claim_block import IdempotentBlock, change_options
from outbox.requests.idempotency import Claim
from outbox.requests.records import RETRY_AFTER
from outbox.requests.responses import Response
from outbox.requests.savepoints import request_savepoint
from outbox.sql.errors.driver import CONFLICTS, TIMEOUTS, sqlstate

SessionT = TypeVar("SessionT")

log = logging.getLogger("outbox.http.transaction")


class Undone(Exception):
    """Ends a block whose work is not to be kept."""


@contextmanager
def undone_by_conflict() -> Iterator[None]:
    """Around a request's work: what the database, or the pool, ends for another one's sake is a `RequestUndone`."""
    try:
        yield
    except DBAPIError as error:
        undone = undone_by(sqlstate(error.orig))
        if undone is None:
            raise
        raise undone from error
    except PoolTimeout as error:
        log.warning("request answered with 503 and undone: no free connection in the pool: %s", error)
        raise RequestUndone(
            "no database connection was free: nothing was done; send the request again", RETRY_AFTER
        ) from error


def undone_by(state: str | None) -> RequestUndone | None:
    """The refusal of a request that PostgreSQL has ended with this SQLSTATE; None if another try would do no better."""
    if state in CONFLICTS:
        why = "ended this request's transaction in favour of another one"
    elif state in TIMEOUTS:
        # Unlike a conflict this may be the app's mistake, and a client that comes again hides it.
        log.warning("request answered with 503 and undone: one of its statements timed out (SQLSTATE %s)", state)
        why = "did not finish this request in time"
    else:
        return None
    return RequestUndone(f"the database {why}: nothing was stored; send the request again", RETRY_AFTER)


@dataclass(frozen=True, slots=True)
class ClaimedRequest(Generic[SessionT]):
    """A request whose key is claimed. The handler or view gets it.

    session: the session of the one transaction in which the rows, the entries and the record commit, after the handler. In
        Django it is for `outbox.enqueue` and similar calls, in Django's own transaction.
    claim: for `respond` and `reject`, to keep an answer that is an error. See `as_response` of the framework's module.
    """

    session: SessionT
    claim: Claim


class RequestTransaction:
    """The transaction of one request. When it is closed, what was not committed is rolled back.

    session, claim: for the handler.
    replay: the stored answer, if the request was answered before. Then only send it.
    is_kept: whether `finish` has committed the answer together with the work.

    The transaction uses `session`, and always closes it. Raises what `outbox.idempotent` raises, and `RequestUndone`.
    """

    def __init__(self, session: Session, policy: Policy, key: str, scope: str, content: Any) -> None:
        self.session = session
        self._policy = policy
        self._block: IdempotentBlock | None = None
        self.is_kept = False
        # It holds nothing, and the transaction that begins here is the request's alone.
        self._is_new = not (session.in_transaction() or session.new or session.identity_map)
        try:
            block = block_of(policy, session, key, scope, content)
            change_options(block, owns_transaction=True)
            if self._is_new:
                change_options(block, savepoint_of=request_savepoint)
            with undone_by_conflict():
                self.claim: Claim = block.__enter__()
        except RequestError:
            with session:
                self._end_unwritten()
            raise
        except BaseException:
            session.close()
            raise
        self._block = block
        self.replay: Response | None = replay(self.claim.require_response()) if self.claim.replayed else None

    def finish(self, sent: Response) -> Response:
        """Keep the answer and commit, or undo everything. Returns the answer to send.

        Raises what prevents the commit: `RequestUndone` if the database preferred another transaction, or did not finish in
        time.
        """
        match judge(self.claim.response, sent.status):
            case Verdict.UNDO:
                self.close()
                return sent
            case Verdict.KEEP_SENT:
                sent = as_it_travels(sent)
                self.claim.respond(sent.status, sent.body or None, kept_headers(sent, self._policy.kept_headers))
                answer = sent
            case Verdict.KEEP_CHOSEN:
                answer = first_answer(self.claim.require_response(), sent)
        with undone_by_conflict():
            self._end_block(None)
            self.session.commit()
        self.is_kept = True
        return answer

    def close(self) -> None:
        """Roll back what was not committed, and return the connection."""
        with self.session:
            self._end_block(Undone())
            if self.replay is not None:
                self._end_unwritten()

    def _end_unwritten(self) -> None:
        """End a transaction that has written nothing, if it was begun here with COMMIT: at a ROLLBACK psycopg forgets what it has
        prepared on its connection, and the requests after a replay would be slower.
        """
        if self._is_new and self.session.is_active:
            with suppress(DBAPIError, ClaimLost):  # closing rolls it back then
                self.session.commit()

    def _end_block(self, error: BaseException | None) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(type(error) if error else None, error, None)
