"""Counts a request that came with the key of another request, for operators: apart from its transaction, which is refused.

A count that is lost changes no request. So the request does not wait for it, and does not fail with it.
"""

from uuid import UUID

from sqlalchemy import Connection

from outbox.configuration import Configuration
from outbox.sessions.hints import AFTER_OUTER_COMMIT, harmless, sender_of
from outbox.sql.connections.separate_connections import backend_pid
from outbox.sql.dialect import dialect_of
from outbox.sql.postgresql.mismatch_counts import Mismatch


def count_mismatch(connection: Connection, configuration: Configuration, id: UUID) -> None:
    """Count one more request with the key of the record `id`. Raises nothing.

    It is written over the connection of the hints. So it is not counted where there is none: with `hints=False`, on SQLite, and
    in a transaction of Django's.
    """
    options = connection.get_execution_options()
    if not dialect_of(connection).has_notify or not configuration.hints or AFTER_OUTER_COMMIT in options:
        return
    with harmless("a request with another request's key was not counted"):
        sender = sender_of(connection.engine)
        if sender is not None:
            taken = backend_pid(connection.connection.driver_connection)
            sender.count(Mismatch.of(configuration.tables, id), taken=taken)
