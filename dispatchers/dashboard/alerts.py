"""What needs an operator now, as every page shows it: the line on top, and the badges of the navigation."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from dispatchers.admin.read.counts import Count
from dispatchers.admin.read.incidents import Incidents, read_incidents
from dispatchers.dashboard.units import duration_text, limited_text
from outbox.sql.schema.tables import Tables

FRESH_SECONDS = 3.0
"""Pages within this time share one reading."""


class Alert(NamedTuple):
    """One part of the line. path: the page with the details, where the operator decides."""

    text: str
    path: str
    is_error: bool = False


class RecentIncidents:
    """The incidents of a database, at most `FRESH_SECONDS` old, or of the last decision."""

    def __init__(self) -> None:
        self._found: Incidents | None = None
        self._until = 0.0

    def read(self, connection: Connection, tables: Tables) -> Incidents | None:
        """None if they cannot be read: the page itself is shown all the same."""
        if time.monotonic() >= self._until:
            try:
                self._found = read_incidents(connection, tables)
            except SQLAlchemyError:
                self._found = None
            self._until = time.monotonic() + FRESH_SECONDS
        return self._found

    def forget(self) -> None:
        """A decision has changed them."""
        self._until = 0.0


def shown(found: Incidents | None) -> dict[str, Any]:
    """What every page gets."""
    return {} if found is None else {"alerts": list(alerts_of(found)), "badges": badges_of(found)}


def alerts_of(found: Incidents) -> Iterator[Alert]:
    if found.suspended_reason is not None:
        yield Alert(f"Nothing is sent: {found.suspended_reason}", "/overview", is_error=True)
    if found.undispatched_seconds is not None:
        waits = duration_text(found.undispatched_seconds)
        yield Alert(f"no live dispatcher, entries due for {waits}", "/dispatchers", is_error=True)
    for count, one, many, path in (
        (found.uncertain, "uncertain", "uncertain", "/"),
        (found.broken, "breaker open", "breakers open", "/destinations"),
        (found.paused, "destination paused", "destinations paused", "/destinations"),
        (found.blocked_groups, "group blocked", "groups blocked", "/groups"),
        (found.late_schedules, "schedule late", "schedules late", "/schedules"),
    ):
        if count.value:
            yield Alert(f"{limited_text(count)} {one if count.value == 1 else many}", path)


def badges_of(found: Incidents) -> dict[str, str]:
    """The text beside each page's name in the navigation, by the name of its view; empty for nothing."""
    throttled = Count(
        value=found.broken.value + found.paused.value, is_exact=found.broken.is_exact and found.paused.is_exact
    )
    counts = {
        "uncertain": found.uncertain,
        "destinations": throttled,
        "groups": found.blocked_groups,
        "schedules": found.late_schedules,
        "proposals": found.proposals,
    }
    texts = {name: limited_text(count) if count.value else "" for name, count in counts.items()}
    return texts | {"dispatchers": "" if found.undispatched_seconds is None else "0"}
