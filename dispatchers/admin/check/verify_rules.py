"""The rules of `outbox verify` that SQL can check. Each query selects the entries that break a rule, as (id, text).

The text is the end of a sentence that begins with "entry ID". A rule selects only impossible rows, not those that a failover, an
operator or a late proof of success may cause.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from sqlalchemy import Select, String, Table, and_, case, exists, func, literal, not_, or_, select
from sqlalchemy import cast as as_type
from sqlalchemy.sql.functions import FunctionElement

from dispatchers.decide_lookup import ABSENT, FOUND
from outbox.sql.ordering import is_blocked
from outbox.sql.schema.rendering import renders
from outbox.sql.schema.tables import Tables
from outbox.times import NEVER

Query: TypeAlias = Select[*tuple[Any, ...]]
Queries: TypeAlias = Callable[[Tables], Iterator[Query]]

RULES: dict[str, tuple[str, Queries]] = {}
"""The invariant of each rule, and the queries for the entries that break it."""


def _rule(name: str, invariant: str) -> Callable[[Queries], Queries]:
    def add(queries: Queries) -> Queries:
        RULES[name] = (invariant, queries)
        return queries

    return add


# --- what the queries share


def _text(*parts: Any) -> Any:
    pieces = [literal(part) if isinstance(part, str) else as_type(part, String) for part in parts]
    text: Any = pieces[0]
    for piece in pieces[1:]:
        text = text + piece
    return text.label("text")


def _has(column: Any, id: Any) -> Any:
    return exists().where(column == id)


def _alike(text: str, table: Table, *names: str) -> Query:
    """The rows that are equal to another row in these columns. Not a join: with stale statistics it compares all pairs."""
    columns = [table.c[name] for name in names]
    before = func.lag(table.c.id).over(partition_by=columns, order_by=table.c.id).label("before")
    rows = select(table.c.id, before).where(*(column.is_not(None) for column in columns)).subquery()
    return select(rows.c.id, _text(text, _IdText(rows.c.before))).where(rows.c.before.is_not(None))


@renders(lambda dialect: dialect.id_text)
class _IdText(FunctionElement[str]):
    type = String()
    inherit_cache = True


def _proved_absent(tables: Tables, id: Any) -> Any:
    """Whether a lookup has proved that the effect did not happen. The attempts before it are still counted."""
    event = tables.event
    return exists().where(event.c.entry_id == id, event.c.kind == "lookup", event.c.reason.startswith(ABSENT))


def may_be_forgotten(tables: Tables, created_at: Any) -> Any:
    """Whether the database was restored since then. Success that was proved before may then be stored without its history: a
    dispatcher brought it from a claim that the restored database does not contain.
    """
    meta = tables.meta.c
    return exists().where(or_(meta.suspended_reason.is_not(None), meta.resumed_at >= created_at))


def _progress(tables: Tables) -> Any:
    waiting, ended = (
        select(table.c.id, table.c.deliveries, table.c.attempts, table.c.key_epoch)
        for table in (tables.queue, tables.settlement)
    )
    return waiting.union_all(ended).subquery()


# --- each entry is in one place


@_rule("not lost", "an entry that was committed is never lost")
def _kept(tables: Tables) -> Iterator[Query]:
    id = tables.entry.c.id
    is_kept = or_(_has(tables.queue.c.id, id), _has(tables.settlement.c.id, id))
    yield select(id, _text("has no row in the queue and no settlement, so no dispatcher will ever send it")).where(
        ~is_kept
    )


@_rule("ended once", "an entry that has ended is not in the queue")
def _ended_once(tables: Tables) -> Iterator[Query]:
    queue, settlement = tables.queue, tables.settlement
    text = _text("has the settlement ", settlement.c.state, ", but is still in the queue as ", queue.c.state)
    yield select(queue.c.id, text).join(settlement, settlement.c.id == queue.c.id)


@_rule("no orphans", "every row of the queue, the settlements and the history belongs to an entry")
def _whole(tables: Tables) -> Iterator[Query]:
    queue, settlement, event = tables.queue.c.id, tables.settlement.c.id, tables.event.c.entry_id
    rows = select(queue.label("id")).union_all(select(settlement.label("id"))).subquery()
    text = _text("has a row in the queue or a settlement, but its row in the table of entries is missing")
    yield select(rows.c.id, text).where(~_has(tables.entry.c.id, rows.c.id)).distinct()
    text = _text("has a history, but its row in the table of entries is missing")
    yield select(event.label("id"), text).where(~_has(tables.entry.c.id, event)).distinct()


@_rule("unique key", "no two entries share a key")
def _own_key(tables: Tables) -> Iterator[Query]:
    yield _alike("has the same key as entry ", tables.entry, "tag")


@_rule("request record", "the record of a request is kept until its entries have ended")
def _request(tables: Tables) -> Iterator[Query]:
    entry = tables.entry
    text = _text("is in the queue, but the record of its request was deleted: ", entry.c.record_id)
    waiting = select(entry.c.id, text).join(tables.queue, tables.queue.c.id == entry.c.id)
    yield waiting.where(entry.c.record_id.is_not(None), ~_has(tables.record.c.id, entry.c.record_id))


# --- waiting entries have the values of their enqueue, and become due


@_rule("as enqueued", "a waiting entry has the destination, ordering group and scope that it was enqueued with")
def _as_enqueued(tables: Tables) -> Iterator[Query]:
    entry, queue = tables.entry, tables.queue

    def waiting(text: Any) -> Query:
        return select(entry.c.id, text).join(queue, queue.c.id == entry.c.id)

    text = _text("was enqueued for destination ", entry.c.destination, ", but waits for ", queue.c.destination)
    yield waiting(text).where(queue.c.destination != entry.c.destination)
    group = [func.coalesce(table.c.ordering_key, "none") for table in (entry, queue)]
    text = _text("was enqueued in ordering group ", group[0], ", but waits in ordering group ", group[1])
    yield waiting(text).where(entry.c.ordering_key.is_distinct_from(queue.c.ordering_key))
    # The queue has the scope for fair destinations only.
    mine = and_(queue.c.fair == queue.c.destination, queue.c.scope == entry.c.scope)
    unfair = and_(queue.c.fair.is_(None), queue.c.scope.is_(None))
    text = _text("waits in the fair share of another scope or destination")
    yield waiting(text).where(not_(func.coalesce(or_(mine, unfair), False)))


@_rule("unique position", "an entry with an ordering key has a unique position in its ordering group")
def _own_place(tables: Tables) -> Iterator[Query]:
    queue = tables.queue
    text = _text("has an ordering key without a position, or a position without an ordering key")
    yield select(queue.c.id, text).where(queue.c.ordering_key.is_(None) != queue.c.position.is_(None))
    yield _alike("has the same position in its ordering group as entry ", queue, "ordering_key", "position")


@_rule("becomes due", "an entry that is neither suspended nor blocked becomes due")
def _its_turn(tables: Tables) -> Iterator[Query]:
    queue, before = tables.queue, tables.queue.alias("before")
    waits = queue.c.state.in_(("pending", "retry")), queue.c.due_at == NEVER
    alone = queue.c.suspended_reason.is_(None), queue.c.position.is_(None)
    text = _text("never becomes due, but it is neither suspended nor blocked")
    yield select(queue.c.id, text).where(*waits, *alone)
    first = (before.c.ordering_key == queue.c.ordering_key) & (before.c.position < queue.c.position)
    is_first = ~exists().where(first, before.c.state != "uncertain")
    blocked = _has(tables.blocked_group.c.ordering_key, queue.c.ordering_key)
    text = _text("is blocked, but it is the first entry of its ordering group")
    yield select(queue.c.id, text).where(is_blocked(queue), is_first, ~blocked)


# --- the counts, the doubt, the key


@_rule("attempt count", "an entry is not sent more often than it was claimed, and its history has no other claims")
def _counted(tables: Tables) -> Iterator[Query]:
    rows, entry, event = _progress(tables), tables.entry, tables.event
    text = _text("has ", rows.c.attempts, " attempts, but was claimed only ", rows.c.deliveries, " times")
    counted = select(rows.c.id, text).join(entry, entry.c.id == rows.c.id)
    yield counted.where(rows.c.attempts > rows.c.deliveries, ~may_be_forgotten(tables, entry.c.created_at))
    last = select(func.max(event.c.delivery)).where(event.c.entry_id == rows.c.id).scalar_subquery()
    text = _text("has delivery ", last, " in its history, but was claimed only ", rows.c.deliveries, " times")
    yield select(rows.c.id, text).where(last > rows.c.deliveries)


@_rule("same key", "an entry keeps its key, except after an operator's decision or a proof of absence")
def _same_key(tables: Tables) -> Iterator[Query]:
    rows, event = _progress(tables), tables.event
    decided = event.c.entry_id == rows.c.id, event.c.kind != "attempt"
    decisions = select(func.count()).select_from(event).where(*decided).scalar_subquery()  # one epoch each, at most
    text = _text("has key epoch ", rows.c.key_epoch, ", but its history has fewer decisions or proofs for a new key")
    yield select(rows.c.id, text).where(rows.c.key_epoch > 0, rows.c.key_epoch > decisions)


@_rule("in doubt", "an entry that may have been sent is in doubt until a decision or a proof ends the doubt")
def _doubt(tables: Tables) -> Iterator[Query]:
    queue, event = tables.queue, tables.event
    text = _text("is uncertain, but maybe_sent is false")
    yield select(queue.c.id, text).where(queue.c.state == "uncertain", ~queue.c.maybe_sent)
    absent = _proved_absent(tables, queue.c.id)
    text = _text("has ", queue.c.attempts, " attempts, but maybe_sent is false, and no lookup has proved absence")
    yield select(queue.c.id, text).where(queue.c.attempts > 0, ~queue.c.maybe_sent, ~absent)
    decided = exists().where(event.c.entry_id == queue.c.id, event.c.kind != "attempt")
    text = _text("is pending and may have been sent, but its history has no decision or proof to send it again")
    yield select(queue.c.id, text).where(queue.c.state == "pending", queue.c.maybe_sent, ~decided)


# --- the end agrees with the history


@_rule("final state", "the history contains the reason of the final state")
def _true_end(tables: Tables) -> Iterator[Query]:
    settlement = tables.settlement
    text = _text("is ", settlement.c.state, ", but its history does not contain the reason of this state")
    yield select(settlement.c.id, text).where(not_(func.coalesce(_is_explained(tables), False)))
    # A delivered entry has a reason only after an operator's decision or a lookup.
    unsent = settlement.c.state == "delivered", settlement.c.reason.is_(None), settlement.c.attempts == 0
    yield select(settlement.c.id, _text("is delivered, but has no attempt, no lookup and no decision")).where(*unsent)


def _is_explained(tables: Tables) -> Any:
    settlement, event = tables.settlement, tables.event
    reason, mine = settlement.c.reason, event.c.entry_id == settlement.c.id
    tried = exists().where(mine, event.c.kind == "attempt", event.c.reason == reason)
    by_lookup = exists().where(mine, event.c.kind == "lookup", event.c.reason == reason)
    kept = exists().where(mine, event.c.kind == "attempt", event.c.reason.startswith("delivered, but "))
    decided = exists().where(mine, event.c.kind == "decision", event.c.reason == reason)
    verdict = _last_verdict(tables)
    created_at = select(tables.entry.c.created_at).where(tables.entry.c.id == settlement.c.id).scalar_subquery()
    brought = may_be_forgotten(tables, created_at)
    return case(
        (
            settlement.c.state == "delivered",
            or_(reason.is_(None), and_(reason == FOUND, or_(by_lookup, kept)), verdict == "happened", brought),
        ),
        (settlement.c.state == "failed", or_(tried, and_(by_lookup, reason != FOUND), verdict == "did_not_happen")),
        else_=or_(reason.is_(None), decided),
    )


def _last_verdict(tables: Tables) -> Any:
    """The operator's last decision with the settlement's reason, as `decisions` stores it."""
    settlement, event = tables.settlement, tables.event
    by_event = {verdict: literal(f"{verdict}: ") + settlement.c.reason for verdict in ("happened", "did_not_happen")}
    verdict = case(*((event.c.reason == text, name) for name, text in by_event.items()))
    mine = event.c.entry_id == settlement.c.id, event.c.kind == "decision", event.c.reason.in_([*by_event.values()])
    return select(verdict).where(*mine).order_by(event.c.id.desc()).limit(1).scalar_subquery()


@_rule("cancelled", "only an entry that was certainly never sent is cancelled")
def _cancelled(tables: Tables) -> Iterator[Query]:
    settlement, event = tables.settlement, tables.event
    cancelled = settlement.c.state == "cancelled"
    text = _text("is cancelled, but has ", settlement.c.attempts, " attempts, and no lookup has proved absence")
    # A dispatcher that carries out an operator's decision may crash. Its lease counts as an attempt, but it sent nothing.
    decision = event.c.kind == "decision", event.c.reason == settlement.c.reason
    decided = exists().where(event.c.entry_id == settlement.c.id, *decision)
    absent = _proved_absent(tables, settlement.c.id)
    yield select(settlement.c.id, text).where(cancelled, settlement.c.attempts > 0, ~absent, ~decided)
    text = _text("is cancelled, but has the answer of a service as its result")
    yield select(settlement.c.id, text).where(cancelled, settlement.c.result.is_not(None))


@_rule("times", "an entry ends after it was enqueued")
def _in_order(tables: Tables) -> Iterator[Query]:
    entry, settlement = tables.entry, tables.settlement
    text = _text("became ", settlement.c.state, " before it was enqueued")
    ended = select(entry.c.id, text).join(settlement, settlement.c.id == entry.c.id)
    yield ended.where(settlement.c.settled_at < entry.c.created_at)


@_rule("blocked group", "the entry that blocks an ordering group belongs to it and was not delivered")
def _blocked(tables: Tables) -> Iterator[Query]:
    blocked, entry, settlement = tables.blocked_group, tables.entry, tables.settlement

    def text(flaw: str) -> Any:
        return _text("blocks ordering group ", blocked.c.ordering_key, flaw)

    missing = select(blocked.c.entry_id.label("id"), text(", but its row in the table of entries is missing"))
    yield missing.where(~_has(entry.c.id, blocked.c.entry_id))
    of_entry = select(entry.c.id, text(", but belongs to another group")).join(
        blocked, blocked.c.entry_id == entry.c.id
    )
    yield of_entry.where(entry.c.ordering_key.is_distinct_from(blocked.c.ordering_key))
    ended = select(settlement.c.id, text(", but is delivered")).join(blocked, blocked.c.entry_id == settlement.c.id)
    yield ended.where(settlement.c.state == "delivered")
