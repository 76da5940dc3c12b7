"""`outbox status` reads a limited number of entries of each destination, and says where it did not count all."""

import pytest
from support.cli_runner import document, put_uncertain, succeeded
from support.database import Database
from support.entries import change, put

import outbox
from dispatchers.admin.read import overview

MOST = 10


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "MAX_COUNTED_ROWS", MOST)


def test_status_counts_a_long_queue_up_to_a_limit(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=30)
    uncertain = put_uncertain(database, ob)
    change(database, uncertain, destination="crm")

    found = document("status", database=database)

    (crm,) = found["destinations"]
    assert (crm["is_whole"], crm["counted"], crm["states"]) == (False, MOST, {"pending": MOST - 1, "uncertain": 1})
    assert (found["is_whole"], found["uncertain"]) == (False, 1)
    shown = " ".join(succeeded("status", database=database, COLUMNS="200").split())
    assert "only the 10 due last are counted" in shown


def test_status_counts_all_uncertain_entries_of_a_long_queue(database: Database, ob: outbox.Outbox) -> None:
    for _ in range(MOST + 2):
        put_uncertain(database, ob)

    found = document("status", database=database)

    assert (found["is_whole"], found["uncertain"]) == (False, MOST + 2)
