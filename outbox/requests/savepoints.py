"""Where the block of a claim goes back to: at `reject`, and at an exception that the caller survives."""

from typing import Protocol

from sqlalchemy import Connection, NestedTransaction, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction

from outbox.session import flush_all, state_of
from outbox.sql.dialect import is_aborted, lost_savepoint
from outbox.sql.fast_execute import execute


class Savepoint(Protocol):
    """A savepoint begun after the key's lock, so that a rollback to it keeps the lock.

    is_active: whether the block can continue in it. is_open: whether it can still be gone back to. is_aborted: whether nothing
    else can be done, as far as the driver knows. is_gone: whether it could not be released, so that the transaction cannot be
    committed either.
    """

    is_gone: bool

    @property
    def is_active(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_aborted(self) -> bool: ...

    def cover(self, connection: Connection) -> None:
        """The session has begun to work on `connection`."""

    def is_taken_away(self, transaction: SessionTransaction) -> bool:
        """Whether this savepoint is the `transaction` that has ended just now, and not by `release`, `undo` or `leave`."""
        ...

    def renew(self) -> None:
        """Begin it again, after it was taken away."""

    def release(self) -> None:
        """Write what waits in the session, and let all of it be part of the transaction."""

    def undo(self) -> None:
        """Undo all that was done since it began, permanently."""

    def leave(self) -> None:
        """Undo what was written past the session's unit of work, which has nothing to write."""


def nested_savepoint(session: Session) -> Savepoint:
    """The session's own kind: the app's objects are afterwards what they were before, whatever the session held."""
    return _Nested(session)


def request_savepoint(session: Session) -> Savepoint:
    """For an empty session whose transaction begins and ends with the request: the session need not track it.

    The session's own kind takes a tenth of a small request: it is released with a statement, where COMMIT does as well, and
    keeps a second set of books for objects that have no past.
    """
    return _Bare(session)


class _Nested:
    """The database begins it with the first statement that the session sends in it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._begin()

    def _begin(self) -> None:
        self._transaction = self._session.begin_nested()
        self._has_begun = self._is_ending = self.is_gone = False

    @property
    def is_active(self) -> bool:
        return self._transaction.is_active

    @property
    def is_aborted(self) -> bool:
        return self._has_begun and is_aborted(self._session.connection())

    @property
    def is_open(self) -> bool:
        """Be it under others, or after a flush in it failed."""
        current = self._session.get_nested_transaction()
        while current is not None and current is not self._transaction:
            current = current.parent
        return current is self._transaction

    def cover(self, connection: Connection) -> None:
        self._has_begun = True

    def is_taken_away(self, transaction: SessionTransaction) -> bool:
        return transaction is self._transaction and not self._is_ending

    def renew(self) -> None:
        self._begin()

    def release(self) -> None:
        self._is_ending = True
        try:
            self._transaction.commit()
        except DBAPIError as error:
            self.is_gone = lost_savepoint(error)
            raise

    def undo(self) -> None:
        self._is_ending = True
        self._transaction.rollback()

    def leave(self) -> None:
        if self._has_begun:
            self.undo()
            return
        self._is_ending = True
        self._transaction.close()  # no statement, and no listener hears of a rollback


class _Bare:
    """It ends with the transaction, which the claim asks after by itself. Going back empties the session."""

    is_active = is_open = True
    is_aborted = is_gone = False  # the record's INSERT finds it out

    def __init__(self, session: Session) -> None:
        self._session = session
        self._elsewhere: dict[Connection, NestedTransaction] = {}
        self._connection = session.connection()
        execute(self._connection, _BEGIN, {})

    def cover(self, connection: Connection) -> None:
        # it comes again for each savepoint of the handler's own
        if connection is not self._connection and connection not in self._elsewhere:
            self._elsewhere[connection] = connection.begin_nested()

    def is_taken_away(self, transaction: SessionTransaction) -> bool:
        return False  # it ends with the transaction alone

    def renew(self) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        self.undo()

    def release(self) -> None:
        flush_all(self._session)

    def undo(self) -> None:
        while (nested := self._session.get_nested_transaction()) is not None:
            nested.rollback()
        execute(self._session.connection(), _GO_BACK, {})
        for savepoint in self._elsewhere.values():
            savepoint.rollback()
        state_of(self._session).forget_entries()
        self._session.expunge_all()


_BEGIN = text("SAVEPOINT outbox_claim")
_GO_BACK = text("ROLLBACK TO SAVEPOINT outbox_claim")
