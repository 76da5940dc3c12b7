"""The pages of an outbox with more destinations than anyone reads."""

import sqlalchemy as sa
from support.dashboard import Browser, dashboard
from support.database import TABLES, Database
from support.entries import put_one

import outbox
from dispatchers.admin.read.destinations import MAX_SHOWN
from outbox.sql.clock import clock


def test_a_page_lists_the_destinations_that_need_most(database: Database, ob: outbox.Outbox) -> None:
    put_one(database, ob, "zz.send")
    names = [f"tenant-{number:04}" for number in range(MAX_SHOWN + 50)]
    values = {"changed_at": clock(), "breaker": "closed", "breaker_failures": 0}
    for name in [*names, "zy"]:
        database.execute(sa.insert(TABLES.destination).values(name=name, paused=name == "zy", **values))

    with dashboard(database) as app:
        browser = Browser(app)
        pages = [browser.text("/destinations"), browser.text("/overview")]
        listed = browser.api("/destinations").json()

    shown = [each["name"] for each in listed["destinations"]]
    assert (len(shown), shown[-2:]) == (MAX_SHOWN, ["zy", "zz"])
    assert listed["destinations_in_all"] == MAX_SHOWN + 52
    for page in pages:
        assert f"{MAX_SHOWN} of {MAX_SHOWN + 52} destinations" in page
