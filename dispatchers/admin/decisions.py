"""Operator decisions about an entry or a destination. Each is recorded with a name and a reason.

A decision changes one row in the caller's transaction, if the row's state allows it. It sends nothing: a running dispatcher
carries it out and calls the callbacks. The commands `outbox retry|cancel|resolve|release|pause|resume` call these functions.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Row, delete, insert, select, update

from dispatchers.decide import CANCEL_UNSERVED_AFTER
from dispatchers.store import callback_registry
from dispatchers.store import flow_control as store_flow_control
from dispatchers.store.database_identity import is_suspended
from dispatchers.stored_outcome import SEND_AGAIN, UNSERVED, Known, read_outcome, write_outcome
from outbox.errors import DecisionRefused, EntryNotFound, InvalidValue
from outbox.keys import check_field
from outbox.payload import encode_json
from outbox.sql.deployment import recorded_environment
from outbox.sql.dialect import clock, database_now
from outbox.sql.ordering import Place, advance
from outbox.sql.schema import Tables
from outbox.times import NEVER

Verdict: TypeAlias = Literal["happened", "did_not_happen", "send_again"]

REASON_CHARS_MAX = 1000
RESULT_BYTES_MAX = 64 * 1024
ACTOR_CHARS_MAX = 255
_STATES: Mapping[Verdict, Any] = {"happened": "delivered", "did_not_happen": "failed", "send_again": SEND_AGAIN}


def retry(connection: Connection, tables: Tables, entry_id: UUID, *, actor: str, reason: str | None = None) -> bool:
    """Make a waiting entry due now. Its attempts still count, and its limits stay.

    Returns True if a dispatcher will send it, and False if its outcome is stored and a dispatcher will only call its
    callback.

    Raises `EntryNotFound`. Raises `InvalidValue` for an actor or a reason outside its limits. Raises `DecisionRefused` if the
    entry is neither `pending` nor `retry`, if it is suspended, or if it waits for earlier senders after a "send again".
    """
    check_decision(actor, reason)
    row = _row(connection, tables, entry_id)
    known = read_outcome(row.outcome).known
    if known is not None and known.attempts is None:
        raise _refused(row, f"an operator has decided that it is {known.state}; a running dispatcher carries that out")
    if row.state == "uncertain":
        raise _refused(row, "it may have happened: check with the service, then `resolve` it")
    _require(row, {"pending", "retry"}, "only a waiting entry can be retried")
    if row.state == "pending" and row.maybe_sent:
        raise _refused(row, "it will be sent again, once no earlier send can still be in flight")
    if row.position is not None and row.due_at == NEVER:
        raise _refused(row, "it is blocked by an earlier entry of its ordering group, which `show` prints")
    _write(connection, tables, row, due_at=clock())
    _record(connection, tables, entry_id, actor, reason or "made due now")
    return known is None


def cancel(connection: Connection, tables: Tables, entry_id: UUID, *, actor: str, reason: str | None = None) -> bool:
    """Cancel an entry that was certainly never sent. Its callback runs with the state `cancelled`.

    Returns True if this transaction settles the entry. That is so if no recorded callback belongs to it, and if no dispatcher
    serves it: it belongs to another env than the database, or it has been due for a minute. Returns False if a dispatcher
    will settle it. A dispatcher that does not serve it does so after a minute.
    Raises `EntryNotFound` and `InvalidValue`. Raises `DecisionRefused` if the entry is being sent, may have been sent, or has
    ended.
    """
    check_decision(actor, reason)
    row = _row(connection, tables, entry_id)
    known = read_outcome(row.outcome).known
    if known is not None and known.attempts is not None:
        raise _refused(row, f"its outcome is recorded as {known.state}, and only its callback is due")
    _require(row, {"pending", "retry"}, "only a waiting entry can be cancelled")
    if row.maybe_sent:
        raise _refused(row, "it may have been sent, so it cannot be cancelled")
    if is_suspended(connection, tables):
        raise _refused(
            row,
            "sending is suspended and the database may have lost the record of a send: run `outbox resume --after-restore` first",
        )
    text = reason or "cancelled by an operator"
    now = database_now(connection)
    fields = select(tables.entry.c.env, tables.entry.c.operation).where(tables.entry.c.id == entry_id)
    entry = connection.execute(fields).one()
    is_foreign = recorded_environment(connection, tables) not in (None, entry.env)
    is_unserved = is_foreign or _is_unserved_for_long(connection, tables, row, entry, now)
    at_once = is_unserved and not callback_registry.is_due(connection, tables, "on_settled", entry.operation)
    if at_once:
        _settle_cancelled(connection, tables, row, text)
    else:
        decided_at = now if known is None or known.decided_at is None else known.decided_at
        _know(connection, tables, row, Known(state="cancelled", reason=text, decided_at=decided_at))
    _record(connection, tables, entry_id, actor, text)
    return at_once


def resolve(
    connection: Connection,
    tables: Tables,
    entry_id: UUID,
    verdict: Verdict,
    *,
    actor: str,
    reason: str,
    result: Any = None,
) -> None:
    """Record the outcome of an uncertain entry, or let it be sent again. Ask the service first.

    With `happened` a dispatcher settles it as delivered, with `result` (JSON, 64 KiB); with `did_not_happen` as failed. With
    `send_again` it first waits until no earlier sender can be running (lease and clock-skew margin). Then it is sent: under
    the same key while the service certainly remembers the key and has stored nothing under it, else under the key of the next
    epoch, so IT MAY HAPPEN TWICE. Until a dispatcher carries a decision out, a later decision replaces it. The history keeps
    both.
    Raises `EntryNotFound`, `InvalidValue` for an empty reason, `NotSerializable`, and `DecisionRefused` unless the entry is
    uncertain.
    """
    if verdict not in _STATES:
        raise InvalidValue("verdict", verdict, f"must be one of {sorted(_STATES)}")
    if not reason.strip():
        raise InvalidValue("reason", reason, "must say how you know; it is recorded")
    check_decision(actor, reason)
    if result is not None:
        encode_json("result", result, RESULT_BYTES_MAX)
    row = _row(connection, tables, entry_id)
    _require(row, {"uncertain"}, "only an uncertain entry can be resolved")
    _know(connection, tables, row, Known(state=_STATES[verdict], result=result, reason=reason))
    _record(connection, tables, entry_id, actor, f"{verdict}: {reason}")


def release(connection: Connection, tables: Tables, entry_id: UUID, *, actor: str, reason: str | None = None) -> None:
    """Release a suspended entry: it is due now. An uncertain entry still waits for a decision or a status lookup.

    Raises `EntryNotFound`, `InvalidValue`, and `DecisionRefused` if the entry is not suspended.
    """
    check_decision(actor, reason)
    row = _row(connection, tables, entry_id)
    if row.suspended_reason is None:
        raise _refused(row, "it is not suspended")
    outcome = read_outcome(row.outcome)
    undecided = row.state == "uncertain" and outcome.known is None and outcome.lookup is None
    _write(connection, tables, row, suspended_reason=None, due_at=NEVER if undecided else clock())
    _record(connection, tables, entry_id, actor, reason or f"released from: {row.suspended_reason}")


def release_group(
    connection: Connection, tables: Tables, ordering_key: str, *, actor: str, reason: str | None = None
) -> None:
    """Release a blocked ordering group.

    Raises `InvalidValue`, and `EntryNotFound` if no ordering group of this key is blocked.
    """
    check_decision(actor, reason)
    blocked = tables.blocked_group
    gone = delete(blocked).where(blocked.c.ordering_key == ordering_key).returning(blocked.c.entry_id, blocked.c.reason)
    row = connection.execute(gone).one_or_none()
    if row is None:
        raise EntryNotFound(f"ordering group {ordering_key!r} is not blocked")
    advance(connection, tables, [Place(ordering_key, 0)])  # the first that waits
    _record(connection, tables, row.entry_id, actor, reason or f"ordering group released from: {row.reason}")


# --- destinations


def pause(connection: Connection, tables: Tables, name: str, *, actor: str, reason: str | None = None) -> bool:
    """Pause a destination; returns whether any entry waits for it. A second pause replaces the first.

    Raises `InvalidValue`.
    """
    check_field("destination", name)
    check_decision(actor, reason)
    store_flow_control.make_rows(connection, tables, [name])
    _write_destination(connection, tables, name, actor, paused=True, paused_reason=reason)
    found = select(tables.queue.c.id).where(tables.queue.c.destination == name).limit(1)
    return connection.execute(found).one_or_none() is not None


def resume(connection: Connection, tables: Tables, name: str, *, actor: str, reason: str | None = None) -> None:
    """Resume a destination at once: ends its pause and Retry-After cooldown, and closes its circuit breaker.

    Raises `InvalidValue`, and `DecisionRefused` if it is not paused or throttled.
    """
    check_field("destination", name)
    check_decision(actor, reason)
    destination = tables.destination
    throttled = destination.c.name == name, store_flow_control.is_throttled(tables, clock())
    if connection.execute(select(destination.c.name).where(*throttled).with_for_update()).one_or_none() is None:
        raise DecisionRefused(
            f"destination {name!r} is not paused or throttled: `outbox destinations` lists all", "closed"
        )
    resumed = {"paused": False, "paused_reason": reason, "cooldown_until": None}
    closed = {"breaker": "closed", "breaker_until": None, "breaker_failures": 0, "breaker_token": None}
    _write_destination(connection, tables, name, actor, **resumed, **closed)


def _write_destination(connection: Connection, tables: Tables, name: str, actor: str, **values: Any) -> None:
    decided = {"decided_by": actor, "decided_at": clock(), "changed_at": clock()}
    connection.execute(update(tables.destination).where(tables.destination.c.name == name).values(values | decided))


# --- the actor and the reason


def check_decision(actor: str, reason: str | None) -> None:
    """Raise `InvalidValue` for an actor or a reason that cannot be recorded."""
    if not actor.strip():
        raise InvalidValue("actor", actor, "must name the operator; it is recorded")
    _check_text("actor", actor, ACTOR_CHARS_MAX)
    _check_text("reason", reason or "", REASON_CHARS_MAX)


def _check_text(name: str, text: str, chars_max: int) -> None:
    if len(text) > chars_max:
        raise InvalidValue(name, text, f"has {len(text)} characters; the maximum is {chars_max}")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise InvalidValue(name, text, "contains a NUL character or a lone surrogate, which databases cannot store")


# --- the row, under lock, and what is written to it


def _row(connection: Connection, tables: Tables, entry_id: UUID) -> Row[Any]:
    """The entry's row of the queue, locked; a settled entry's has its state and nothing to decide."""
    queue, settlement = tables.queue, tables.settlement
    row = connection.execute(select(queue).where(queue.c.id == entry_id).with_for_update()).one_or_none()
    if row is not None:
        return row
    settled = connection.execute(select(settlement).where(settlement.c.id == entry_id)).one_or_none()
    if settled is None:
        raise EntryNotFound(f"no entry has the id {entry_id}")
    raise _refused(settled, "it has ended, and that is final")


def _require(row: Row[Any], states: set[str], otherwise: str) -> None:
    if row.state == "sending":
        raise _refused(row, "a send or a status lookup is in flight; try again when it has ended")
    if row.state not in states:
        raise _refused(row, otherwise)
    if row.suspended_reason is not None:
        raise _refused(row, f"it is suspended ({row.suspended_reason}): `release` it first")


def _refused(row: Row[Any], why: str) -> DecisionRefused:
    return DecisionRefused(f"entry {row.id} is {row.state}: {why}", row.state)


def _know(connection: Connection, tables: Tables, row: Row[Any], known: Known) -> None:
    """Store the decision about the entry; the next dispatcher that claims it carries it out."""
    outcome = write_outcome(known.reason or "", stored=read_outcome(row.outcome).stored, known=known)
    _write(connection, tables, row, outcome=outcome, due_at=clock())


def _is_unserved_for_long(
    connection: Connection, tables: Tables, row: Row[Any], entry: Row[str, str], now: datetime
) -> bool:
    """Whether no dispatcher has served its operation although it has been due: it, or another one of them, has only been
    released since, and it has never been tried.
    """
    queue, due_before = tables.queue, now - CANCEL_UNSERVED_AFTER
    since = row.waiting_since or row.due_at
    if row.first_leased_at is not None or row.attempts or since > due_before:
        return False
    if read_outcome(row.outcome).is_unserved:
        return True
    others = (
        select(queue.c.outcome)
        .join(tables.entry, tables.entry.c.id == queue.c.id)
        .where(
            queue.c.destination == row.destination,
            tables.entry.c.operation == entry.operation,
            tables.entry.c.env == entry.env,
            queue.c.waiting_since <= due_before,
            queue.c.outcome.contains(UNSERVED),
        )
        .limit(1)
    )
    return read_outcome(connection.execute(others).scalar_one_or_none()).is_unserved


def _settle_cancelled(connection: Connection, tables: Tables, row: Row[Any], reason: str) -> None:
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
        raise _refused(row, "or was in this state a moment ago, and has just changed: show it again")


def _record(connection: Connection, tables: Tables, entry_id: UUID, actor: str, reason: str) -> None:
    decision = insert(tables.event).values(entry_id=entry_id, at=clock(), kind="decision", actor=actor, reason=reason)
    connection.execute(decision)
