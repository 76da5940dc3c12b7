"""Which entries a filter selects: exactly those whose reason has the text, letter for letter, on every database."""

from datetime import timedelta

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database
from support.entries import change, put, put_one, run_once

import outbox
from dispatchers import Deferred, Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.read.entry_filter import ENDED_STATES, Filter, check_filter, select_ids
from outbox.errors import InvalidValue
from outbox.sql.clock import database_now
from outbox.times import NEVER

REASON = 'M\u00fcller: 50% "now" a_b c\\d\n\U0001f600'
PARTS = ("M\u00fcller", "50%", '"now"', "a_b", "c\\d", "\n", "\U0001f600")
OTHERS = ("m\u00fcller", "NOW", "00fc", "fc", "d83d", "50%a", "axb", "c.d", "\\n", "(?i)now", "***:now", "n$")


def matching(database: Database, wanted: Filter) -> int:
    with database.engine.connect() as connection:
        check_filter(connection, TABLES, wanted)
        return len(connection.execute(select_ids(TABLES, wanted, database_now(connection))).all())


@pytest.mark.every_value
@pytest.mark.parametrize("kind", ["waiting", "suspended", "failed"])
def test_a_part_of_a_reason_is_found_letter_for_letter(database: Database, ob: outbox.Outbox, kind: str) -> None:
    id = put_one(database, ob)
    if kind == "suspended":
        change(database, id, suspended_reason=REASON, due_at=NEVER)
    else:
        outcome = Deferred(REASON, after=timedelta(hours=1)) if kind == "waiting" else Rejected(REASON)
        run_once(database, ob, adapters={"crm": MemoryAdapter([outcome])})
    states = {"states": ENDED_STATES} if kind == "failed" else {}

    found = {part: matching(database, Filter(reason=part, **states)) for part in (*PARTS, *OTHERS)}

    assert found == dict.fromkeys(PARTS, 1) | dict.fromkeys(OTHERS, 0)


@pytest.mark.parametrize("part", ["", "x" * 1001, "a\0", "\udcff"])
def test_a_part_that_no_reason_has_is_refused(database: Database, part: str) -> None:
    with pytest.raises(InvalidValue, match="reason"):
        matching(database, Filter(reason=part))


def test_no_ended_entry_is_suspended(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=2)
    database.execute(sa.update(TABLES.queue).values(suspended_reason="a clone", due_at=NEVER))

    assert matching(database, Filter(suspended=True)) == 2
    with pytest.raises(InvalidValue, match="what has ended is not suspended"):
        matching(database, Filter(suspended=True, states=("failed",)))
