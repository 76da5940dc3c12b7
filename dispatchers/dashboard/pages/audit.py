"""The audit log: each decision of an operator, with who and why."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from dispatchers.admin.decide.audit import AuditFilter, AuditRow, read_audit
from dispatchers.admin.read.plain_values import parse_place, place_text
from dispatchers.dashboard.failures import Failure
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
    after: str | None = parameter("The position where the previous page ended.", None)
    limit: int = parameter("How many rows at most.", ROWS_DEFAULT, minimum=1, maximum=MAX_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLogPage:
    """at: the database's clock. next: `after` of the next page; None at the end."""

    at: datetime
    rows: list[AuditRow]
    next: str | None


def read(reading: Reading, query: AuditQuery) -> AuditLogPage:
    """List the decisions of operators, the newest first."""
    wanted = AuditFilter(actor=query.actor, action=query.action, target=query.target, since=query.since)
    after = None if query.after is None else _place(query.after)
    page = read_audit(reading.connection, reading.tables, wanted, max_rows=query.limit, after=after)
    return AuditLogPage(at=page.at, rows=list(page.rows), next=None if page.next is None else place_text(page.next))


def _place(text: str) -> tuple[datetime, int]:
    try:
        return parse_place(text, int)
    except ValueError as error:
        raise Failure(422, "invalid", f"after: {error}", "after") from None


VIEW = View("audit", read, title="Audit log", is_live=False)
