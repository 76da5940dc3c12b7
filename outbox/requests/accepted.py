"""A request that was accepted (202): the entries that it waits for, and its final response."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Executable, Row, exists, or_, select, update

from outbox.configuration import Configuration
from outbox.errors import ClaimError, ConfigurationError
from outbox.requests.records import RecordKey
from outbox.requests.responses import Response, columns_with, response_to_keep
from outbox.sql.clock import database_now
from outbox.sql.dialect import dialect_of
from outbox.sql.key_locks import certify
from outbox.sql.schema.parent_index import is_under
from outbox.sql.schema.tables import Tables

POLL_FIRST = timedelta(seconds=1)
POLL_LAST = timedelta(minutes=1)


def accepted_response(configuration: Configuration, id: UUID, body: Any, headers: Any) -> Response:
    """The 202, with the status URL as its Location.

    It shows the state and the URL to poll. Source: RFC 9110, section 15.3.3. Location and Retry-After as in
    Microsoft's REST API guidelines, "Long-Running Operations".
    """
    given = dict(headers or {})
    names = {str(name).lower(): value for name, value in given.items()}
    location = names.get("location", configuration.status_url_of(id))
    if location is None:
        raise ConfigurationError(
            "claim.accept() has no status URL to answer with: set one, outbox.configure(status_url='/requests/{id}'), or give"
            " headers={'Location': ...}"
        )
    ours = {"Location": location, "Retry-After": str(int(POLL_FIRST.total_seconds()))}
    kept = {name: value for name, value in ours.items() if name.lower() not in names} | given
    shown = {"id": str(id), "state": "accepted", "status_url": location} if body is None else body
    return response_to_keep(202, shown, kept, max_bytes=configuration.max_payload_bytes)


def poll_after(age: timedelta) -> timedelta:
    """When to poll again for a request of this age, in whole seconds: a tenth of its age, so that long waits cause few polls."""
    seconds = round(age.total_seconds() / 10)
    return min(max(timedelta(seconds=seconds), POLL_FIRST), POLL_LAST)


def is_waiting(tables: Tables, record_id: Any) -> ColumnElement[bool]:
    """Whether an entry of the record has not ended. An uncertain entry has not ended."""
    entry, queue = tables.entry, tables.queue
    # Not EXISTS: it becomes a join, which reads the whole queue if the planner expects that the queue is empty.
    unsettled = select(queue.c.id).where(queue.c.id == entry.c.id).scalar_subquery().is_not(None)
    own = exists().where(is_under(entry, record_id), unsettled)
    elsewhere = exists().where(entry.c.record_id == record_id, entry.c.record_id != entry.c.parent_id, unsettled)
    return or_(own, elsewhere)


def require_open_entries(connection: Connection, key: RecordKey) -> None:
    """Raise unless the request has an entry to wait for."""
    tables = key.configuration.tables
    if not connection.execute(select(is_waiting(tables, key.id))).scalar_one():
        raise ClaimError(
            f"claim.accept() of key {key.parent.key!r} has nothing to wait for: enqueue an entry in the block, or answer with"
            " claim.respond()"
        )


def lock_complete(connection: Connection, tables: Tables, record_id: UUID) -> Row[Any] | None:
    """Lock the accepted record and return it if all its entries have ended; otherwise None.

    The lock is a statement of its own, before the count. If the last two entries settle at the same time, the second
    transaction waits for the first, and then counts. The lock is an UPDATE, because at REPEATABLE READ the second transaction
    would count by its old snapshot: so it fails with 40001, and is retried.
    """
    record = tables.record
    accepted = (record.c.id == record_id, record.c.state == "accepted")
    locked: Executable = update(record).where(*accepted).values(completion=record.c.completion).returning(record)
    if not dialect_of(connection).has_update_returning:  # and is at READ COMMITTED
        locked = select(record).where(*accepted).with_for_update()
        certify(connection, tables, [f"record {record_id}"])
    row = connection.execute(locked).one_or_none()
    if row is None or connection.execute(select(is_waiting(tables, record_id))).scalar_one():
        return None
    return row


def answer_accepted(connection: Connection, configuration: Configuration, row: Row[Any], response: Response) -> None:
    """Store the final response in the locked record `row`. The windows of the record begin now."""
    record = configuration.tables.record
    now = database_now(connection)
    waited = now - row.created_at
    windows = {"answered_at": now, "replay_until": row.replay_until + waited, "keep_until": row.keep_until + waited}
    answered = columns_with(configuration, row.id, response) | windows
    connection.execute(update(record).where(record.c.id == row.id).values(answered))
