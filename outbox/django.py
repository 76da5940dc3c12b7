"""A Session in the transaction that Django has open, on PostgreSQL with psycopg 3.

    from outbox.django import joined_session

    with transaction.atomic(), joined_session() as session:
        order = Order.objects.create(...)
        outbox.enqueue(session, "stripe.payment_intents.create", {...})

The session uses Django's own connection. Django commits once what both have written.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from typing import Any

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from outbox.extras import missing

try:
    from django.conf import settings
    from django.db import Error as DjangoError
    from django.db import connections, transaction
except ModuleNotFoundError as error:
    raise missing("outbox.django", "django", error) from error

from outbox.errors import ConfigurationError
from outbox.sessions.hints import AFTER_OUTER_COMMIT
from outbox.sessions.session import flush_all

__all__ = ["joined_session"]


@contextmanager
def joined_session(using: str = "default") -> Iterator[Session]:
    """A Session in the transaction that `transaction.atomic()` has open, in a savepoint of it.

    The end of the block commits the session into Django's transaction; Django's own commit makes it permanent. An exception
    undoes what the session has written, and what Django has written since the block began. Raises `ConfigurationError`
    outside of `atomic()`, on another database than PostgreSQL with psycopg 3, and without USE_TZ.
    """
    with (
        joined_connection(using) as joined,
        Session(joined, join_transaction_mode="create_savepoint") as session,
    ):
        with in_order(session, using):
            yield session
        session.commit()


@contextmanager
def joined_connection(using: str) -> Iterator[Connection]:
    """SQLAlchemy's view of Django's connection, in the transaction that `atomic()` has open. Raises as `joined_session`."""
    require_joinable(using)
    with (
        _engine(using)
        .connect()
        .execution_options(**{AFTER_OUTER_COMMIT: partial(_hint_after_commit, using)}) as joined,
        joined.begin(),
    ):
        yield joined


def require_joinable(using: str) -> None:
    connection: Any = connections[using]
    if not connection.in_atomic_block:
        raise ConfigurationError(
            f"Django has no open transaction on {using!r} that the outbox can join: use `with"
            f" transaction.atomic(using={using!r})`"
        )
    if connection.vendor != "postgresql" or type(connection.connection).__module__.partition(".")[0] != "psycopg":
        raise ConfigurationError(
            f"the outbox works with Django only on PostgreSQL with psycopg 3, but {using!r} is another database"
        )
    if not settings.USE_TZ:
        raise ConfigurationError(
            "the outbox needs instants with their time zone from Django's connection: set USE_TZ = True"
        )


def in_order(session: Session, using: str) -> AbstractContextManager[None]:
    """Send, before each statement of Django's, what waits in the session: both's savepoints are in the order of the code."""
    connection: Any = connections[using]

    def execute(django_execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        # nothing but a rollback can be sent
        has_failed = connection.connection.info.transaction_status.name == "INERROR"
        if session.is_active and not has_failed:
            flush_all(session)
            session.connection()  # a savepoint is sent when its connection is first asked for
        return django_execute(sql, params, many, context)

    wrapping: AbstractContextManager[None] = connection.execute_wrapper(execute)
    return wrapping


class _Borrowed:
    """Django's connection as SQLAlchemy gets it: the one thing that it cannot do is to end the transaction, or to close."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def commit(self) -> None:
        """Django does."""

    rollback = close = commit


@cache
def _engine(using: str) -> Engine:
    """Connects to this thread's current Django connection, each time."""
    return create_engine(
        "postgresql+psycopg://",
        creator=lambda: _Borrowed(connections[using].connection),
        poolclass=NullPool,
        use_native_hstore=False,  # it would search for the type on the connection, which is none of psycopg's
    )


def _hint_after_commit(using: str, statement: str) -> None:
    """Send the hint on Django's own connection, which is free then. A hint may be lost: the dispatchers also poll."""
    connection: Any = connections[using]

    def send() -> None:
        if connection.get_autocommit():  # else it would wait in the next transaction, with a lock of the whole server
            with suppress(DjangoError), connection.cursor() as cursor:  # a role that may not notify, for one
                cursor.execute(statement)

    transaction.on_commit(send, using=using, robust=True)
