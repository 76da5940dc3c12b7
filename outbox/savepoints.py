"""Where the block of a claim goes back to: at `reject`, and at an exception that the caller survives."""

from typing import Protocol

from sqlalchemy import Connection, NestedTransaction, text
from sqlalchemy.orm import Session

from outbox.driver import execute
from outbox.session import state_of


class Savepoint(Protocol):
    """Begun behind the key's lock, which so outlives the way back.

    is_active: whether the block can go on in it. is_open: whether it can still be gone back to.
    """

    @property
    def is_active(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...

    def cover(self, connection: Connection) -> None:
        """The session has begun to work on another database, too."""

    def release(self) -> None:
        """Write what waits in the session, and let all of it be part of the transaction."""

    def undo(self) -> None:
        """Undo all that was done since it began, for good."""


def nested_savepoint(session: Session) -> Savepoint:
    """The session's own kind: the app's objects are afterwards what they were before, whatever the session held."""
    return _Nested(session)


def request_savepoint(session: Session) -> Savepoint:
    """For a session that holds nothing, and whose transaction begins and ends with the request: it needs not be told.

    The session's own kind takes a tenth of a small request: it is released with a statement, where COMMIT does as well, and
    keeps a second set of books for objects that have no past.
    """
    return _Bare(session)


class _Nested:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._transaction = session.begin_nested()

    @property
    def is_active(self) -> bool:
        return self._transaction.is_active

    @property
    def is_open(self) -> bool:
        """Be it under others, or after a flush in it failed."""
        current = self._session.get_nested_transaction()
        while current is not None and current is not self._transaction:
            current = current.parent
        return current is self._transaction

    def cover(self, connection: Connection) -> None:
        pass  # the session does

    def release(self) -> None:
        self._transaction.commit()

    def undo(self) -> None:
        self._transaction.rollback()


class _Bare:
    """It ends with the transaction, which the claim asks after by itself. Going back empties the session."""

    is_active = True
    is_open = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self._elsewhere: dict[Connection, NestedTransaction] = {}
        execute(session.connection(), _BEGIN, {})

    def cover(self, connection: Connection) -> None:
        if connection not in self._elsewhere:  # it comes again for each savepoint of the handler's own
            self._elsewhere[connection] = connection.begin_nested()

    def release(self) -> None:
        self._session.flush()
        state = state_of(self._session)
        if state.pending:  # nothing else was left to flush
            state.write(self._session)

    def undo(self) -> None:
        while (nested := self._session.get_nested_transaction()) is not None:
            nested.rollback()
        execute(self._session.connection(), _GO_BACK, {})
        for savepoint in self._elsewhere.values():
            savepoint.rollback()
        state_of(self._session).pending.clear()
        self._session.expunge_all()


_BEGIN = text("SAVEPOINT outbox_claim")
_GO_BACK = text("ROLLBACK TO SAVEPOINT outbox_claim")
