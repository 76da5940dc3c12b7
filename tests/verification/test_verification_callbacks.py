"""`outbox verify` is silent about an outcome that waits for its callback, and about how the entry then ends."""

from collections.abc import Callable
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.callbacks import Shop
from support.database import TABLES, Database
from support.entries import HOUR, age, claim_one, put_one, queue_row, run_once, settle, settlement_row
from support.lookups import keyless, sent_and_looked_up
from support.verify import Harm, require_only_harms_to_break, setting, taking

import outbox
from dispatchers import Delivered, Operations, Outcome, Rejected, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.callbacks import Settlement
from dispatchers.decide import release
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import Settle

History = Callable[[Database, outbox.Outbox], UUID]


def callback_failed(outcome: Outcome, kind: str = "on_settled") -> History:
    """Its end is on record, and its callback is due again."""

    def history(database: Database, ob: outbox.Outbox) -> UUID:
        shop = Shop(database, ob, is_async=False)
        shop.on(kind, "crm.upsert", broken)
        id = put_one(database, ob)
        shop.run_once(adapters={"crm": MemoryAdapter([outcome])})
        assert "callback raised" in queue_row(database, id).outcome
        return id

    return history


def found_and_called_back_at_last(database: Database, ob: outbox.Outbox) -> UUID:
    shop = Shop(database, ob, is_async=False)
    shop.on_settled(broken)
    id = sent_and_looked_up(database, ob, keyless("answer"), include=[shop.effects])
    age(database, HOUR)
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}, include=[mended("on_settled")]) == 1
    assert settlement_row(database, id).reason == "found at the service"
    return id


def broken(session: sa.orm.Session, settlement: Settlement) -> None:
    raise ArithmeticError


def mended(kind: str) -> Operations:
    """The app's next deploy, whose callback of this kind raises nothing."""
    effects = Operations()
    getattr(effects, kind)("crm.upsert")(lambda session, settlement: None)
    return effects


def called_back_at_last(outcome: Outcome, kind: str = "on_settled") -> History:
    def history(database: Database, ob: outbox.Outbox) -> UUID:
        id = callback_failed(outcome, kind)(database, ob)
        age(database, HOUR)
        assert run_once(database, ob, adapters={"crm": MemoryAdapter()}, include=[mended(kind)]) == 1
        return id

    return history


def handed_over(outcome: Outcome, kind: str = "on_settled") -> History:
    """Only the newer deploy of the app has the callback, and the older one has sent it."""

    def history(database: Database, ob: outbox.Outbox) -> UUID:
        run_once(database, ob, adapters={"crm": MemoryAdapter()}, include=[mended(kind)])
        id = put_one(database, ob)
        run_once(database, ob, adapters={"crm": MemoryAdapter([outcome])})
        assert "waits for a process" in queue_row(database, id).outcome
        return id

    return history


def handed_over_and_ended(outcome: Outcome, kind: str = "on_settled") -> History:
    def history(database: Database, ob: outbox.Outbox) -> UUID:
        id = handed_over(outcome, kind)(database, ob)
        run_once(database, ob, adapters={"crm": MemoryAdapter()}, include=[mended(kind)])
        assert queue_row(database, id) is None or queue_row(database, id).state == "uncertain"
        return id

    return history


def found_and_handed_over(database: Database, ob: outbox.Outbox) -> UUID:
    run_once(database, ob, adapters={"crm": MemoryAdapter()}, include=[mended("on_settled")])
    id = sent_and_looked_up(database, ob, keyless("answer"))
    assert "waits for a process" in queue_row(database, id).outcome
    return id


def found_handed_over_and_ended(database: Database, ob: outbox.Outbox) -> UUID:
    id = found_and_handed_over(database, ob)
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}, include=[mended("on_settled")]) == 1
    assert [row.kind for row in database.rows(TABLES.event)][-1] == "lookup"
    return id


def released_before_its_callback(database: Database, ob: outbox.Outbox) -> UUID:
    id = put_one(database, ob)
    store = DatabaseStore(database.engine, ob.configuration)
    settle(store, (claim_one(store), release(Settle("delivered", 1), "its callback has not run yet")))
    return id


HISTORIES: list[tuple[History, list[tuple[Harm, str, str]]]] = [
    (callback_failed(Delivered()), [
        (taking(TABLES.event), "stored outcome", "has the stored outcome delivered, but its history"),
    ]),
    (callback_failed(Rejected("declined")), []),
    (callback_failed(Unknown("no answer", final=True), "on_uncertain"), []),
    (called_back_at_last(Delivered()), []),
    (called_back_at_last(Rejected("declined")), []),
    (called_back_at_last(Unknown("no answer", final=True), "on_uncertain"), []),
    (found_and_called_back_at_last, []),
    (handed_over(Delivered()), [
        (setting(TABLES.queue, maybe_sent=False), "stored outcome", "has the stored outcome delivered, but maybe_sent is false"),
    ]),
    (handed_over(Rejected("declined, but only today")), []),
    (handed_over(Unknown("no answer", final=True), "on_uncertain"), []),
    (handed_over_and_ended(Delivered()), []),
    (handed_over_and_ended(Rejected("declined, but only today")), []),
    (handed_over_and_ended(Unknown("no answer", final=True), "on_uncertain"), []),
    (found_and_handed_over, []),
    (found_handed_over_and_ended, []),
    (released_before_its_callback, []),
]  # fmt: skip


@pytest.mark.parametrize(("history", "harms"), HISTORIES)
def test_a_callback_that_is_due_breaks_no_rule_until_a_hand_changes_it(
    database: Database, ob: outbox.Outbox, history: History, harms: list[tuple[Harm, str, str]]
) -> None:
    require_only_harms_to_break(database, history(database, ob), harms)
