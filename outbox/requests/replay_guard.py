"""Refuses writes in the block of a replay: by the session, on its connection, or as plain SQL.

It raises an error for the app's mistake. It cannot recognise every write, such as a SELECT of a function that writes. The
rollback of the block's savepoint undoes these.
"""

import re
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.orm import ORMExecuteState, Session

from outbox.errors import ClaimError

_FIRST_WORD = re.compile(r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*([A-Za-z]+(?:\s+TO\b)?)", re.DOTALL | re.IGNORECASE)
_WRITES = frozenset(
    ("INSERT", "UPDATE", "DELETE", "MERGE", "REPLACE", "TRUNCATE", "COPY", "CALL", "DO", "CREATE", "ALTER", "DROP")
)
_SAVEPOINTS = frozenset(("SAVEPOINT", "RELEASE", "ROLLBACK TO"))


class ReplayGuard:
    """Raises what `refuse` returns for each write that it recognises, from `start` to `stop`."""

    def __init__(self, session: Session, connection: Connection, refuse: Callable[[], ClaimError]) -> None:
        self._session = session
        self._refuse = refuse
        self._has_savepoint = False
        self._listeners: list[tuple[Any, str, Any]] = [
            (session, "do_orm_execute", self._before_orm_execute),
            (connection, "before_cursor_execute", self._before_cursor_execute),
        ]

    def start(self) -> None:
        for target, name, listener in self._listeners:
            event.listen(target, name, listener)

    def stop(self) -> None:
        for target, name, listener in self._listeners:
            event.remove(target, name, listener)

    def _before_orm_execute(self, execution: ORMExecuteState) -> None:
        if execution.is_insert or execution.is_update or execution.is_delete:
            raise self._refuse()

    def _before_cursor_execute(self, connection: Connection, cursor: object, statement: str, *_: object) -> None:
        word = first_word(statement)
        if word in _WRITES:
            raise self._refuse()
        if not self._has_savepoint:
            self._has_savepoint = True
            if word not in _SAVEPOINTS:
                self._session.connection()  # the connection is older than the block, so begin the savepoint now


def first_word(statement: str) -> str:
    """The statement's first word in capitals, after its comments; also the TO of ROLLBACK TO."""
    found = _FIRST_WORD.match(statement)
    return " ".join(found[1].upper().split()) if found else ""
