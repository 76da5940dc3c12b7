"""What a decision about an entry writes: to the row of the queue, which the caller has locked, and to the entry's history.

Whether the decision is allowed, `decision_rules` says before. The audit log is the caller's.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Row, delete, insert, select, text, update

from dispatchers.decide import CANCEL_UNSERVED_AFTER
from dispatchers.store import callback_registry
from dispatchers.stored_outcome import SEND_AGAIN, UNSERVED, Known, LookupState, read_outcome, write_outcome
from outbox.errors import DecisionRefused
from outbox.sql.deployment import recorded_environment
from outbox.sql.dialect import clock, database_now
from outbox.sql.functions import function_name
from outbox.sql.ordering import Place, advance
from outbox.sql.schema import Tables
from outbox.times import NEVER

Action: TypeAlias = Literal["retry", "cancel", "resolve", "release", "again"]
Verdict: TypeAlias = Literal["happened", "did_not_happen", "send_again"]

CHANGED = "or was in this state a moment ago, and has just changed: show it again"

RESOLVED_STATES: Mapping[Verdict, Any] = {"happened": "delivered", "did_not_happen": "failed", "send_again": SEND_AGAIN}
"""What the entry becomes."""


def text_of(reason: str, verdict: Verdict | None) -> str:
    """What the history and the audit log have as the reason."""
    return f"{verdict}: {reason}" if verdict else reason


def retry_row(connection: Connection, tables: Tables, row: Row[Any], actor: str, text: str) -> bool:
    """As `decisions.retry` returns."""
    _write(connection, tables, row, due_at=clock())
    record_event(connection, tables, row.id, actor, text)
    return read_outcome(row.outcome).known is None


class Unserved:
    """Whether an entry's operation is served, and by whom: asked once for each operation, for all entries of a transaction."""

    def __init__(self, connection: Connection, tables: Tables) -> None:
        self._connection = connection
        self._tables = tables
        self._known: dict[tuple[str, str, str], bool] = {}
        self._has_callback: dict[str, bool] = {}
        self._env = recorded_environment(connection, tables)
        self.at = database_now(connection)

    def may_be_settled_here(self, row: Row[Any]) -> bool:
        """Whether no dispatcher serves it, and no recorded callback belongs to it."""
        entry = self._tables.entry
        found = self._connection.execute(select(entry.c.env, entry.c.operation).where(entry.c.id == row.id)).one()
        is_unserved = self._env not in (None, found.env) or self._is_unserved_for_long(row, found)
        return is_unserved and not self._callback_is_due(found.operation)

    def _callback_is_due(self, operation: str) -> bool:
        if operation not in self._has_callback:
            due = callback_registry.is_due(self._connection, self._tables, "on_settled", operation)
            self._has_callback[operation] = due
        return self._has_callback[operation]

    def _is_unserved_for_long(self, row: Row[Any], entry: Row[str, str]) -> bool:
        """Whether no dispatcher has served its operation although it has been due: it, or another one of them, has only been
        released since, and it has never been tried.
        """
        due_before = self.at - CANCEL_UNSERVED_AFTER
        since = row.waiting_since or row.due_at
        if row.first_leased_at is not None or row.attempts or since > due_before:
            return False
        if read_outcome(row.outcome).is_unserved:
            return True
        operation = (row.destination, entry.operation, entry.env)
        if operation not in self._known:
            self._known[operation] = _is_another_unserved(self._connection, self._tables, *operation, due_before)
        return self._known[operation]


def cancel_row(
    connection: Connection, tables: Tables, row: Row[Any], actor: str, text: str, unserved: Unserved
) -> bool:
    """As `decisions.cancel` returns."""
    at_once, now = unserved.may_be_settled_here(row), unserved.at
    if at_once:
        _settle_cancelled(connection, tables, row, text)
    else:
        known = read_outcome(row.outcome).known
        decided_at = now if known is None or known.decided_at is None else known.decided_at
        _know(connection, tables, row, Known(state="cancelled", reason=text, decided_at=decided_at))
    record_event(connection, tables, row.id, actor, text)
    return at_once


def resolve_row(
    connection: Connection, tables: Tables, row: Row[Any], verdict: Verdict, actor: str, reason: str, result: Any = None
) -> None:
    _know(connection, tables, row, Known(state=RESOLVED_STATES[verdict], result=result, reason=reason))
    record_event(connection, tables, row.id, actor, text_of(reason, verdict))


def send_again_row(
    connection: Connection, tables: Tables, row: Row[Any], key_epoch: int, actor: str, reason: str, text: str
) -> None:
    """key_epoch: the only one under which it may be sent."""
    _know(connection, tables, row, Known(state="send_again", reason=reason, key_epoch=key_epoch))
    record_event(connection, tables, row.id, actor, text)


def look_up_row(
    connection: Connection, tables: Tables, row: Row[Any], fencing_delay: timedelta, actor: str, text: str
) -> None:
    """fencing_delay: after it no earlier sender can be running; only an absence from then on is proof."""
    stored = read_outcome(row.outcome)
    why, now = stored.reason or "uncertain", database_now(connection)
    state = stored.lookup or LookupState(why, 1, now + fencing_delay, row.deliveries, stored.stored)
    state = state._replace(inconclusive=max(state.inconclusive, 1), deliveries=row.deliveries)
    _write(connection, tables, row, outcome=write_outcome(why, lookup=state), known=None, due_at=clock())
    record_event(connection, tables, row.id, actor, text)


def release_row(connection: Connection, tables: Tables, row: Row[Any], actor: str, text: str) -> None:
    outcome = read_outcome(row.outcome)
    undecided = row.state == "uncertain" and outcome.known is None and outcome.lookup is None
    _write(connection, tables, row, suspended_reason=None, due_at=NEVER if undecided else clock())
    record_event(connection, tables, row.id, actor, text)


def record_event(connection: Connection, tables: Tables, entry_id: UUID, actor: str, text: str) -> None:
    """Add a decision to the entry's history."""
    decision = insert(tables.event).values(entry_id=entry_id, at=clock(), kind="decision", actor=actor, reason=text)
    connection.execute(decision)


def refused(row: Row[Any], why: str) -> DecisionRefused:
    return DecisionRefused(f"entry {row.id} is {row.state}: {why}", row.state)


# --- the row


def _know(connection: Connection, tables: Tables, row: Row[Any], known: Known) -> None:
    """Store the decision about the entry; the next dispatcher that claims it carries it out."""
    outcome = write_outcome(known.reason or "", stored=read_outcome(row.outcome).stored, known=known)
    _write(connection, tables, row, outcome=outcome, known=row.destination, due_at=clock())


def _is_another_unserved(
    connection: Connection, tables: Tables, destination: str, operation: str, env: str, due_before: datetime
) -> bool:
    queue = tables.queue
    others = (
        select(queue.c.outcome)
        .join(tables.entry, tables.entry.c.id == queue.c.id)
        .where(
            queue.c.destination == destination,
            tables.entry.c.operation == operation,
            tables.entry.c.env == env,
            queue.c.waiting_since <= due_before,
            queue.c.outcome.contains(UNSERVED),
        )
        .limit(1)
    )
    return read_outcome(connection.execute(others).scalar_one_or_none()).is_unserved


def _settle_cancelled(connection: Connection, tables: Tables, row: Row[Any], reason: str) -> None:
    """On PostgreSQL by the function that the app has too: the operator's role may not delete a row of the queue."""
    if connection.dialect.name == "postgresql":
        function = function_name("cancel", tables.queue.schema, tables.queue.name.removesuffix("queue"))
        given = {"id": row.id, "why": reason}
        if not connection.execute(text(f"SELECT {function}(:id, :why)"), given).scalar_one():
            raise refused(row, CHANGED)
        return
    _execute_unchanged(connection, tables, row, delete(tables.queue))
    ended = {name: row._mapping[name] for name in ("id", "deliveries", "attempts", "key_epoch")}
    ended |= {"state": "cancelled", "reason": reason, "settled_at": clock()}
    connection.execute(insert(tables.settlement).values(ended))
    if row.position is not None:
        advance(connection, tables, [Place(row.ordering_key, row.position)])


def _write(connection: Connection, tables: Tables, row: Row[Any], **values: Any) -> None:
    _execute_unchanged(connection, tables, row, update(tables.queue).values(values))


def _execute_unchanged(connection: Connection, tables: Tables, row: Row[Any], change: Any) -> None:
    """Change the row, if it still is as it was read: SQLite has no lock on a row that was only read."""
    queue = tables.queue.c
    unchanged = queue.id == row.id, queue.state == row.state, queue.deliveries == row.deliveries
    if not connection.execute(change.where(*unchanged)).rowcount:
        raise refused(row, CHANGED)
