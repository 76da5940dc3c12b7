"""Ordering groups: the entries of one ordering key are sent one at a time, in commit order, for all operations and destinations.

An entry gets its position in its group at the flush (`outbox.sql.positions`). Positions are in commit order: a transaction
that sees an entry also sees every earlier entry of its group.

The claim decides whether an entry is the head of its group (`dispatchers/store/queue/ordering.py`); the enqueue does not. An
entry that is not the head gets the due time NEVER, and is *blocked*. Every entry passes this decision, so an entry that becomes
due too early costs one claim, but is not sent out of order. This is safe because a claim sees every earlier entry. Only "send
again" (by an operator, or after a lookup's proof of absence) puts an entry before others that may be in flight, and it waits
until their leases have ended.

No group stops. A transaction that blocks an entry first locks and updates the row of the group's head. A transaction that
removes an entry from its group makes the next entry due, with a later statement (`advance`). The possible races:

- The head is removed after an entry was blocked. The removing transaction sees the blocked entry. At REPEATABLE READ it might
  not see it; but then the head's row has changed since its snapshot, so it fails with a serialization error, and is retried.
- The head is being removed while another transaction wants to block an entry. The head's row is locked, so that transaction
  blocks nothing, and checks its entry again a moment later.
- Another transaction has locked the next entry: an app that is about to cancel it, or a claim. A dispatcher does not wait for
  the lock. It removes the head a moment later, and its other settlements do not wait.
- `advance` updates the row that it finds, blocked or not. That entry is the head now, and makes the later ones due.
- The transaction that blocks and the one that removes the head are on two nodes of a Galera cluster. Both certify the group, so
  one of them is refused at its commit, and is retried.
- The process crashes. Its transaction is rolled back, and the head's lease expires.

Of the entries of one flush, only the first one of a group is due. The others are blocked from the start, because all of them
become visible together. SQLite runs these transactions one after another.
"""

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
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
    true,
    update,
)

from outbox.sql.clock import clock
from outbox.sql.dialect import Dialect, Writes, dialect_of
from outbox.sql.key_locks import certify
from outbox.sql.schema.column_types import Instant
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables
from outbox.sql.statements import own_row
from outbox.times import NEVER


class Place(NamedTuple):
    """The ordering key of an entry's group, and the entry's position in the group."""

    ordering_key: str
    position: int


def advance(connection: Connection, tables: Tables, left: Sequence[Place], *, cutoff: datetime = NEVER) -> None:
    """Make the next entry after each place due, if it is blocked. Each transaction that removes an entry from a group calls this.

    It waits for a transaction that has locked the next entry, such as an app that cancels it.
    cutoff: the entry's due time is at most this, so that a claim with this cutoff finds it.
    """
    places = sorted(set(left))  # all transactions lock these rows in this order
    if not places:
        return
    if dialect_of(connection).writes is Writes.ARRAYS:
        connection.execute(_advancing_all(dialect_of(connection), tables, cutoff < NEVER), _asked(places, cutoff))
    else:
        certify(connection, tables, {place.ordering_key for place in places})
        one = [{"group_key": place.ordering_key, "place": place.position} for place in places]
        one = [each | {"cutoff": cutoff} for each in one] if cutoff < NEVER else one
        connection.execute(_advancing(dialect_of(connection), tables, cutoff < NEVER), one)


def _asked(places: Sequence[Place], cutoff: datetime) -> dict[str, Any]:
    groups, positions = zip(*places, strict=True)
    return {"ordering_keys": [*groups], "places": [*positions]} | ({"cutoff": cutoff} if cutoff < NEVER else {})


# The statements are kept: to build one takes longer than to run it, and leaves thousands of objects that refer to each other,
# which stay until the garbage collector's next full run. has_cutoff: whether "cutoff" is a parameter.


@lru_cache(MAX_STATEMENTS)
def _advancing_all(dialect: Dialect, tables: Tables, has_cutoff: bool) -> Any:
    """One statement for all places. Its snapshot shows every entry that waits for these heads. An earlier statement of this
    transaction has removed the heads. So a transaction that blocked an entry after them has committed, and no other can block
    one now.
    """
    queue = tables.queue
    following, places = _all_following(tables, lock=True)
    ids = select(following.c.id).select_from(places.join(following, true())).scalar_subquery()
    advanced = update(queue).where(queue.c.id == any_(func.array(ids, type_=ARRAY(queue.c.id.type))))
    return advanced.values(due_at=_unblocked(dialect, tables, _cutoff(has_cutoff)))


def advance_unlocked(
    connection: Connection, tables: Tables, left: Sequence[Place], *, cutoff: datetime = NEVER
) -> list[Place]:
    """`advance` without waiting. Returns the places whose next entry another transaction has locked; none on SQLite.

    No transaction would make these entries due, so the caller must not commit the removal of the entries at these places.
    """
    places = sorted(set(left))
    if not places or dialect_of(connection).writes is not Writes.ARRAYS:
        advance(connection, tables, places, cutoff=cutoff)
        return []
    advancing = _advancing_unlocked(dialect_of(connection), tables, cutoff < NEVER)
    locked = connection.execute(advancing, _asked(places, cutoff))
    return [Place(row.ordering_key, row.place) for row in locked]


@lru_cache(MAX_STATEMENTS)
def _advancing_unlocked(dialect: Dialect, tables: Tables, has_cutoff: bool) -> Any:
    """Search for the next entries first, then lock them: a search with SKIP LOCKED would find the entry after a locked one."""
    queue, row = tables.queue, tables.queue.alias("locked_row")
    following, places = _all_following(tables)
    found = (
        select(places.c.ordering_key, places.c.place, following.c.id)
        .select_from(places.join(following, true()))
        .cte("found")
    )
    of_found = row.c.id == any_(func.array(select(found.c.id).scalar_subquery(), type_=ARRAY(row.c.id.type)))
    locked = select(row.c.id).where(of_found).with_for_update(skip_locked=True).cte("locked")
    of_locked = queue.c.id == any_(func.array(select(locked.c.id).scalar_subquery(), type_=ARRAY(queue.c.id.type)))
    due = {"due_at": _unblocked(dialect, tables, _cutoff(has_cutoff))}
    advanced = update(queue).where(of_locked).values(due).returning(queue.c.id).cte("advanced")
    others = found.c.id.not_in(select(locked.c.id))
    return select(found.c.ordering_key, found.c.place).where(others).add_cte(advanced)


@lru_cache(MAX_STATEMENTS)
def _advancing(dialect: Dialect, tables: Tables, has_cutoff: bool) -> Any:
    queue = tables.queue
    following = own_row(_following(tables, bindparam("group_key"), bindparam("place")))
    due_at = _unblocked(dialect, tables, _cutoff(has_cutoff))
    return update(queue).where(queue.c.id == following).values(due_at=due_at)


def _cutoff(is_given: bool) -> Any:
    return bindparam("cutoff", type_=Instant) if is_given else None


def _all_following(tables: Tables, *, lock: bool = False) -> tuple[Any, Any]:
    left = func.unnest(bindparam("ordering_keys", type_=ARRAY(Text)), bindparam("places", type_=ARRAY(BigInteger)))
    places = left.table_valued("ordering_key", "place").render_derived()
    following = _following(tables, places.c.ordering_key, places.c.place)
    return (following.with_for_update() if lock else following).lateral(), places


def _following(tables: Tables, group: Any, place: Any) -> Any:
    behind = tables.queue.alias("behind")
    waits = (behind.c.ordering_key == group, behind.c.position > place, _waits(behind))
    return select(behind.c.id).where(*waits).order_by(behind.c.position).limit(literal_column("1"))


def unblocked(connection: Connection, tables: Tables, cutoff: datetime = NEVER) -> Any:
    """The new due time of a queue row that is blocked: now, or its own later time. Other rows keep their due time."""
    return _unblocked(dialect_of(connection), tables, literal(cutoff, Instant) if cutoff < NEVER else None)


def _unblocked(dialect: Dialect, tables: Tables, cutoff: Any) -> Any:
    queue, entry = tables.queue, tables.entry
    # The start of the transaction, because a claim in this transaction uses this time, and must find the row.
    start = dialect.transaction_start()
    now: Any = clock() if start is None else start
    if cutoff is not None:
        now = case((now > cutoff, cutoff), else_=now)
    meant_for = select(entry.c.due_at).where(entry.c.id == queue.c.id).scalar_subquery()
    due_at = case((meant_for > now, meant_for), else_=now)
    return case((is_blocked(queue), due_at), else_=queue.c.due_at)


def is_blocked(queue: Any) -> Any:
    """Whether a queue row is blocked: no other row has the due time NEVER without being suspended or uncertain."""
    return (
        queue.c.position.is_not(None) & (queue.c.due_at == NEVER) & queue.c.suspended_reason.is_(None) & _waits(queue)
    )


def _waits(queue: Any) -> Any:
    return (queue.c.state == "pending") | (queue.c.state == "retry")  # IN would need an expanding parameter
