"""Two last entries that settle at the same time, and processes that are killed around a completion: one response."""

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session
from support.accepted import Checkout
from support.daemons import FileService, daemon, wait_for, write_factory
from support.database import CHARGE, Database, Order
from support.entries import HOUR, age, claim, quota, states

import outbox
from dispatchers import Settlement
from dispatchers.adapters import MemoryAdapter
from dispatchers.callbacks import CallbackFailed, Calls, Completed
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import ClaimedEntry, Settle
from outbox.sql.errors.driver import is_passing


def settle_both_at_once(stores: list[DatabaseStore], claimed: list[ClaimedEntry], calls: Calls) -> list[Any]:
    """Each by a store of its own, on a thread of its own; returns what each has answered or raised."""

    def settle(store: DatabaseStore, entry: ClaimedEntry) -> bool | Exception:
        try:
            return asyncio.run(store.settle_with(entry, Settle("delivered", 1), calls))
        except Exception as error:
            return error

    answers: list[Any] = [None, None]

    def work(number: int) -> None:
        answers[number] = settle(stores[number], claimed[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


@pytest.fixture
def checkout(database: Database, ob: outbox.Outbox) -> Checkout:
    return Checkout(database, ob)


def settle_two_last_entries(
    checkout: Checkout, **engine: Any
) -> tuple[list[DatabaseStore], list[ClaimedEntry], list[Any]]:
    """Both at once: neither has committed when the other's callback runs, and each still sees the other's entry as open.

    Returns the stores, what each has claimed, and what each has answered or raised.
    """
    both = threading.Barrier(2)
    checkout.on_completed()
    checkout.accept(CHARGE, "mail.receipt")
    database, configuration = checkout.database, checkout.ob.configuration
    claimed = claim(DatabaseStore(database.engine, configuration), quota("stripe"), quota("mail"), completions=True)
    stores = [
        DatabaseStore(database.new_engine(**engine) if engine else database.engine, configuration) for _ in range(2)
    ]

    def both_have_settled(session: Session, settlement: Settlement) -> None:
        both.wait(60)

    calls = Calls(both_have_settled, checkout.effects.callbacks["on_completed", "checkout"])
    return stores, claimed, settle_both_at_once(stores, claimed, calls)


def test_of_two_last_entries_that_settle_at_once_one_completes_the_request(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    checkout = Checkout(postgresql, ob)

    _, _, answers = settle_two_last_entries(checkout)

    assert answers == [True, True]
    assert (checkout.record.state, len(checkout.seen), checkout.customers) == ("succeeded", 1, ["retry-001"])


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_under_a_stricter_isolation_one_of_the_two_must_try_again(
    postgresql: Database, ob: outbox.Outbox, isolation: Any
) -> None:
    checkout = Checkout(postgresql, ob)

    stores, claimed, answers = settle_two_last_entries(checkout, isolation_level=isolation)

    (refused,) = (number for number, answer in enumerate(answers) if answer is not True)
    assert not isinstance(answers[refused], CallbackFailed)
    assert is_passing(answers[refused]), "the dispatcher tries it again"
    assert (checkout.record.state, checkout.seen) == ("accepted", [])
    calls = Calls(None, checkout.effects.callbacks["on_completed", "checkout"])
    assert asyncio.run(stores[refused].settle_with(claimed[refused], Settle("delivered", 1), calls))
    assert (checkout.record.state, len(checkout.seen)) == ("succeeded", 1)


def test_a_completion_is_done_once_by_two_that_find_it_at_once(postgresql: Database, ob: outbox.Outbox) -> None:
    checkout = Checkout(postgresql, ob)
    inside, other_is_waiting = threading.Event(), threading.Event()

    def complete(session: Session, completed: Completed) -> None:
        inside.set()
        assert other_is_waiting.wait(60)
        session.add(Order(customer="ada", amount=1))
        completed.respond(201)

    checkout.accept()
    checkout.cancel(CHARGE)
    stores = [DatabaseStore(postgresql.engine, ob.configuration) for _ in range(2)]
    answers: list[bool] = []

    def work(store: DatabaseStore) -> None:
        answers.append(asyncio.run(store.complete(checkout.record.id, complete)))

    first, second = (threading.Thread(target=work, args=(store,)) for store in stores)
    first.start()
    assert inside.wait(60)
    second.start()
    wait_for(lambda: waiting_for_a_lock(postgresql), "the second to wait for the record")
    other_is_waiting.set()
    first.join(60)
    second.join(60)

    assert sorted(answers) == [False, True]
    assert checkout.customers == ["ada"]


def waiting_for_a_lock(database: Database) -> int:
    with database.engine.connect() as connection:
        found: int = connection.exec_driver_sql(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).scalar_one()
    return found


def test_a_cancel_while_another_entry_settles_leaves_it_to_the_next_round(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    checkout = Checkout(postgresql, ob)
    checkout.on_completed()
    checkout.accept(CHARGE, "mail.receipt")
    (mail,) = (entry for entry in postgresql.entries if entry.operation == "mail.receipt")

    with postgresql.begin() as session:
        assert ob.cancel(session, mail.id)
        assert checkout.run_once(target=postgresql.new_engine(), adapters={"stripe": MemoryAdapter()}) == 1
        assert checkout.record.state == "accepted", "it cannot see the cancelling"

    assert checkout.run_once() == 0
    assert checkout.accept().json() == {CHARGE: "delivered", "mail.receipt": "cancelled"}


def test_a_completion_that_hangs_does_not_keep_the_process(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    checkout = Checkout(postgresql, ob)
    checkout.accept()
    checkout.cancel(CHARGE)
    write_factory(tmp_path, HANGING)

    with daemon(tmp_path, postgresql.url) as process:
        wait_for((tmp_path / "entered").exists, "the completion", workers=[process])
        process.terminate()
        assert process.wait(60) == 0, process.output

    assert checkout.record.state == "accepted"


HANGING = """
from support.daemons import FileService

effects = Operations()

@effects.on_completed("checkout")
def complete(session, completed):
    (here / "entered").touch()
    time.sleep(600)

def make():
    return Dispatcher(url, outbox=ob, include=[effects], adapters={"stripe": FileService(here)})
"""


# --- killed

COMPLETING = """
from support.daemons import FileService, OverStore, die_at
from dispatchers.store.database import DatabaseStore
from support.database import CHARGE, Order

moment = os.environ["MOMENT"]
effects = Operations()

@effects.on_settled(CHARGE)
def charged(session, settlement):
    session.add(Order(customer="callback", amount=1))

@effects.on_completed("checkout")
def complete(session, completed):
    die_at(moment, here="as the completion begins")
    session.add(Order(customer="completion", amount=2))
    completed.respond(201, [entry.state for entry in completed.entries])
    session.flush()
    die_at(moment, here="before its commit")

class DyingStore(DatabaseStore):
    async def settle_with(self, entry, end, calls):
        settled = await super().settle_with(entry, end, calls)
        die_at(moment, here="after its commit")
        return settled

    async def complete(self, record_id, function):
        done = await super().complete(record_id, function)
        die_at(moment, here="after its commit")
        return done

def make():
    return OverStore(
        DyingStore(url, ob.configuration), outbox=ob, include=[effects], poll=timedelta(seconds=0.02),
        adapters={"stripe": FileService(here)},
    )
"""

KILLS = ["as the completion begins", "before its commit", "after its commit"]


@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_around_the_completion_leaves_all_of_it_or_nothing(
    checkout: Checkout, tmp_path: Path, moment: str
) -> None:
    checkout.accept()
    write_factory(tmp_path, COMPLETING)
    service = FileService(tmp_path)
    committed = moment == "after its commit"

    with daemon(tmp_path, checkout.database.url, MOMENT=moment) as process:
        assert process.wait() == -signal.SIGKILL, process.output
    assert checkout.record.state == ("succeeded" if committed else "accepted")
    assert states(checkout.database) == ({"delivered": 1} if committed else {"sending": 1})
    assert len(checkout.customers) == (2 if committed else 0)
    assert checkout.accept().status == (201 if committed else 202)
    age(checkout.database, HOUR)
    with daemon(tmp_path, checkout.database.url, MOMENT="") as process:
        wait_for(lambda: checkout.record.state == "succeeded", "the response", workers=[process])

    assert checkout.accept().json() == ["delivered"]
    assert sorted(checkout.customers) == ["callback", "completion"]
    assert len(service.effects) == 1


@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_in_a_completion_without_settling_leaves_it_to_the_next(
    checkout: Checkout, tmp_path: Path, moment: str
) -> None:
    checkout.accept()
    checkout.cancel(CHARGE)
    write_factory(tmp_path, COMPLETING)

    with daemon(tmp_path, checkout.database.url, MOMENT=moment) as process:
        assert process.wait() == -signal.SIGKILL, process.output
    assert checkout.record.state == ("succeeded" if moment == "after its commit" else "accepted")
    with daemon(tmp_path, checkout.database.url, MOMENT="") as process:
        wait_for(lambda: checkout.record.state == "succeeded", "the response", workers=[process])

    assert checkout.accept().json() == ["cancelled"]
    assert checkout.customers == ["completion"]
