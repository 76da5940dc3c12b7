"""The rules of `outbox verify` that a database can answer: each question selects the rows that break one, as (id, text).

A rule selects only what is impossible, not what a failover, an operator or a late proof of success may cause.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sqlalchemy import Select, String, Table, and_, case, exists, func, literal, not_, or_, select
from sqlalchemy import cast as as_type

from dispatchers.decide_lookup import ABSENT, FOUND
from outbox.sql.ordering import is_blocked
from outbox.sql.schema import Tables
from outbox.times import NEVER

Question: TypeAlias = Callable[[Tables], Select[*tuple[Any, ...]]]


# --- each entry is in one place


def _lost(tables: Tables) -> Select[*tuple[Any, ...]]:
    entry = tables.entry
    is_kept = or_(_has(tables.queue.c.id, entry.c.id), _has(tables.settlement.c.id, entry.c.id))
    return select(entry.c.id, literal("neither waits nor has ended").label("text")).where(~is_kept)


def _twice(tables: Tables) -> Select[*tuple[Any, ...]]:
    queue, settlement = tables.queue, tables.settlement
    text = _joined("waits as ", queue.c.state, ", and has ended as ", settlement.c.state)
    return select(queue.c.id, text).join(settlement, settlement.c.id == queue.c.id)


def _orphaned(tables: Tables) -> Select[*tuple[Any, ...]]:
    queue, settlement = tables.queue.c.id, tables.settlement.c.id
    rows = select(queue.label("id")).union_all(select(settlement.label("id"))).subquery()
    text = literal("waits or has ended, but is not an entry").label("text")
    return select(rows.c.id, text).where(~_has(tables.entry.c.id, rows.c.id)).distinct()


def _history_of_nothing(tables: Tables) -> Select[*tuple[Any, ...]]:
    id, text = tables.event.c.entry_id, literal("has a history, but is not an entry").label("text")
    return select(id.label("id"), text).where(~_has(tables.entry.c.id, id)).distinct()


def _sharing_a_key(tables: Tables) -> Select[*tuple[Any, ...]]:
    return _alike("has the key of entry ", tables.entry, "tag")


def _without_its_request(tables: Tables) -> Select[*tuple[Any, ...]]:
    entry = tables.entry
    text = _joined("waits, but the record of its request is missing: ", entry.c.record_id)
    waiting = select(entry.c.id, text).join(tables.queue, tables.queue.c.id == entry.c.id)
    return waiting.where(entry.c.record_id.is_not(None), ~_has(tables.record.c.id, entry.c.record_id))


# --- what waits is as it was enqueued, and will have its turn


def _bound_elsewhere(tables: Tables) -> Select[*tuple[Any, ...]]:
    entry, queue = tables.entry, tables.queue
    text = _joined("was enqueued for ", entry.c.destination, ", but waits for ", queue.c.destination)
    return (
        select(entry.c.id, text).join(queue, queue.c.id == entry.c.id).where(queue.c.destination != entry.c.destination)
    )


def _in_another_group(tables: Tables) -> Select[*tuple[Any, ...]]:
    entry, queue = tables.entry, tables.queue
    group = [func.coalesce(table.c.ordering_key, "none") for table in (entry, queue)]
    text = _joined("was enqueued in ordering group ", group[0], ", but waits in ordering group ", group[1])
    queue_update = entry.c.ordering_key.is_distinct_from(queue.c.ordering_key)
    return select(entry.c.id, text).join(queue, queue.c.id == entry.c.id).where(queue_update)


def _for_another_scope(tables: Tables) -> Select[*tuple[Any, ...]]:
    """Whose turn it is at a fair destination; elsewhere the queue says neither."""
    entry, queue = tables.entry, tables.queue
    mine = and_(queue.c.fair == queue.c.destination, queue.c.scope == entry.c.scope)
    unfair = and_(queue.c.fair.is_(None), queue.c.scope.is_(None))
    text = literal("waits in the fair share of another scope or destination").label("text")
    return (
        select(entry.c.id, text)
        .join(queue, queue.c.id == entry.c.id)
        .where(not_(func.coalesce(or_(mine, unfair), False)))
    )


def _without_a_place(tables: Tables) -> Select[*tuple[Any, ...]]:
    queue = tables.queue
    text = literal("has an ordering key but no position, or a position but no key").label("text")
    return select(queue.c.id, text).where(queue.c.ordering_key.is_(None) != queue.c.position.is_(None))


def _in_one_place(tables: Tables) -> Select[*tuple[Any, ...]]:
    return _alike("has the same position in its ordering group as entry ", tables.queue, "ordering_key", "position")


def _never_due(tables: Tables) -> Select[*tuple[Any, ...]]:
    queue = tables.queue
    waits = queue.c.state.in_(("pending", "retry")), queue.c.due_at == NEVER
    alone = queue.c.suspended_reason.is_(None), queue.c.position.is_(None)
    return select(queue.c.id, literal("never comes due, although nothing suspends or blocks it").label("text")).where(
        *waits, *alone
    )


def _waits_for_nothing(tables: Tables) -> Select[*tuple[Any, ...]]:
    queue, before = tables.queue, tables.queue.alias("before")
    first = (before.c.ordering_key == queue.c.ordering_key) & (before.c.position < queue.c.position)
    is_first = ~exists().where(first, before.c.state != "uncertain")
    blocked = _has(tables.blocked_group.c.ordering_key, queue.c.ordering_key)
    text = literal("is blocked, but no entry precedes it in its ordering group").label("text")
    return select(queue.c.id, text).where(is_blocked(queue), is_first, ~blocked)


# --- the counts, the doubt, the key


def _miscounted(tables: Tables) -> Select[*tuple[Any, ...]]:
    rows, entry, meta = _progress(tables), tables.entry, tables.meta
    text = _joined("was sent ", rows.c.attempts, " times in ", rows.c.deliveries, " deliveries")
    # Late proof of success may come from a delivery that a database which was set back has never heard of.
    forgot = exists().where(or_(meta.c.suspended_reason.is_not(None), meta.c.resumed_at >= entry.c.created_at))
    counted = select(rows.c.id, text).join(entry, entry.c.id == rows.c.id)
    return counted.where(rows.c.attempts > rows.c.deliveries, ~forgot)


def _uncounted(tables: Tables) -> Select[*tuple[Any, ...]]:
    rows, event = _progress(tables), tables.event
    last = select(func.max(event.c.delivery)).where(event.c.entry_id == rows.c.id).scalar_subquery()
    text = _joined("its history has delivery ", last, ", but only ", rows.c.deliveries, " are counted")
    return select(rows.c.id, text).where(last > rows.c.deliveries)


def _unexplained_epoch(tables: Tables) -> Select[*tuple[Any, ...]]:
    rows, event = _progress(tables), tables.event
    decided = event.c.entry_id == rows.c.id, event.c.kind != "attempt"
    decisions = select(func.count()).select_from(event).where(*decided).scalar_subquery()  # one epoch each, at most
    text = _joined("has key epoch ", rows.c.key_epoch, ", but no decisions to send it again explain that")
    return select(rows.c.id, text).where(rows.c.key_epoch > 0, rows.c.key_epoch > decisions)


def _uncertain_of_nothing(tables: Tables) -> Select[*tuple[Any, ...]]:
    queue = tables.queue
    text = literal("is uncertain, but is not marked as maybe sent").label("text")
    return select(queue.c.id, text).where(queue.c.state == "uncertain", ~queue.c.maybe_sent)


def _forgotten_doubt(tables: Tables) -> Select[*tuple[Any, ...]]:
    queue = tables.queue
    text = _joined("was sent ", queue.c.attempts, " times, but is not marked as maybe sent")
    return select(queue.c.id, text).where(
        queue.c.attempts > 0, ~queue.c.maybe_sent, ~_proved_absent(tables, queue.c.id)
    )


def _sent_again(tables: Tables) -> Select[*tuple[Any, ...]]:
    queue, event = tables.queue, tables.event
    by_event = exists().where(event.c.entry_id == queue.c.id, event.c.kind != "attempt")
    text = literal("may have been sent and is pending, but no decision to send it again is recorded").label("text")
    return select(queue.c.id, text).where(queue.c.state == "pending", queue.c.maybe_sent, ~by_event)


# --- the end agrees with the history


def _unexplained_end(tables: Tables) -> Select[*tuple[Any, ...]]:
    settlement, event = tables.settlement, tables.event
    id, reason = settlement.c.id, settlement.c.reason
    mine = event.c.entry_id == id
    tried = exists().where(mine, event.c.kind == "attempt", event.c.reason == reason)
    by_lookup = exists().where(mine, event.c.kind == "lookup", event.c.reason == reason)
    kept = exists().where(mine, event.c.kind == "attempt", event.c.reason.startswith("delivered, but "))
    decided = exists().where(mine, event.c.kind == "decision", event.c.reason == reason)
    verdict = _last_verdict(tables)
    is_explained = case(
        (
            settlement.c.state == "delivered",
            or_(reason.is_(None), and_(reason == FOUND, or_(by_lookup, kept)), verdict == "happened"),
        ),
        (settlement.c.state == "failed", or_(tried, and_(by_lookup, reason != FOUND), verdict == "did_not_happen")),
        else_=or_(reason.is_(None), decided),
    )
    text = _joined("is ", settlement.c.state, ", but its history does not show that")
    return select(id, text).where(not_(func.coalesce(is_explained, False)))


def _last_verdict(tables: Tables) -> Any:
    """The operator's last decision with the settlement's reason, as `decisions` stores it."""
    settlement, event = tables.settlement, tables.event
    by_event = {verdict: literal(f"{verdict}: ") + settlement.c.reason for verdict in ("happened", "did_not_happen")}
    verdict = case(*((event.c.reason == text, name) for name, text in by_event.items()))
    decided = (
        event.c.entry_id == settlement.c.id,
        event.c.kind == "decision",
        event.c.reason.in_(list(by_event.values())),
    )
    return select(verdict).where(*decided).order_by(event.c.id.desc()).limit(1).scalar_subquery()


def _delivered_unsent(tables: Tables) -> Select[*tuple[Any, ...]]:
    """Other reasons: an operator's, or a lookup's."""
    settlement = tables.settlement
    text = literal("is delivered, but was never sent").label("text")
    unsent = settlement.c.state == "delivered", settlement.c.reason.is_(None), settlement.c.attempts == 0
    return select(settlement.c.id, text).where(*unsent)


def _cancelled_in_doubt(tables: Tables) -> Select[*tuple[Any, ...]]:
    settlement = tables.settlement
    text = _joined("is cancelled, but was sent ", settlement.c.attempts, " times")
    sent = settlement.c.state == "cancelled", settlement.c.attempts > 0
    return select(settlement.c.id, text).where(*sent, ~_proved_absent(tables, settlement.c.id))


def _cancelled_with_a_result(tables: Tables) -> Select[*tuple[Any, ...]]:
    settlement = tables.settlement
    text = literal("is cancelled, but has a service's answer").label("text")
    return select(settlement.c.id, text).where(settlement.c.state == "cancelled", settlement.c.result.is_not(None))


def _before_its_time(tables: Tables) -> Select[*tuple[Any, ...]]:
    entry, settlement = tables.entry, tables.settlement
    text = _joined(settlement.c.state, " before it was enqueued")
    ended = select(entry.c.id, text).join(settlement, settlement.c.id == entry.c.id)
    return ended.where(settlement.c.settled_at < entry.c.created_at)


# --- blocked groups


def _blocking_nothing(tables: Tables) -> Select[*tuple[Any, ...]]:
    blocked = tables.blocked_group
    text = _joined("blocks ordering group ", blocked.c.ordering_key, ", but does not exist")
    return select(blocked.c.entry_id.label("id"), text).where(~_has(tables.entry.c.id, blocked.c.entry_id))


def _blocking_another_group(tables: Tables) -> Select[*tuple[Any, ...]]:
    blocked, entry = tables.blocked_group, tables.entry
    text = _joined("blocks ordering group ", blocked.c.ordering_key, ", but belongs to another")
    blocking = select(entry.c.id, text).join(blocked, blocked.c.entry_id == entry.c.id)
    return blocking.where(entry.c.ordering_key.is_distinct_from(blocked.c.ordering_key))


def _blocking_though_delivered(tables: Tables) -> Select[*tuple[Any, ...]]:
    blocked, settlement = tables.blocked_group, tables.settlement
    text = _joined("blocks ordering group ", blocked.c.ordering_key, ", but is delivered")
    blocking = select(settlement.c.id, text).join(blocked, blocked.c.entry_id == settlement.c.id)
    return blocking.where(settlement.c.state == "delivered")


QUESTIONS: Mapping[str, tuple[str, list[Question]]] = {
    "kept": ("an entry that was committed is never lost", [_lost]),
    "ended once": ("an entry that has ended is not in the queue", [_twice]),
    "whole": ("every row of the queue, the settlements and the history belongs to an entry", [_orphaned, _history_of_nothing]),
    "own key": ("no two entries share a key", [_sharing_a_key]),
    "request": ("the record of a request is kept until its entries have ended", [_without_its_request]),
    "as enqueued": (
        "an entry waits for the destination, and in the ordering group, that it was enqueued for",
        [_bound_elsewhere, _in_another_group, _for_another_scope],
    ),
    "own place": ("an entry with an ordering key has a unique position in its ordering group", [_without_a_place, _in_one_place]),
    "its turn": ("an entry that is neither suspended nor blocked comes due", [_never_due, _waits_for_nothing]),
    "counted": ("an entry is not sent more often than it was claimed", [_miscounted, _uncounted]),
    "same key": ("an entry keeps its key, except after an operator's decision or a proof of absence", [_unexplained_epoch]),
    "doubt": (
        "an entry that may have been sent is in doubt until an operator or a proof ends that",
        [_uncertain_of_nothing, _forgotten_doubt, _sent_again],
    ),
    "true end": ("the final state agrees with the history", [_unexplained_end, _delivered_unsent]),
    "cancelled": ("only an entry that was certainly never sent is cancelled", [_cancelled_in_doubt, _cancelled_with_a_result]),
    "in order": ("an entry ends after it was enqueued", [_before_its_time]),
    "blocked": (
        "the entry that blocks an ordering group belongs to it and was not delivered",
        [_blocking_nothing, _blocking_another_group, _blocking_though_delivered],
    ),
}  # fmt: skip


# --- what they share


def _has(column: Any, id: Any) -> Any:
    return exists().where(column == id)


def _alike(text: str, table: Table, *names: str) -> Select[*tuple[Any, ...]]:
    """The rows that are equal to another in these columns. No join: on stale statistics that compares each with each."""
    columns = [table.c[name] for name in names]
    before = func.lag(table.c.id).over(partition_by=columns, order_by=table.c.id).label("before")
    rows = select(table.c.id, before).where(*(column.is_not(None) for column in columns)).subquery()
    return select(rows.c.id, _joined(text, rows.c.before)).where(rows.c.before.is_not(None))


def _proved_absent(tables: Tables, id: Any) -> Any:
    """Whether a lookup has ended the doubt of the attempts before it, which still count."""
    event = tables.event
    return exists().where(event.c.entry_id == id, event.c.kind == "lookup", event.c.reason.startswith(ABSENT))


def _joined(*parts: Any) -> Any:
    """A text made of constants and columns, in the database."""
    pieces = [literal(part) if isinstance(part, str) else as_type(part, String) for part in parts]
    text: Any = pieces[0]
    for piece in pieces[1:]:
        text = text + piece
    return text.label("text")


def _progress(tables: Tables) -> Any:
    """How far each entry has come, waiting or ended."""
    waiting, ended = (
        select(table.c.id, table.c.deliveries, table.c.attempts, table.c.key_epoch)
        for table in (tables.queue, tables.settlement)
    )
    return waiting.union_all(ended).subquery()
