"""The dispatchers: the live ones, those that died within the hour, and where their settings differ."""

from dataclasses import dataclass
from datetime import datetime

from dispatchers.admin.read.dispatchers import Difference, differences
from dispatchers.dashboard.parameters import Nothing
from dispatchers.dashboard.views import Reading, View
from dispatchers.store.records.heartbeats import DispatcherSeen, read_dispatchers
from outbox.sql.clock import database_now


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchersPage:
    """at: the database's clock. differences: settings that live dispatchers of the same operations have differently."""

    at: datetime
    dispatchers: list[DispatcherSeen]
    differences: list[Difference]


def read(reading: Reading, query: Nothing) -> DispatchersPage:
    """List the dispatchers that run, and those that died within the hour."""
    now = database_now(reading.connection)
    found = read_dispatchers(reading.connection, reading.tables, now)
    return DispatchersPage(at=now, dispatchers=found, differences=differences(found))


VIEW = View("dispatchers", read)
