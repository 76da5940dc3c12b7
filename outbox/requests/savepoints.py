"""The savepoint of a claim's block: `reject`, or an exception that the caller catches, rolls back to it."""

from typing import Protocol

from sqlalchemy import Connection, NestedTransaction, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction

from outbox.sessions.session import flush_all, state_of
from outbox.sql.connections.transactions import is_aborted
from outbox.sql.errors.driver import lost_savepoint
from outbox.sql.mariadb.settings import was_undone
from outbox.sql.postgresql.fast_execute import execute


class Savepoint(Protocol):
    """A savepoint begun after the key's lock, so that a rollback to it keeps the lock.

    is_active: whether the block can continue in it. is_open: whether a rollback to it is possible. is_aborted: whether nothing
    but a rollback is possible, as the driver reports. is_gone: whether it could not be released, so that the transaction cannot
    be committed either.
    """

    is_gone: bool

    @property
    def is_active(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_aborted(self) -> bool: ...

    def cover(self, connection: Connection) -> None:
        """Note that the session has begun to use `connection`."""

    def is_taken_away(self, transaction: SessionTransaction) -> bool:
        """Whether `transaction`, which has ended now, is this savepoint, and none of `release`, `undo` and `leave` ended it."""
        ...

    def renew(self) -> None:
        """Begin the savepoint again, after the app has ended it."""

    def release(self) -> None:
        """Flush the session, and make all changes part of the transaction."""

    def undo(self) -> None:
        """Roll back all changes since the savepoint began, and end it."""

    def leave(self) -> None:
        """Roll back writes that bypassed the session, which itself has nothing to write."""


def nested_savepoint(session: Session) -> Savepoint:
    """A nested transaction of the session. After a rollback the app's objects have their former values."""
    return _Nested(session)


def request_savepoint(session: Session) -> Savepoint:
    """A cheaper savepoint for an empty session whose transaction begins and ends with the request.

    A nested transaction of the session takes a tenth of a small request: it needs a RELEASE statement before the COMMIT, and
    stores the former values of objects, which new objects do not have.
    """
    return _Bare(session)


class _Nested:
    """The database begins this savepoint before the first statement that the session sends in it."""

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
        """Also true if the app has begun savepoints inside it, or if a flush in it has failed."""
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
        self._transaction.close()  # without a statement, and without an event for rollback listeners


class _Bare:
    """A savepoint that the session does not track. It ends with the transaction, which the claim checks. A rollback expunges all
    objects of the session.
    """

    is_active = is_open = True
    is_gone = False  # the INSERT of the record detects it

    def __init__(self, session: Session) -> None:
        self._session = session
        self._elsewhere: dict[Connection, NestedTransaction] = {}
        self._connection = session.connection()
        execute(self._connection, _BEGIN, {})

    @property
    def is_aborted(self) -> bool:
        return was_undone(self._connection)  # elsewhere than on MariaDB, the INSERT of the record detects it

    def cover(self, connection: Connection) -> None:
        # called again for each savepoint of the handler
        if connection is not self._connection and connection not in self._elsewhere:
            self._elsewhere[connection] = connection.begin_nested()

    def is_taken_away(self, transaction: SessionTransaction) -> bool:
        return False  # only the end of the transaction ends it

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
