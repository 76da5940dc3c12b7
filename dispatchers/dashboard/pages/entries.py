"""The list of entries, with filters in its address."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal
from uuid import UUID

from dispatchers.admin.read.counts import Count, planned_rows
from dispatchers.admin.read.entries import EntrySummary, list_entries
from dispatchers.admin.read.entry_filter import ENDED_STATES, WAITING_STATES, Filter, ParentWanted, select_ids
from dispatchers.admin.read.payload_filter import Member
from dispatchers.admin.read.plain_values import Place
from dispatchers.dashboard.access import Identity, Role
from dispatchers.dashboard.failures import Failure
from dispatchers.dashboard.parameters import parameter
from dispatchers.dashboard.views import Reading, View

ENTRIES_DEFAULT = 50
MAX_ENTRIES = 500
MAX_ROWS = 20_000
"""How many rows are compared with a filter for one page: some 100 ms."""
ENDED_SINCE = timedelta(days=1)  # by default: without a bound one page may sort every entry that ever ended

State = Literal["pending", "sending", "retry", "uncertain", "delivered", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesWanted:
    """Which entries."""

    state: tuple[State, ...] = parameter("Only these states; by default every unfinished one.", ())
    operation: str | None = parameter("Only this operation and those below it.", None)
    destination: str | None = parameter("Only this destination.", None)
    parent: str | None = parameter("Only under this parent key, for example an Idempotency-Key.", None)
    parent_prefix: str | None = parameter("Only parent keys that begin with this.", None)
    payload: tuple[str, ...] = parameter(
        "Only if the payload has this member with this value: campaign=spring. For a payload reader.", ()
    )
    scope: str | None = parameter("Only parent keys of this scope.", None)
    source: str | None = parameter("Only parent keys of this source: app, http, inbox:...", None)
    env: str | None = parameter("Only this deployment's.", None)
    ordering_key: str | None = parameter("Only of this ordering group.", None)
    reason_contains: str | None = parameter(
        "Only if the reason why it failed, waits, is uncertain or suspended contains this, letter for letter.", None
    )
    suspended: bool = parameter("Only suspended entries.", False)
    since: timedelta | datetime | None = parameter(
        "Only what was due, or ended, since then: 15m, 2h, 7d or an instant. By default 1d for ended entries.", None
    )
    enqueued_since: timedelta | datetime | None = parameter("Only what was enqueued since then.", None)
    enqueued_before: timedelta | datetime | None = parameter("Only what was enqueued before then: 2h for older.", None)

    def filter(self, states: Sequence[str]) -> Filter:
        """What these parameters select. states: those without a parameter."""
        named = (self.parent, self.env, self.scope, self.source)
        return Filter(
            states=self.state or states,
            operation=self.operation,
            destination=self.destination,
            parent=ParentWanted(*named) if any(named) else None,
            parent_prefix=self.parent_prefix,
            payload=tuple(Member.parse(text) for text in self.payload),
            ordering_key=self.ordering_key,
            reason=self.reason_contains,
            suspended=self.suspended,
            since=self.since,
            enqueued_since=self.enqueued_since,
            enqueued_before=self.enqueued_before,
        )


READ_BY: Mapping[str, Role] = {"payload": Role.PAYLOAD_READER}
"""Filters that compare what only this role may read: the number of entries that they select shows it, letter by letter."""


def require_readable(identity: Identity, wanted: EntriesWanted) -> None:
    """Raise `Failure` for a filter on what the identity may not read."""
    for name, role in READ_BY.items():
        if getattr(wanted, name) and not identity.may(role):
            raise Failure(403, "role", f"{name}: only a {role} may select entries by what was sent", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesQuery(EntriesWanted):
    """Which entries, and from where."""

    after: Place[UUID] | None = parameter("The position where the previous page ended.", None)
    limit: int = parameter("How many entries at most.", ENTRIES_DEFAULT, minimum=1, maximum=MAX_ENTRIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesPage:
    """at: the database's clock. since: the bound in force. next: `after` of the next page; None at the end.

    matching: how many entries the filter selects, by the planner's estimate unless all are on this page.

    A filtered page may be short, or empty, and not the last.
    """

    at: datetime
    since: datetime | None
    matching: Count
    entries: list[EntrySummary]
    next: Place[UUID] | None


def read(reading: Reading, query: EntriesQuery) -> EntriesPage:
    """List entries by state, operation, destination or parent."""
    require_readable(reading.identity, query)
    ended = [state for state in query.state if state in ENDED_STATES]
    if ended and (len(ended) < len(query.state) or query.suspended):
        raise Failure(
            422,
            "mixed_states",
            f"one list has either unfinished or finished entries: list {', '.join(ended)} separately, and not with `suspended`",
            "state",
        )
    since = ENDED_SINCE if ended and query.since is None and query.parent is None else query.since
    wanted = replace(query.filter(WAITING_STATES), since=since)
    page = list_entries(
        reading.connection, reading.tables, wanted, max_entries=query.limit, after=query.after, max_rows=MAX_ROWS
    )
    if page.next is None and query.after is None:
        matching = Count(value=len(page.entries), is_exact=True)
    else:
        planned = planned_rows(reading.connection, select_ids(reading.tables, wanted, page.at))
        matching = Count(value=max(planned, len(page.entries)), is_exact=False)
    return EntriesPage(at=page.at, since=page.since, matching=matching, entries=page.entries, next=page.next)


VIEW = View("entries", read)
