"""One process settles two claims of one entry in one batch: it lost its lease, and claimed the entry again."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from support.database import Database
from support.entries import HOUR, age, claim, claim_one, put, queue_row, settlement_row, state
from support.ordering import put_in_group
from support.verify import broken_rules

import outbox
from dispatchers.pipeline.activity_log import ActivityLog
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import ClaimedEntry, Ending, Lease, MarkUncertain, Release, Retry, Settle, Transition
from outbox.times import NEVER

pytestmark = [pytest.mark.on_mariadb, pytest.mark.in_portable_mode]

Late = Callable[[ClaimedEntry], Transition]

OUTCOMES: dict[str, Late] = {
    "delivered": lambda entry: Settle("delivered", entry.attempts + 1),
    "failed": lambda entry: Settle("failed", entry.attempts + 1, reason="declined"),
    "retry": lambda entry: Retry(
        timedelta(0), "slow", entry.attempts + 1, True, entry.in_doubt_since or entry.leased_at
    ),
    "release": lambda entry: Release("not now"),
    "uncertain": lambda entry: MarkUncertain("500", entry.attempts + 1, True, entry.in_doubt_since or entry.leased_at),
}


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("second", OUTCOMES)
@pytest.mark.parametrize("first", OUTCOMES)
def test_one_batch_does_what_two_exchanges_do(
    sqlite: Database, ob: outbox.Outbox, first: str, second: str, is_turned: bool
) -> None:
    """For each pair of outcomes, in each order of their arrival."""
    store = DatabaseStore(sqlite.engine, ob.configuration)

    def ends(group: str, settle_both: Callable[[list[Ending]], set[Lease]]) -> tuple[Any, ...]:
        head, following = put_in_group(sqlite, ob, f"{group} 1", f"{group} 2", group=group)
        lost = claim_one(store, only=frozenset({head, following}))
        age(sqlite, HOUR)
        again = claim_one(store, only=frozenset({head, following}))
        outcomes = [(lost, OUTCOMES[first](lost)), (again, OUTCOMES[second](again))]
        settled = settle_both(outcomes[::-1] if is_turned else outcomes)
        is_parked = queue_row(sqlite, following).due_at == NEVER
        return [lease in settled for lease in (lost.lease, again.lease)], state(sqlite, head), is_parked

    def settle_in_two(outcomes: list[Ending]) -> set[Lease]:
        return {lease for each in outcomes for lease in asyncio.run(store.exchange([each], None)).settled}

    together = ends("together", lambda outcomes: asyncio.run(store.exchange(outcomes, None)).settled)

    assert together == ends("apart", settle_in_two)
    assert "becomes due" not in broken_rules(sqlite)


def test_each_database_advances_the_group_after_a_late_proof(database: Database, ob: outbox.Outbox) -> None:
    store = DatabaseStore(database.engine, ob.configuration)
    head, following = put_in_group(database, ob, "first", "second")
    lost = claim_one(store)
    age(database, HOUR)
    again = claim_one(store)

    exchange = asyncio.run(
        store.exchange([(lost, OUTCOMES["delivered"](lost)), (again, OUTCOMES["retry"](again))], None)
    )

    assert exchange.settled == {lost.lease}
    assert settlement_row(database, head).state == "delivered"
    assert claim_one(store).id == following
    assert broken_rules(database) == {}


def test_a_lost_lease_is_one_line_for_the_whole_batch(
    sqlite: Database, ob: outbox.Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    put(sqlite, ob, count=30)
    store = DatabaseStore(sqlite.engine, ob.configuration)
    lost = claim(store)
    age(sqlite, HOUR)
    claim(store)
    settlements = [(entry, Settle("failed", 1, reason="declined")) for entry in lost[:20]]
    settlements += [(entry, OUTCOMES["retry"](entry)) for entry in lost[20:]]
    exchange = asyncio.run(store.exchange(settlements, None))

    ActivityLog(None, None).note_exchange(settlements, exchange)

    (line,) = caplog.messages
    assert line.startswith("30 outcomes were not stored (Settle 20, Retry 10): their leases were lost.")
