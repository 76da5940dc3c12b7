"""Callbacks that use Django's ORM, in the transaction that settles the entry. For PostgreSQL with psycopg 3.

    from dispatchers.django import DjangoTransactions

    @effects.on_settled("bank.charge")
    def charged(session, settlement):
        Order.objects.filter(pk=settlement.entry.payload["order"]).update(state="paid")

    Dispatcher(url, include=[effects], callback_transactions=DjangoTransactions())

Django opens the transaction with `transaction.atomic()`. The dispatcher settles the entry on the same connection, calls the
callback, and Django commits both.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from outbox.extras import missing

try:
    from asgiref.sync import async_to_sync
    from django.db import Error as DjangoError
    from django.db import connections, transaction
except ModuleNotFoundError as error:
    raise missing("dispatchers.django", "django", error) from error

from dispatchers.errors import CallbackError
from dispatchers.threads import is_async
from outbox.django import in_order, joined_connection
from outbox.errors import ConfigurationError
from outbox.sql.errors.driver import is_passing, sqlstate

__all__ = ["DjangoTransactions"]

log = logging.getLogger("outbox.dispatcher")


class DjangoTransactions:
    """The transactions of callbacks are those of Django's database `using`.

    Each callback has a thread of its own, and so a connection of its own: set Django's option `pool` for this database. An
    `async def` is run by `async_to_sync`: what Django's ORM does in it has the same connection.
    """

    def __init__(self, using: str = "default") -> None:
        self._using = using

    @contextmanager
    def begin(self) -> Iterator[tuple[Connection, Session]]:
        """A transaction of Django's, as SQLAlchemy uses it. It commits at the end of the block."""
        has_committed = False

        def note_commit() -> None:
            nonlocal has_committed
            has_committed = True

        atomic: Any = transaction.atomic(using=self._using, durable=True)
        try:
            with atomic:
                transaction.on_commit(
                    note_commit, using=self._using
                )  # the first hook: it runs before those of the callback
                with self._joined() as (connection, session):
                    yield connection, session
            if not has_committed:
                raise ConfigurationError(
                    f"Django does not commit at the end of transaction.atomic() on {self._using!r}, so no entry would be settled:"
                    " set AUTOCOMMIT = True for this database"
                )
        except (Exception, BaseExceptionGroup, SystemExit) as error:
            if has_committed:
                log.error(
                    "a hook of transaction.on_commit raised %s. What its callback wrote and the settlement are committed; hooks"
                    " after it did not run",
                    type(error).__name__,
                )
            elif isinstance(error, DjangoError):
                self._raise_known(error)
            else:
                raise
        finally:
            connections.close_all()  # of this thread, which ends

    @contextmanager
    def _joined(self) -> Iterator[tuple[Connection, Session]]:
        with (
            joined_connection(self._using) as connection,
            Session(connection, join_transaction_mode="rollback_only") as session,
            in_order(session, self._using),
        ):
            yield connection, session

    def call(self, connection: Connection, function: Callable[[Any, Any], Any], session: Session, argument: Any) -> Any:
        """Call the callback. Raises the database's errors that may pass as SQLAlchemy's, which the dispatcher knows."""
        called = async_to_sync(function) if is_async(function) else function
        try:
            answer = called(session, argument)
        except Exception as error:
            self._note_lost(connection)
            if isinstance(error, DjangoError):
                self._raise_known(error)
            raise
        self._note_lost(connection)
        if not connection.invalidated:
            self._require_intact()
        return answer

    def _note_lost(self, connection: Connection) -> None:
        """SQLAlchemy has not seen what happened to Django's statements."""
        if self._is_lost():
            connection.invalidate()

    def _require_intact(self) -> None:
        if transaction.get_rollback(using=self._using):
            raise CallbackError(
                "a callback closed Django's connection, called transaction.set_rollback(True), or caught a database error outside"
                " of a block `with transaction.atomic()` of its own, so that its transaction, which also settles the entry,"
                " cannot commit"
            )

    def _is_lost(self) -> bool:
        """Whether the server has ended the connection, or there was none.

        One that the callback has closed is not lost. If it came from Django's pool, there is none any more.
        """
        django: Any = connections[self._using]
        if django.closed_in_transaction:
            return False
        return django.connection is None or bool(django.connection.broken)

    def _raise_known(self, error: DjangoError) -> NoReturn:
        """Raise what is not the callback's fault as SQLAlchemy's error of the same cause, and everything else unchanged."""
        cause = error.__cause__
        known = OperationalError(None, None, cause or error, connection_invalidated=self._is_lost())
        if known.connection_invalidated or (sqlstate(cause) is not None and is_passing(known)):
            raise known from error
        raise error
