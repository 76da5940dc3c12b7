"""Operator decisions about an entry or a destination. Each is recorded with a name and a reason, in the audit log too.

A decision changes one row in the caller's transaction, if the row's state allows it. It sends nothing: a running dispatcher
carries it out and calls the callbacks. The commands `outbox retry|cancel|resolve|release|pause|resume` call these functions.
"""

from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, select, update

from dispatchers.admin.decide.audit import write_audit
from dispatchers.admin.decide.effects import (
    Unserved,
    cancel_rows,
    record_events,
    refused,
    release_rows,
    resolve_rows,
    retry_rows,
    text_of,
)
from dispatchers.admin.decide.rules import (
    ENDED,
    RESOLVED_STATES,
    Verdict,
    why_not_cancel,
    why_not_release,
    why_not_resolve,
    why_not_retry,
)
from dispatchers.admin.read.dispatchers import served_destinations
from dispatchers.delivery import MAX_RESULT_BYTES
from dispatchers.errors import DecisionRefused, EntryNotFound
from dispatchers.flow_control.state import service_of
from dispatchers.store.queue import throttling as store_flow_control
from dispatchers.store.queue.stuck_groups import free_stuck, head_of
from dispatchers.store.records.heartbeats import read_dispatchers
from dispatchers.store.records.identity import is_suspended
from dispatchers.stored_outcome import MalformedOutcome, read_outcome
from outbox.encryption import Encryption, is_sealed
from outbox.entries.payload import encode_json
from outbox.errors import InvalidValue
from outbox.keys import check_field
from outbox.sql.clock import clock, database_now
from outbox.sql.dialect import dialect_of
from outbox.sql.ordering import Place, advance
from outbox.sql.schema.tables import Tables

MAX_REASON_CHARS = 1000
MAX_ACTOR_CHARS = 255


def retry(connection: Connection, tables: Tables, entry_id: UUID, *, actor: str, reason: str) -> bool:
    """Make a waiting entry due now. Its attempts still count, and its limits stay.

    Returns True if a dispatcher will send it, and False if its outcome is stored and a dispatcher will only call its
    callback.

    Raises `EntryNotFound`. Raises `InvalidValue` for an actor or a reason outside its limits. Raises `DecisionRefused` if the
    entry is neither `pending` nor `retry`, if it is suspended, or if it waits for earlier senders after a "send again".
    """
    check_decision(actor, reason)
    row = entry_row(connection, tables, entry_id)
    if row.ordering_key is not None and free_stuck(connection, tables, [row.id]):
        row = entry_row(connection, tables, entry_id)
    _require(row, why_not_retry(row))
    retry_rows(connection, tables, [row], actor, reason)
    log_decision(connection, tables, entry_id, actor, "retry", reason)
    return read_outcome(row.outcome).known is None


def cancel(connection: Connection, tables: Tables, entry_id: UUID, *, actor: str, reason: str) -> bool:
    """Cancel an entry that was certainly never sent. Its callback runs with the state `cancelled`.

    Returns True if this transaction settles the entry. That is so if no recorded callback belongs to it, and if no dispatcher
    serves it: it belongs to another env than the database, or it has been due for a minute. Returns False if a dispatcher
    will settle it. A dispatcher that does not serve it does so after a minute.
    Raises `EntryNotFound` and `InvalidValue`. Raises `DecisionRefused` if the entry is being sent, may have been sent, or has
    ended.
    """
    check_decision(actor, reason)
    row = entry_row(connection, tables, entry_id)
    _require(row, why_not_cancel(row, is_suspended=is_suspended(connection, tables)))
    settled = cancel_rows(connection, tables, [row], actor, reason, Unserved(connection, tables))
    log_decision(connection, tables, entry_id, actor, "cancel", reason)
    return bool(settled)


def resolve(
    connection: Connection,
    tables: Tables,
    entry_id: UUID,
    verdict: Verdict,
    *,
    actor: str,
    reason: str,
    result: Any = None,
    encryption: Encryption | None = None,
) -> None:
    """Record the outcome of an uncertain entry, or let it be sent again. Ask the service first.

    With `happened` a dispatcher settles it as delivered, with `result` (JSON, 64 KiB); with `did_not_happen` as failed. With
    `send_again` it first waits until no earlier sender can be running (lease and clock-skew margin). Then it is sent: under
    the same key while the service certainly remembers the key and has stored nothing under it, else under the key of the next
    epoch, so IT MAY HAPPEN TWICE. Until a dispatcher carries a decision out, a later decision replaces it. The history keeps
    both. encryption: the data keys, which the result of an encrypted entry needs.
    An entry that may have been sent, or only waits for its callback, and that cannot be decrypted, can be resolved too: as
    what is recorded of it, and not with `send_again`. A stored result that cannot be decrypted is given up.
    Raises `EntryNotFound`, `InvalidValue` for an empty reason, `NotSerializable`, and `DecisionRefused` for any other entry.
    """
    check_resolution(verdict, actor, reason, result)
    row = entry_row(connection, tables, entry_id)
    _require(row, why_not_resolve(row, verdict))
    resolve_rows(connection, tables, [row], verdict, actor, reason, result, encryption)
    log_decision(connection, tables, entry_id, actor, "resolve", text_of(reason, verdict))


def release(connection: Connection, tables: Tables, entry_id: UUID, *, actor: str, reason: str) -> None:
    """Release a suspended entry: it is due now. An uncertain entry still waits for a decision or a status lookup.

    Raises `EntryNotFound`, `InvalidValue`, and `DecisionRefused` if the entry is not suspended.
    """
    check_decision(actor, reason)
    row = entry_row(connection, tables, entry_id)
    _require(row, why_not_release(row))
    release_rows(connection, tables, [row], actor, reason)
    log_decision(connection, tables, entry_id, actor, "release", reason)


def release_group(
    connection: Connection,
    tables: Tables,
    ordering_key: str,
    *,
    actor: str,
    reason: str,
    blocked_by: UUID | None = None,
) -> None:
    """Release a blocked ordering group, or one that is stuck. blocked_by: only if this entry blocks it.

    Raises `InvalidValue`, `EntryNotFound` if no ordering group of this key is blocked or stuck, and `DecisionRefused` if
    `blocked_by` does not block it.
    """
    check_decision(actor, reason)
    blocked = tables.blocked_group
    conditions = [blocked.c.ordering_key == ordering_key]
    if blocked_by is not None:
        conditions.append(blocked.c.entry_id == blocked_by)
    gone = dialect_of(connection).delete_returning(connection, blocked, [blocked.c.entry_id], *conditions)
    row = next(iter(gone), None)
    if row is None and blocked_by is not None:
        raise DecisionRefused(
            f"ordering group {ordering_key!r} is no longer blocked by entry {blocked_by}: read it again", "changed"
        )
    if row is not None:
        advance(connection, tables, [Place(ordering_key, 0)])  # the first that waits
        record_events(connection, tables, actor, {row.entry_id: reason})
    else:
        head = connection.execute(head_of(tables, ordering_key)).scalar()
        if head is None or not free_stuck(connection, tables, [head]):
            raise EntryNotFound(f"ordering group {ordering_key!r} is not blocked: nothing has to be released")
        record_events(connection, tables, actor, {head: reason})
    write_audit(
        connection, tables, actor=actor, action="release", kind="ordering_group", target=ordering_key, reason=reason
    )


# --- destinations


def pause(connection: Connection, tables: Tables, name: str, *, actor: str, reason: str) -> bool:
    """Pause a destination; returns whether any entry waits for it, or a live dispatcher serves it. A second pause replaces the
    first.

    Raises `InvalidValue`.
    """
    check_field("destination", name)
    check_decision(actor, reason)
    store_flow_control.make_rows(connection, tables, [name])
    _write_destination(connection, tables, name, actor, paused=True, paused_reason=reason)
    write_audit(connection, tables, actor=actor, action="pause", kind="destination", target=name, reason=reason)
    found = select(tables.queue.c.id).where(tables.queue.c.destination == name).limit(1)
    if connection.execute(found).one_or_none() is not None:
        return True
    dispatchers = read_dispatchers(connection, tables, database_now(connection))
    return service_of(name) in served_destinations(dispatchers)


def resume(connection: Connection, tables: Tables, name: str, *, actor: str, reason: str) -> None:
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
    resumed = {"paused": False, "paused_reason": None, "cooldown_until": None}
    closed = {"breaker": "closed", "breaker_until": None, "breaker_failures": 0, "breaker_token": None}
    _write_destination(connection, tables, name, actor, **resumed, **closed)
    write_audit(connection, tables, actor=actor, action="resume", kind="destination", target=name, reason=reason)


def _write_destination(connection: Connection, tables: Tables, name: str, actor: str, **values: Any) -> None:
    decided = {"decided_by": actor, "decided_at": clock(), "changed_at": clock()}
    connection.execute(update(tables.destination).where(tables.destination.c.name == name).values(values | decided))


# --- the actor and the reason


def check_resolution(verdict: Verdict, actor: str, reason: str, result: Any) -> None:
    """Raise `InvalidValue` or `NotSerializable` for what `resolve` does not take."""
    if verdict not in RESOLVED_STATES:
        raise InvalidValue("verdict", verdict, f"must be one of {sorted(RESOLVED_STATES)}")
    check_decision(actor, reason)
    if result is not None:
        encode_json("result", result, MAX_RESULT_BYTES)
        if is_sealed(result):
            raise InvalidValue("result", result[:5], "begins as an encrypted result does: put the text into an object")


def check_decision(actor: str, reason: str | None) -> None:
    """Raise `InvalidValue` for an actor or a reason that cannot be recorded. reason: None if it is not about a decision."""
    if _is_blank(actor):
        raise InvalidValue("actor", actor, "must name the operator; it is recorded")
    _check_text("actor", actor, MAX_ACTOR_CHARS)
    if reason is None:
        return
    if _is_blank(reason):
        raise InvalidValue("reason", reason, "must say why, and how you know; it is recorded")
    _check_text("reason", reason, MAX_REASON_CHARS)


def _is_blank(text: str) -> bool:
    """Whether nothing in it can be seen: a zero-width character is not printable."""
    return not any(char.isprintable() and not char.isspace() for char in text)


def _check_text(name: str, text: str, max_chars: int) -> None:
    if len(text) > max_chars:
        raise InvalidValue(name, text, f"has {len(text)} characters; the maximum is {max_chars}")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise InvalidValue(name, text, "contains a NUL character or a lone surrogate, which databases cannot store")


# --- the row, under lock


def entry_row(connection: Connection, tables: Tables, entry_id: UUID) -> Row[Any]:
    """The entry's row of the queue, locked; a settled entry's has its state and nothing to decide.

    Raises `EntryNotFound`, and `DecisionRefused` for an entry that has ended, or whose stored outcome this release cannot read.
    """
    queue, settlement = tables.queue, tables.settlement
    row = connection.execute(select(queue).where(queue.c.id == entry_id).with_for_update()).one_or_none()
    if row is not None:
        try:
            read_outcome(row.outcome)
        except MalformedOutcome as error:
            raise refused(row, f"{error}: `outbox verify` lists such rows") from None
        return row
    settled = connection.execute(select(settlement).where(settlement.c.id == entry_id)).one_or_none()
    if settled is None:
        raise EntryNotFound(f"no entry has the id {entry_id}")
    raise refused(settled, ENDED)


def _require(row: Row[Any], why_not: str | None) -> None:
    if why_not is not None:
        raise refused(row, why_not)


def log_decision(connection: Connection, tables: Tables, entry_id: UUID, actor: str, action: str, text: str) -> None:
    """Record the decision about an entry in the audit log."""
    write_audit(connection, tables, actor=actor, action=action, kind="entry", target=str(entry_id), reason=text)
