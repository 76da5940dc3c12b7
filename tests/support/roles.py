"""What a role of the database must be able to do, on each kind of database that has roles."""

from collections.abc import Callable

import pytest

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.entries import list_entries, read_entry
from dispatchers.admin.entry_filter import Filter
from dispatchers.admin.overview import read_overview
from outbox.errors import InvalidValue
from support.database import TABLES, Database
from support.entries import put, run_once

As = Callable[[str], Database]
"""The database as one of the roles: `as_role("app")`."""

KINDS = ("app", "dispatcher", "maintenance", "dashboard", "operator")


def the_dashboard_shows_entries_without_their_contents(as_role: As, ob: outbox.Outbox) -> None:
    sent, waiting = put(as_role("app"), ob), put(as_role("app"), ob, "mail.send")
    run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter()})

    with as_role("dashboard").engine.connect() as connection:
        overview = read_overview(connection, TABLES)
        listed = list_entries(connection, TABLES, Filter(), entries_max=10)
        shown = read_entry(connection, TABLES, sent[0])
        with pytest.raises(InvalidValue, match="may not read why entries wait"):
            list_entries(connection, TABLES, Filter(reason="slow"), entries_max=10)

    assert overview.destinations[0].states == {"pending": 1}
    assert overview.unserved is None  # unknown, and not none
    assert [(entry.id, entry.child_key) for entry in listed.entries] == [(waiting[0], None)]
    assert (shown.state, shown.child_key, shown.payload_bytes, shown.result) == ("delivered", None, None, None)
