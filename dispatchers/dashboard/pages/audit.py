"""The audit log: each decision of an operator, with who and why."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from dispatchers.admin.decide.audit import AuditFilter, AuditPage, read_audit
from dispatchers.admin.decide.proposed import find_proposals
from dispatchers.admin.read.plain_values import Place
from dispatchers.dashboard.parameters import parameter
from dispatchers.dashboard.views import Reading, View

ROWS_DEFAULT = 50
MAX_ROWS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    """Which rows, and from where."""

    actor: str | None = parameter("Only decisions of this operator.", None)
    action: str | None = parameter("Only this kind of decision, for example resolve.", None)
    target: str | None = parameter("Only about this entry, destination or ordering key.", None)
    since: timedelta | datetime | None = parameter("Only since then: 15m, 2h, 7d or an instant.", None)
    after: Place[int] | None = parameter("The position where the previous page ended.", None)
    limit: int = parameter("How many rows at most.", ROWS_DEFAULT, minimum=1, maximum=MAX_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedAuditPage(AuditPage):
    """proposals: those that rows are about, by the row's id."""

    proposals: dict[int, UUID]


def read(reading: Reading, query: AuditQuery) -> LinkedAuditPage:
    """List the decisions of operators, the newest first."""
    wanted = AuditFilter(actor=query.actor, action=query.action, target=query.target, since=query.since)
    page = read_audit(reading.connection, reading.tables, wanted, max_rows=query.limit, after=query.after)
    found = find_proposals(reading.connection, reading.tables, page.rows)
    return LinkedAuditPage(at=page.at, rows=page.rows, next=page.next, proposals=found)


VIEW = View("audit", read, title="Audit log", is_live=False)
