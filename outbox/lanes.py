"""Lanes: entries of one ordering key go out one at a time, in commit order, whatever their operation or destination.

An entry gets its place in its lane at the flush: a lock on the ordering key, held to the transaction's end, then a position from
a sequence. So positions are in commit order, and a visible entry has every earlier one of its lane visible beside it. The lock
is between those who enqueue, and no dispatcher ever waits for it.

Whether an entry is the head of its lane is decided when it is claimed, not when it is enqueued (`dispatchers/lanes.py`): one
that is not gets the due time NEVER, and is *blocked*. Nothing leaves but through that decision, so whatever makes an entry due
too early costs one claim, and no order. It is safe because whoever claims an entry sees every earlier one. Only "send again",
by a person or on a look's proof of absence, puts an entry before others that may be under way, and it waits out every lease.

No lane stands still. Whoever blocks an entry has, in the same transaction, locked and touched the row of the head before it.
Whoever takes an entry out of its lane makes the next one due in the same transaction, by a later statement (`advance`).

- The head is taken out after the blocking: whoever does it sees the blocked entry. At REPEATABLE READ it might not; but then the
  touched row has changed since its snapshot, and it fails with a serialization error, to be tried again.
- The head is being taken out while someone wants to block: its row is locked, nothing is blocked, and the entry is looked at
  again a moment later.
- `advance` touches the row that it finds, blocked or not: that one answers for the others behind it from now on.
- The process dies in between: nothing of its transaction has happened, and the head's lease runs out.

Of the entries of one flush only the first of a lane is due. The others are blocked behind it from the start: all of them become
visible together. On SQLite all of this happens one after the other.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Connection,
    Text,
    any_,
    bindparam,
    case,
    func,
    literal,
    literal_column,
    select,
    text,
    true,
    update,
)
from sqlalchemy.exc import DBAPIError

from outbox.databases import DEADLOCK, clock, sqlstate
from outbox.instants import NEVER, Instant
from outbox.schema import Tables

DEADLOCK_NOTE = (
    "two transactions took the lanes of the same ordering keys in different order: run the transaction again, and enqueue the"
    " entries of several ordering keys before one flush, which takes them in one order for all"
)


class Place(NamedTuple):
    """Where an entry stands: the lane's ordering key, and its position there."""

    ordering_key: str
    position: int


def take_positions(connection: Connection, tables: Tables, ordering_keys: Sequence[str]) -> list[int]:
    """Ascending positions, one for each of the keys, once all their lanes are locked for this transaction. PostgreSQL only.

    A savepoint that is rolled back gives its locks back. Locked in the order of their numbers, so that flushes cannot wait for
    each other in a circle; transactions that flush twice can.
    """
    asked = {"lane": f"{tables.queue.fullname} ", "keys": list({*ordering_keys}), "count": len(ordering_keys)}
    try:
        return list(connection.execute(_TAKE_POSITIONS, asked | {"sequence": _sequence(connection, tables)}).scalars())
    except DBAPIError as error:
        if sqlstate(error.orig) == DEADLOCK:
            error.add_note(DEADLOCK_NOTE)
        raise


# The sum is there for the locks: no position is drawn before the last of them is held.
_TAKE_POSITIONS = text("""
    SELECT nextval(CAST(:sequence AS regclass)) FROM generate_series(1, :count), (
        SELECT count(pg_advisory_xact_lock(lock.number)::text) FROM (
            SELECT DISTINCT hashtextextended(CAST(:lane AS text) || k.ordering_key, 0) AS number
            FROM unnest(CAST(:keys AS text[])) AS k(ordering_key) ORDER BY number
        ) AS lock
    ) AS held
""")


def _sequence(connection: Connection, tables: Tables) -> str:
    name: str = connection.dialect.identifier_preparer.format_sequence(tables.position)
    return name


def next_position(tables: Tables, ordering_key: str) -> Any:
    """The position behind all others of the lane, for the only writer of a SQLite database."""
    queue = tables.queue.alias()
    last = select(func.max(queue.c.position)).where(queue.c.ordering_key == ordering_key).scalar_subquery()
    return func.coalesce(last, 0) + 1


def advance(connection: Connection, tables: Tables, left: Sequence[Place], *, cutoff: datetime = NEVER) -> None:
    """Make the next entry behind each of these places due, if it is blocked. To be called by whoever takes an entry out.

    It waits for whoever has that next entry's row locked: an app that is about to cancel it.
    cutoff: as of when it is due at the latest, so that a claim which looks no further finds it.
    """
    places = sorted(set(left))  # whoever waits for one of these rows waits in this order
    if not places:
        return
    if connection.dialect.name == "postgresql":
        lanes, positions = zip(*places, strict=True)
        connection.execute(_advancing_all(connection, tables, cutoff), {"lanes": [*lanes], "places": [*positions]})
    else:
        one = [{"lane": place.ordering_key, "place": place.position} for place in places]
        connection.execute(_advancing(connection, tables, cutoff), one)


def _advancing_all(connection: Connection, tables: Tables, cutoff: datetime) -> Any:
    """All of them in one statement. What its snapshot cannot show is no entry that waits for these heads: the transaction has
    taken them out by an earlier statement, so whoever blocked one behind them has committed, and nobody can any more.
    """
    queue = tables.queue
    left = func.unnest(bindparam("lanes", type_=ARRAY(Text)), bindparam("places", type_=ARRAY(BigInteger)))
    places = left.table_valued("lane", "place").render_derived()
    following = _following(tables, places.c.lane, places.c.place).lateral()
    ids = select(following.c.id).select_from(places.join(following, true())).scalar_subquery()
    advanced = update(queue).where(queue.c.id == any_(func.array(ids, type_=ARRAY(queue.c.id.type))))
    return advanced.values(due_at=unblocked(connection, tables, cutoff))


def _advancing(connection: Connection, tables: Tables, cutoff: datetime) -> Any:
    queue = tables.queue
    following = _following(tables, bindparam("lane"), bindparam("place")).scalar_subquery()
    return update(queue).where(queue.c.id == following).values(due_at=unblocked(connection, tables, cutoff))


def _following(tables: Tables, lane: Any, place: Any) -> Any:
    behind = tables.queue.alias("behind")
    waits = (behind.c.ordering_key == lane, behind.c.position > place, _waits(behind))
    return select(behind.c.id).where(*waits).order_by(behind.c.position).limit(literal_column("1")).with_for_update()


def unblocked(connection: Connection, tables: Tables, cutoff: datetime = NEVER) -> Any:
    """The due time of a row of the queue once it is not blocked: now, or when it was meant for; any other row's stays."""
    queue, entry = tables.queue, tables.entry
    # The transaction's start: this transaction's own claim, whose clock that is, then finds it.
    now: Any = clock() if connection.dialect.name == "sqlite" else func.now()
    if cutoff < NEVER:
        now = case((now > literal(cutoff, Instant), literal(cutoff, Instant)), else_=now)
    meant_for = select(entry.c.due_at).where(entry.c.id == queue.c.id).scalar_subquery()
    due_at = case((meant_for > now, meant_for), else_=now)
    return case((is_blocked(queue), due_at), else_=queue.c.due_at)


def is_blocked(queue: Any) -> Any:
    """Whether a row of the queue waits for the head of its lane: nothing else is never due without being held or uncertain."""
    return queue.c.position.is_not(None) & (queue.c.due_at == NEVER) & queue.c.hold.is_(None) & _waits(queue)


def _waits(queue: Any) -> Any:
    return (queue.c.state == "pending") | (queue.c.state == "retry")  # IN would not go with a list of parameters
