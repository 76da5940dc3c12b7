"""Groups: entries of one ordering key go out one at a time, in commit order, whatever their operation or destination.

An entry gets its place in its group at the flush (`outbox.sql.positions`): positions are in commit order, and a visible entry has
every earlier one of its group visible beside it.

Whether an entry is the head of its group is decided when it is claimed, not when it is enqueued
(`dispatchers/store/ordering.py`): one that is not gets the due time NEVER, and is *blocked*. Nothing leaves but through that
decision, so whatever makes an entry due too early costs one claim, and no order. It is safe because the claim of an entry sees
every earlier one. Only "send again", by an operator or on a lookup's proof of absence, puts an entry before others that may be
in flight, and it waits out every lease.

No group stops. A transaction that blocks an entry has locked and touched the row of the head before it. A transaction that
takes an entry out of its group makes the next one due, by a later statement (`advance`).

- The head is taken out after the blocking: that transaction sees the blocked entry. At REPEATABLE READ it might not; but then the
  touched row has changed since its snapshot, and it fails with a serialization error, to be tried again.
- The head is being taken out while someone wants to block: its row is locked, nothing is blocked, and the entry is checked
  again a moment later.
- The next one's row is locked by another transaction: an app that is about to cancel it, or a claim. A dispatcher does not wait
  for it. It does not take the head out now, but a moment later; nothing else that it has to settle waits for that.
- `advance` touches the row that it finds, blocked or not: that one answers for the others after it from now on.
- The process dies in between: nothing of its transaction has happened, and the head's lease runs out.

Of the entries of one flush only the first of a group is due. The others are blocked after it from the start: all of them become
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
    true,
    update,
)

from outbox.sql.dialect import clock
from outbox.sql.schema import Tables
from outbox.times import NEVER, Instant


class Place(NamedTuple):
    """An entry's place: its group's ordering key, and its position there."""

    ordering_key: str
    position: int


def advance(connection: Connection, tables: Tables, left: Sequence[Place], *, cutoff: datetime = NEVER) -> None:
    """Make the next entry after each of these places due, if it is blocked. Called by each transaction that takes an entry out.

    It waits for a transaction that has the next entry's row locked: an app that is cancelling it.
    cutoff: as of when it is due at the latest, so that a claim with this cutoff finds it.
    """
    places = sorted(set(left))  # all transactions lock these rows in this order
    if not places:
        return
    if connection.dialect.name == "postgresql":
        groups, positions = zip(*places, strict=True)
        connection.execute(
            _advancing_all(connection, tables, cutoff), {"ordering_keys": [*groups], "places": [*positions]}
        )
    else:
        one = [{"group_key": place.ordering_key, "place": place.position} for place in places]
        connection.execute(_advancing(connection, tables, cutoff), one)


def _advancing_all(connection: Connection, tables: Tables, cutoff: datetime) -> Any:
    """All of them in one statement. What its snapshot cannot show is no entry that waits for these heads: the transaction has
    taken them out by an earlier statement, so a transaction that blocked an entry after them has committed, and none can do so
    now.
    """
    queue = tables.queue
    following, places = _all_following(tables, lock=True)
    ids = select(following.c.id).select_from(places.join(following, true())).scalar_subquery()
    advanced = update(queue).where(queue.c.id == any_(func.array(ids, type_=ARRAY(queue.c.id.type))))
    return advanced.values(due_at=unblocked(connection, tables, cutoff))


def advance_unlocked(
    connection: Connection, tables: Tables, left: Sequence[Place], *, cutoff: datetime = NEVER
) -> list[Place]:
    """As `advance`, but without waiting: returns the places whose next entry another transaction has locked.

    No transaction would make that entry due, so what was taken out at these places must not be committed. On SQLite there is
    none.
    """
    places = sorted(set(left))
    if not places or connection.dialect.name != "postgresql":
        advance(connection, tables, places, cutoff=cutoff)
        return []
    groups, positions = zip(*places, strict=True)
    asked = {"ordering_keys": [*groups], "places": [*positions]}
    locked = connection.execute(_advancing_unlocked(connection, tables, cutoff), asked)
    return [Place(row.ordering_key, row.place) for row in locked]


def _advancing_unlocked(connection: Connection, tables: Tables, cutoff: datetime) -> Any:
    """The next entries are found first and locked then: passing over a locked one while looking would find the one after it."""
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
    due = {"due_at": unblocked(connection, tables, cutoff)}
    advanced = update(queue).where(of_locked).values(due).returning(queue.c.id).cte("advanced")
    others = found.c.id.not_in(select(locked.c.id))
    return select(found.c.ordering_key, found.c.place).where(others).add_cte(advanced)


def _advancing(connection: Connection, tables: Tables, cutoff: datetime) -> Any:
    queue = tables.queue
    following = _following(tables, bindparam("group_key"), bindparam("place")).scalar_subquery()
    return update(queue).where(queue.c.id == following).values(due_at=unblocked(connection, tables, cutoff))


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
    """Whether a row of the queue waits for the head of its group: only these are never due without being suspended or
    uncertain."""
    return (
        queue.c.position.is_not(None) & (queue.c.due_at == NEVER) & queue.c.suspended_reason.is_(None) & _waits(queue)
    )


def _waits(queue: Any) -> Any:
    return (queue.c.state == "pending") | (queue.c.state == "retry")  # IN would not go with a list of parameters
