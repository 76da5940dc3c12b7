"""The first page: the entries that may have happened, as a work list with the evidence and the safe decisions of each."""

from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from dispatchers.admin.decide.cases import Case, read_cases
from dispatchers.admin.read.counts import Count, count_uncertain
from dispatchers.admin.read.destinations import NotSent, read_not_sent
from dispatchers.admin.read.entries import list_entries
from dispatchers.admin.read.entry_filter import Filter
from dispatchers.admin.read.plain_values import Place
from dispatchers.dashboard.access import Role
from dispatchers.dashboard.parameters import parameter
from dispatchers.dashboard.views import Reading, View

ENTRIES_DEFAULT = 25
MAX_ENTRIES = 100
MAX_ROWS = 20_000
"""How many rows are compared with a filter for one page: some 100 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertainQuery:
    """Which uncertain entries, and from where."""

    operation: str | None = parameter("Only this operation and those below it.", None)
    destination: str | None = parameter("Only this destination.", None)
    after: Place[UUID] | None = parameter("The position where the previous page ended.", None)
    limit: int = parameter("How many entries at most.", ENTRIES_DEFAULT, minimum=1, maximum=MAX_ENTRIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertainPage:
    """at: the database's clock. uncertain: how many there are, without the filter. not_sent: what keeps entries from
    being sent now.
    next: `after` of the next page; None at the end.

    A filtered page may be short, or empty, and not the last.
    """

    at: datetime
    uncertain: Count
    not_sent: NotSent
    cases: list[Case]
    next: Place[UUID] | None


def read(reading: Reading, query: UncertainQuery) -> UncertainPage:
    """List the uncertain entries, each with its evidence and the decisions that are safe now."""
    connection, tables = reading.connection, reading.tables
    wanted = Filter(states=("uncertain",), operation=query.operation, destination=query.destination)
    page = list_entries(connection, tables, wanted, max_entries=query.limit, after=query.after, max_rows=MAX_ROWS)
    cases = read_cases(connection, tables, [entry.id for entry in page.entries], page.at)
    if not reading.identity.may(Role.OPERATOR):
        cases = [replace(case, offers=None) for case in cases]
    return UncertainPage(
        at=page.at,
        uncertain=count_uncertain(connection, tables),
        not_sent=read_not_sent(connection, tables),
        cases=cases,
        next=page.next,
    )


VIEW = View("uncertain", read, path="/", decides=True)
