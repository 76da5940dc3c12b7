"""Decisions in bulk: the entries that a filter selects, counted first, then decided in short transactions.

`preview` reads the entries in one snapshot and asks the rules about each: its ids are those that the decision will change.
`decide` goes through these ids. It locks a batch of them, compares each with the filter and the rules again, and changes it; what
has changed meanwhile is left alone and counted. An entry that meets the filter only later is never changed.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial, reduce
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Engine, Select, func, select, union_all
from sqlalchemy.exc import DBAPIError

from dispatchers.admin.decide import again as asking
from dispatchers.admin.decide.audit import count_more, write_audit
from dispatchers.admin.decide.bulk_sentence import conditions, sentence
from dispatchers.admin.decide.decisions import check_decision, check_resolution
from dispatchers.admin.decide.effects import (
    Action,
    Unserved,
    cancel_rows,
    release_rows,
    resolve_rows,
    retry_rows,
    text_of,
)
from dispatchers.admin.decide.rules import Verdict, why_not_in_bulk
from dispatchers.admin.read.entry_filter import (
    ENDED_STATES,
    Filter,
    check_filter,
    entry_conditions,
    narrowed,
    require_plain,
    row_conditions,
)
from dispatchers.store.records.identity import is_suspended
from outbox.configuration import Configuration
from outbox.errors import ConfigurationError, InvalidValue
from outbox.sql.clock import database_now
from outbox.sql.deployment import require_current_secret
from outbox.sql.dialect import dialect_of
from outbox.sql.errors.driver import DEADLOCK, LOCK_NOT_AVAILABLE, SERIALIZATION_FAILURE, sqlstate
from outbox.sql.schema.tables import Tables

MAX_BATCH_ENTRIES = 100  # measured, on two busy cores: 0.1 s, in which dispatchers pass over what is locked
PAUSE_RATIO = 0.5  # after each batch, for those who send, in multiples of what the batch took
MAX_ROWS_READ = 1000  # at a time, by a preview
MAX_LOCK_MS = 500  # that a batch, or one entry alone, waits for another transaction

STATES: Mapping[Action, tuple[str, ...]] = {
    "retry": ("pending", "retry"),
    "cancel": ("pending", "retry"),
    "resolve": ("uncertain",),
    "release": ("pending", "retry", "uncertain"),
    "again": ("failed",),
}
"""The states of the filter, unless it names others."""

CONTENDED = (LOCK_NOT_AVAILABLE, DEADLOCK, SERIALIZATION_FAILURE)
LOCKED = "another transaction has locked it"
CHANGED = "it has changed, and no longer meets the filter"
DELETED = "it was deleted"
NEWS = "its history has grown since it was counted"


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkDecision:
    """What is decided about all of the entries, by whom, and why. verdict, result: of `resolve`. Raises `InvalidValue`.

    configuration: the app's, with the secret from which keys are derived; only `again` needs it.
    """

    action: Action
    actor: str
    reason: str
    verdict: Verdict | None = None
    result: Any = None
    configuration: Configuration | None = None

    def __post_init__(self) -> None:
        if (self.action == "resolve") != (self.verdict is not None):
            raise InvalidValue("verdict", self.verdict, "belongs to the action 'resolve', and to no other")
        check_decision(self.actor, self.reason)
        if self.verdict is not None:
            check_resolution(self.verdict, self.actor, self.reason, self.result)
        if self.action == "again" and self.configuration is None:
            raise ConfigurationError("asking again derives a new key: set the app's OUTBOX_SECRET and OUTBOX_ENV")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a decision would change. wanted: the filter, its spans as instants. ids: of the entries that would change.

    sentence: with the exact count. left_alone: of the other entries that meet the filter, how many for which reason.
    """

    at: datetime
    sentence: str
    wanted: Filter
    ids: Sequence[UUID]
    left_alone: Mapping[str, int]


class Progress(NamedTuple):
    """What is committed. done: how many entries were changed. skipped: how many were not, for which reason. total: both."""

    done: int
    skipped: Mapping[str, int]

    @property
    def total(self) -> int:
        return self.done + sum(self.skipped.values())

    def plus(self, further: "Progress") -> "Progress":
        return Progress(self.done + further.done, dict(Counter(self.skipped) + Counter(further.skipped)))


NOTHING_DONE = Progress(0, {})


def preview(
    connection: Connection,
    tables: Tables,
    wanted: Filter,
    decision: BulkDecision,
    *,
    among: Sequence[UUID] | None = None,
    seen_at: datetime | None = None,
) -> Preview:
    """Which entries the decision would change now. Writes nothing. Reads every entry that meets the filter.

    among: only of these. seen_at: when the operator read them; `resolve` leaves alone what has a later event.
    Raises `InvalidValue` for states that the decision is not about, and `ConfigurationError` for another secret than the
    database's.
    """
    check_filter(connection, tables, wanted)
    require_plain(connection, tables, wanted)
    if wanted.is_ended != (decision.action == "again"):
        others = f"are not those that `{decision.action}` is about, such as {', '.join(STATES[decision.action])}"
        raise InvalidValue("states", list(wanted.states), others)
    now = database_now(connection)
    wanted, rule = wanted.with_instants(now), _rule(connection, tables, decision, now, seen_at)
    matching = _matching(tables, wanted, now).execution_options(yield_per=MAX_ROWS_READ)
    if among is not None:
        matching = matching.where(wanted.rows(tables).c.id.in_(among))
    ids: list[UUID] = []
    left_alone: Counter[str] = Counter()
    for rows in connection.execute(matching).partitions():
        allowed, refused = _split(rows, rule)
        ids += [row.id for row in allowed]
        left_alone += refused
    text = sentence(decision.action, decision.verdict, wanted, len(ids))
    return Preview(at=now, sentence=text, wanted=wanted, ids=ids, left_alone=left_alone)


def decide(
    engine: Engine,
    tables: Tables,
    decision: BulkDecision,
    previewed: Preview,
    *,
    rate: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[Progress]:
    """Decide about the entries of a preview, a batch in each transaction. Yields after each commit; stop whenever you like.

    The audit log has one row of it, whose count grows with each batch. rate: so many entries per second at most.
    pause: waits so many seconds between two batches; if it returns something true, no further batch begins.
    Raises what the database raises; what was yielded before is committed.
    """
    engine = dialect_of(engine).at_own_level(engine)
    size = MAX_BATCH_ENTRIES if rate is None else max(1, min(MAX_BATCH_ENTRIES, round(rate)))
    batches = _Batches(engine, tables, decision, previewed)
    reached = NOTHING_DONE
    for first in range(0, len(previewed.ids), size):
        began = clock()
        reached = reached.plus(batches.decide(previewed.ids[first : first + size]))
        yield reached
        took = clock() - began
        seconds = max(PAUSE_RATIO * took, 0 if rate is None else size / rate - took)
        if first + size < len(previewed.ids) and pause(seconds):
            return


class _Batches:
    """Commits each batch together with the count in the audit log, which has one row for all of them."""

    def __init__(self, engine: Engine, tables: Tables, decision: BulkDecision, previewed: Preview) -> None:
        self._engine = engine
        self._tables = tables
        self._decision = decision
        self._previewed = previewed
        self._audit_id: int | None = None

    def decide(self, ids: Sequence[UUID]) -> Progress:
        """Decide in one transaction. If it waits too long for a lock, or loses a deadlock, each entry gets its own transaction.

        Entries that are still locked are skipped: the app may have locked the ordering group to which a new entry must go.
        """
        try:
            return self._commit(ids)
        except DBAPIError as error:
            if sqlstate(error.orig) not in CONTENDED:
                raise
        if len(ids) == 1:
            return Progress(0, {LOCKED: 1})
        return reduce(Progress.plus, (self.decide([id]) for id in ids), NOTHING_DONE)

    def _commit(self, ids: Sequence[UUID]) -> Progress:
        with self._engine.begin() as connection:
            if dialect_of(connection).has_limits:
                connection.execute(select(func.set_config("lock_timeout", str(MAX_LOCK_MS), True)))
            batch = decide_batch(connection, self._tables, self._decision, self._previewed, ids)
            audit_id = self._audited(connection, batch.done)
        self._audit_id = audit_id
        return batch

    def _audited(self, connection: Connection, done: int) -> int:
        decision = self._decision
        if self._audit_id is not None:
            count_more(connection, self._tables, self._audit_id, done)
            return self._audit_id
        verdict = "" if decision.verdict is None else f"{decision.verdict}: "
        return write_audit(
            connection,
            self._tables,
            actor=decision.actor,
            action=decision.action,
            kind="entries",
            target=f"entries {conditions(self._previewed.wanted)}",
            reason=f"{verdict}{decision.reason}",
            count=done,
        )


# --- one batch


def decide_batch(
    connection: Connection, tables: Tables, decision: BulkDecision, previewed: Preview, ids: Sequence[UUID]
) -> Progress:
    """Decide about these of the preview's entries, in the caller's transaction. The audit log is the caller's."""
    wanted, now = previewed.wanted, database_now(connection)
    id = wanted.rows(tables).c.id
    found = _matching(tables, wanted, now).where(id.in_(ids)).order_by(id)
    if not wanted.is_ended:
        found = found.with_for_update(of=tables.queue, skip_locked=True)
    rows = connection.execute(found).all()
    allowed, skipped = _split(rows, _rule(connection, tables, decision, now, previewed.at))
    missing = set(ids) - {row.id for row in rows}
    if missing:
        skipped += _why_missing(connection, tables, wanted, now, missing)
    return _change(connection, tables, decision, allowed).plus(Progress(0, skipped))


def _change(connection: Connection, tables: Tables, decision: BulkDecision, rows: Sequence[Any]) -> Progress:
    """Settlements are not locked: two operators may ask again for the same entries, and maintenance may delete them."""
    actor, reason = decision.actor, decision.reason
    if decision.configuration is not None and decision.action == "again":
        is_new, unopened = asking.ask_again(connection, decision.configuration, rows, actor, reason)
        done, deleted = sum(is_new.values()), len(rows) - len(is_new) - len(unopened)
        left = Counter({asking.ASKED_ALREADY: len(is_new) - done, DELETED: deleted})
        return Progress(done, left + Counter(map(str, unopened.values())))
    text = text_of(reason, decision.verdict)
    match decision.action:
        case _ if not rows:
            pass
        case "retry":
            retry_rows(connection, tables, rows, actor, text)
        case "cancel":
            cancel_rows(connection, tables, rows, actor, text, Unserved(connection, tables))
        case "release":
            release_rows(connection, tables, rows, actor, text)
        case _ if decision.verdict is not None:
            resolve_rows(connection, tables, rows, decision.verdict, actor, reason, decision.result)
    return Progress(len(rows), {})


def _why_missing(connection: Connection, tables: Tables, wanted: Filter, now: datetime, ids: set[UUID]) -> Counter[str]:
    """Why entries of the preview were not found again, or could not be locked."""
    matching = _matching(tables, wanted, now).where(wanted.rows(tables).c.id.in_(ids))
    still = set(connection.execute(matching).scalars())
    rows = (select(rows.c.id, rows.c.state).where(rows.c.id.in_(ids)) for rows in (tables.queue, tables.settlement))
    states = {row.id: row.state for row in connection.execute(union_all(*rows))}

    def why(id: UUID) -> str:
        if id in still:
            return LOCKED
        state = states.get(id)
        if state is None:
            return DELETED
        return f"it has ended as {state}" if state in ENDED_STATES else CHANGED

    return Counter(map(why, ids))


# --- which rows, and the rules about them


def _matching(tables: Tables, wanted: Filter, now: datetime) -> Select[Any]:
    """The rows of entries that meet the filter, with what the rules ask for; the id comes first."""
    if wanted.is_ended:
        of_all = row_conditions(tables.settlement, wanted, now) + entry_conditions(tables, wanted, now)
        ended: Select[Any] = asking.ended(tables).where(*of_all)
        return ended
    return narrowed(tables, wanted, now, select(tables.queue))


Rule: TypeAlias = Callable[[Sequence[Any]], Sequence[str | None]]
"""Gives for each of several rows why the decision must not change it; None where it may."""


def _split(rows: Sequence[Any], rule: Rule) -> tuple[list[Any], Counter[str]]:
    """The rows that the decision may change; of the others how many for which reason it may not."""
    whys = rule(rows)
    allowed = [row for row, why in zip(rows, whys, strict=True) if why is None]
    return allowed, Counter(why for why in whys if why is not None)


def _rule(
    connection: Connection, tables: Tables, decision: BulkDecision, now: datetime, seen_at: datetime | None
) -> Rule:
    if decision.configuration is not None and decision.action == "again":
        require_current_secret(connection, tables, decision.configuration.keyring)
        return partial(asking.why_not_all, connection, tables, decision.configuration.env)
    suspended = decision.action == "cancel" and is_suspended(connection, tables)

    def rule(rows: Sequence[Any]) -> list[str | None]:
        whys = [why_not_in_bulk(decision.action, row, now, decision.verdict, is_suspended=suspended) for row in rows]
        if decision.action != "resolve" or seen_at is None:
            return whys
        later = _with_later_events(connection, tables, [row.id for row in rows], seen_at)
        return [NEWS if why is None and row.id in later else why for row, why in zip(rows, whys, strict=True)]

    return rule


def _with_later_events(connection: Connection, tables: Tables, ids: Sequence[UUID], seen_at: datetime) -> set[UUID]:
    """The entries that were sent again or looked up since: they may be uncertain for another reason than the operator read."""
    event = tables.event
    later = select(event.c.entry_id).where(event.c.entry_id.in_(ids), event.c.at > seen_at)
    return set(connection.execute(later).scalars())
