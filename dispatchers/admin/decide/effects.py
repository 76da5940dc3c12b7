"""The writes of a decision about entries: to their rows of the queue, which the caller has locked, and to their histories.

`rules` has allowed the decision before, and the caller writes the audit log. Each function sends a few statements, however many
entries there are.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import ARRAY, Connection, Row, Update, Uuid, bindparam, case, delete, insert, select, text, update

from dispatchers.admin.decide.rules import RESOLVED_STATES, Verdict
from dispatchers.decide import CANCEL_UNSERVED_AFTER
from dispatchers.errors import DecisionRefused
from dispatchers.store.app_code import callback_registry
from dispatchers.store.queue.sealed_entries import seal_result
from dispatchers.stored_outcome import UNSERVED, Known, LookupState, read_outcome, write_outcome
from outbox.encryption import Encryption, StoredField
from outbox.errors import InvalidValue
from outbox.sql.clock import clock, database_now
from outbox.sql.deployment import recorded_environment
from outbox.sql.dialect import dialect_of
from outbox.sql.ordering import Place, advance
from outbox.sql.schema.functions import function_name
from outbox.sql.schema.tables import ENCRYPTED_VERSION, Tables
from outbox.times import NEVER

Action: TypeAlias = Literal["retry", "cancel", "resolve", "release", "again"]

CHANGED = "or was in this state a moment ago, and has just changed: show it again"


def text_of(reason: str, verdict: Verdict | None) -> str:
    """What the history and the audit log have as the reason."""
    return f"{verdict}: {reason}" if verdict else reason


def retry_rows(connection: Connection, tables: Tables, rows: Sequence[Row[Any]], actor: str, text: str) -> None:
    _write(connection, tables, rows, due_at=clock())
    _record(connection, tables, rows, actor, text)


class Unserved:
    """Whether an entry's operation is served, and by whom: asked once for each operation, for all entries of a transaction."""

    def __init__(self, connection: Connection, tables: Tables) -> None:
        self._connection = connection
        self._tables = tables
        self._known: dict[tuple[str, str, str], bool] = {}
        self._has_callback: dict[str, bool] = {}
        self._env = recorded_environment(connection, tables)
        self.at = database_now(connection)

    def settled_here(self, rows: Sequence[Row[Any]]) -> list[Row[Any]]:
        """The rows that no dispatcher serves, and to which no recorded callback belongs."""
        entry = self._tables.entry
        asked = select(entry.c.id, entry.c.env, entry.c.operation).where(entry.c.id.in_([row.id for row in rows]))
        entries: dict[UUID, Any] = {found.id: found for found in self._connection.execute(asked)}
        return [row for row in rows if self._may_be_settled_here(row, entries[row.id])]

    def _may_be_settled_here(self, row: Row[Any], entry: Any) -> bool:
        is_unserved = self._env not in (None, entry.env) or self._is_unserved_for_long(row, entry)
        return is_unserved and not self._callback_is_due(entry.operation)

    def _callback_is_due(self, operation: str) -> bool:
        if operation not in self._has_callback:
            due = callback_registry.is_due(self._connection, self._tables, "on_settled", operation)
            self._has_callback[operation] = due
        return self._has_callback[operation]

    def _is_unserved_for_long(self, row: Row[Any], entry: Any) -> bool:
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


def cancel_rows(
    connection: Connection, tables: Tables, rows: Sequence[Row[Any]], actor: str, text: str, unserved: Unserved
) -> Collection[UUID]:
    """Returns the entries that this transaction settles, as `decisions.cancel` says."""
    settled = unserved.settled_here(rows)
    at_once = {row.id for row in settled}
    if settled:
        _settle_cancelled(connection, tables, settled, text)
    _know(connection, tables, [row for row in rows if row.id not in at_once], partial(_cancelled, text, unserved.at))
    _record(connection, tables, rows, actor, text)
    return at_once


def _cancelled(text: str, now: datetime, row: Row[Any]) -> Known:
    known = read_outcome(row.outcome).known
    decided_at = now if known is None or known.decided_at is None else known.decided_at
    return Known(state="cancelled", reason=text, decided_at=decided_at)


def resolve_rows(
    connection: Connection,
    tables: Tables,
    rows: Sequence[Row[Any]],
    verdict: Verdict,
    actor: str,
    reason: str,
    result: Any = None,
    encryption: Encryption | None = None,
) -> None:
    known = Known(state=RESOLVED_STATES[verdict], result=result, reason=reason)
    of_each = {row.id: known for row in rows}
    if result is not None:
        for stored in _results(connection, tables, list(of_each), encryption):
            if encryption is not None:
                of_each[stored.id] = replace(known, result=seal_result(encryption, result, stored))
    _know(connection, tables, rows, lambda row: of_each[row.id])
    _record(connection, tables, rows, actor, text_of(reason, verdict))


def require_storable(connection: Connection, tables: Tables, ids: Sequence[UUID], result: Any) -> None:
    """Raise `InvalidValue` if an operator's answer of an encrypted entry would be stored as plain text."""
    if result is not None:
        _results(connection, tables, ids, None)


def _results(
    connection: Connection, tables: Tables, ids: Sequence[UUID], encryption: Encryption | None
) -> list[StoredField]:
    entry = tables.entry
    columns = select(entry.c.env, entry.c.id, entry.c.operation, entry.c.schema_version)
    found = connection.execute(columns.where(entry.c.id.in_(ids))).all()
    if encryption is None and any(row.schema_version == ENCRYPTED_VERSION for row in found):
        rule = "is the answer of an encrypted entry, and would be stored unencrypted: leave it out, or decide about this entry"
        raise InvalidValue("result", ..., f"{rule} alone and with its data keys, as in OUTBOX_DATA_KEYS")
    return [StoredField(row.env, row.id, row.operation, "result") for row in found]


def send_again_row(
    connection: Connection, tables: Tables, row: Row[Any], key_epoch: int, actor: str, reason: str, text: str
) -> None:
    """key_epoch: the only one under which it may be sent."""
    known = Known(state="send_again", reason=reason, key_epoch=key_epoch)
    _know(connection, tables, [row], lambda row: known)
    _record(connection, tables, [row], actor, text)


def look_up_row(
    connection: Connection, tables: Tables, row: Row[Any], fencing_delay: timedelta, actor: str, text: str
) -> None:
    """fencing_delay: after it no earlier sender can be running; only an absence from then on is proof."""
    stored = read_outcome(row.outcome)
    why, now = stored.reason or "uncertain", database_now(connection)
    state = stored.lookup or LookupState(why, 1, now + fencing_delay, row.deliveries, stored.stored)
    state = state._replace(inconclusive=max(state.inconclusive, 1), deliveries=row.deliveries)
    _write(connection, tables, [row], outcome=write_outcome(why, lookup=state), known=None, due_at=clock())
    _record(connection, tables, [row], actor, text)


def release_rows(connection: Connection, tables: Tables, rows: Sequence[Row[Any]], actor: str, text: str) -> None:
    undecided = [row for row in rows if _is_undecided(row)]
    waiting = [row for row in rows if not _is_undecided(row)]
    _write(connection, tables, undecided, suspended_reason=None, due_at=NEVER)
    _write(connection, tables, waiting, suspended_reason=None, due_at=clock())
    _record(connection, tables, rows, actor, text)


def _is_undecided(row: Row[Any]) -> bool:
    outcome = read_outcome(row.outcome)
    return row.state == "uncertain" and outcome.known is None and outcome.lookup is None


def record_events(connection: Connection, tables: Tables, actor: str, texts: Mapping[UUID, str]) -> None:
    """Add a decision to the history of each of these entries, with its text."""
    if texts:
        decision = insert(tables.event).values(at=clock(), kind="decision", actor=actor)
        connection.execute(decision, [{"entry_id": id, "reason": text} for id, text in texts.items()])


def _record(connection: Connection, tables: Tables, rows: Sequence[Row[Any]], actor: str, text: str) -> None:
    record_events(connection, tables, actor, {row.id: text for row in rows})


def refused(row: Row[Any], why: str) -> DecisionRefused:
    return DecisionRefused(f"entry {row.id} is {row.state}: {why}", row.state)


# --- the rows


def _know(
    connection: Connection, tables: Tables, rows: Sequence[Row[Any]], known_of: Callable[[Row[Any]], Known]
) -> None:
    """Store the decision about the entries; the next dispatcher that claims one carries it out."""
    if not rows:
        return
    outcomes = {}
    for row in rows:
        known = known_of(row)
        outcomes[row.id] = write_outcome(known.reason or "", stored=read_outcome(row.outcome).stored, known=known)
    queue = tables.queue
    different = len(set(outcomes.values())) > 1
    of_each = [(queue.c.id == id, outcome) for id, outcome in outcomes.items()]
    outcome: Any = case(*of_each) if different else outcomes[rows[0].id]
    _write(connection, tables, rows, outcome=outcome, known=queue.c.destination, due_at=clock())


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


def _settle_cancelled(connection: Connection, tables: Tables, rows: Sequence[Row[Any]], reason: str) -> None:
    """Settle cancelled entries. On PostgreSQL the app's function does it: the operator's role may not delete queue rows."""
    if dialect_of(connection).has_functions:
        _cancel_by_function(connection, tables, rows, reason)
        return
    _execute_unchanged(connection, tables, rows, delete(tables.queue))
    kept = ("id", "deliveries", "attempts", "key_epoch")
    ended = [{name: row._mapping[name] for name in kept} for row in rows]
    settled = insert(tables.settlement).values(state="cancelled", reason=reason, settled_at=clock())
    connection.execute(settled, ended)
    places = [Place(row.ordering_key, row.position) for row in rows if row.position is not None]
    advance(connection, tables, places)


def _cancel_by_function(connection: Connection, tables: Tables, rows: Sequence[Row[Any]], reason: str) -> None:
    """One statement: the function, whose statements see what those before them have changed, is called for one after another."""
    function = function_name("cancel", tables.queue.schema, tables.queue.name.removesuffix("queue"))
    ids = bindparam("ids", [row.id for row in rows], type_=ARRAY(Uuid))
    asked = text(f"SELECT a.id FROM unnest(:ids) AS a (id) WHERE NOT {function}(a.id, :why)").bindparams(ids)
    _require_changed(rows, set(connection.execute(asked, {"why": reason}).scalars()))


def _write(connection: Connection, tables: Tables, rows: Sequence[Row[Any]], **values: Any) -> None:
    _execute_unchanged(connection, tables, rows, update(tables.queue).values(values))


def _execute_unchanged(connection: Connection, tables: Tables, rows: Sequence[Row[Any]], change: Any) -> None:
    """Change the rows, if they still are as they were read: SQLite has no lock on a row that was only read."""
    queue = tables.queue.c
    alike: dict[tuple[str, int], list[Row[Any]]] = {}
    for row in rows:
        alike.setdefault((row.state, row.deliveries), []).append(row)
    for (state, deliveries), some in alike.items():
        ids = [row.id for row in some]
        unchanged = queue.id.in_(ids), queue.state == state, queue.deliveries == deliveries
        if connection.execute(change.where(*unchanged)).rowcount != len(ids):
            found = set(connection.execute(select(queue.id).where(*unchanged)).scalars())
            _require_changed(some, set(ids) - found if isinstance(change, Update) else set(ids))


def _require_changed(rows: Sequence[Row[Any]], others: Collection[UUID]) -> None:
    """Raise `DecisionRefused` about the first of the `others`, which were not changed."""
    for row in rows:
        if row.id in others:
            raise refused(row, CHANGED)
