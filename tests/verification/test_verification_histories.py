"""`outbox verify` on whole histories: silent about each that the library wrote, until a hand has changed it."""

from collections.abc import Callable
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from support.cli_runner import succeeded
from support.database import TABLES, Client, Database
from support.entries import (
    HOUR,
    NO_LEASE,
    age,
    change,
    claim_one,
    put_one,
    queue_row,
    run_once,
    settle,
    settlement_row,
)
from support.lookups import decide_on, keyless, look_up, sent_and_looked_up
from support.ordering import OrderedService, put_in_group, send_all
from support.verify import Harm, require_only_harms_to_break, setting, taking

import outbox
from dispatchers import CannotTell, Deferred, Delivered, Outcome, Rejected, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide.decisions import cancel, resolve
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import Settle
from outbox.times import NEVER

History = Callable[[Database, outbox.Outbox], UUID]
"""Writes one as the library does; returns the entry that it is about."""


def answered(database: Database, ob: outbox.Outbox, *outcomes: Outcome) -> UUID:
    id, adapter = put_one(database, ob), MemoryAdapter(outcomes)
    for _ in outcomes:
        run_once(database, ob, adapters={"crm": adapter})
        age(database, HOUR)
    return id


def waiting(database: Database, ob: outbox.Outbox) -> UUID:
    return put_one(database, ob)


def delivered(database: Database, ob: outbox.Outbox) -> UUID:
    return answered(database, ob, Delivered({"id": "ch_1"}))


def delivered_at_last(database: Database, ob: outbox.Outbox) -> UUID:
    return answered(database, ob, Deferred("busy"), Unknown("no answer"), Delivered())


def failed(database: Database, ob: outbox.Outbox) -> UUID:
    return answered(database, ob, Deferred("busy"), Rejected("declined", result={"code": "declined"}))


def failed_conclusively(database: Database, ob: outbox.Outbox) -> UUID:
    return answered(database, ob, Unknown("no answer"), Rejected("declined", conclusive=True))


def in_doubt(database: Database, ob: outbox.Outbox) -> UUID:
    return answered(database, ob, Unknown("no answer"))


def uncertain(database: Database, ob: outbox.Outbox) -> UUID:
    return answered(database, ob, Unknown("no answer", final=True))


def decided(verdict: str) -> History:
    def history(database: Database, ob: outbox.Outbox) -> UUID:
        id = uncertain(database, ob)
        decide_on(database, id, resolve, verdict)
        return id

    return history


def carried_out(verdict: str) -> History:
    def history(database: Database, ob: outbox.Outbox) -> UUID:
        id = decided(verdict)(database, ob)
        run_once(database, ob, adapters={"crm": MemoryAdapter()})
        return id

    return history


def decided_twice(database: Database, ob: outbox.Outbox) -> UUID:
    """For one and the same reason: the last one counts."""
    id = decided("happened")(database, ob)
    decide_on(database, id, resolve, "did_not_happen")
    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    return id


def sent_again_and_delivered(database: Database, ob: outbox.Outbox) -> UUID:
    id = carried_out("send_again")(database, ob)
    age(database, HOUR)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    assert settlement_row(database, id).key_epoch == 1
    return id


def proved_late_though_decided(database: Database, ob: outbox.Outbox) -> UUID:
    """An operator decided that it did not happen; before that was carried out, an earlier sender came and proved that it did."""
    id, store = put_one(database, ob), DatabaseStore(database.engine, ob.configuration)
    claimed = claim_one(store)
    age(database, HOUR)
    run_once(database, ob, adapters={"crm": MemoryAdapter([Unknown("no answer", final=True)])})
    decide_on(database, id, resolve, "did_not_happen")
    settle(store, (claimed, Settle("delivered", claimed.attempts + 1)))
    return id


def cancelled_by_the_app(database: Database, ob: outbox.Outbox) -> UUID:
    id = answered(database, ob, Deferred("busy"))
    with database.begin() as session:
        assert ob.cancel(session, id)
    return id


def cancelled_by_an_operator(database: Database, ob: outbox.Outbox) -> UUID:
    id = put_one(database, ob)
    decide_on(database, id, cancel)
    run_once(database, ob, adapters={"crm": MemoryAdapter()})
    return id


def found(database: Database, ob: outbox.Outbox) -> UUID:
    return sent_and_looked_up(database, ob, keyless("answer"))


def not_found(database: Database, ob: outbox.Outbox) -> UUID:
    """Sent once, proved absent, and so without doubt."""
    id = sent_and_looked_up(database, ob, keyless("request", Deferred("busy")))
    run_once(database, ob, adapters={"crm": MemoryAdapter([Deferred("busy")], window=None)})
    row = queue_row(database, id)
    assert (row.attempts, row.maybe_sent) == (1, False)
    return id


def not_found_and_cancelled(database: Database, ob: outbox.Outbox) -> UUID:
    id = not_found(database, ob)
    with database.begin() as session:
        assert ob.cancel(session, id)
    return id


def looked_up_without_result(database: Database, ob: outbox.Outbox) -> UUID:
    adapter = keyless("answer", finds=[CannotTell("it is down"), CannotTell("it is down")])
    id = sent_and_looked_up(database, ob, adapter)
    look_up(database, ob, adapter, HOUR)
    return id


def blocking_its_group(database: Database, ob: outbox.Outbox) -> UUID:
    """Two wait for it."""
    ids = put_in_group(database, ob, "one", "two", "three", "four")
    send_all(database, ob, OrderedService(two=Rejected("declined")))
    return ids[1]


def heading_its_group(database: Database, ob: outbox.Outbox) -> UUID:
    """One waits for it, or will as soon as a dispatcher claims."""
    first, _ = put_in_group(database, ob, "one", "two")
    run_once(database, ob, adapters={"crm": OrderedService(one=Deferred("busy", after=HOUR))})
    return first


def of_a_group_that_was_released(database: Database, ob: outbox.Outbox) -> UUID:
    id = blocking_its_group(database, ob)
    succeeded("release", "--ordering-key", "ada", "--reason", "declined", "--actor", "ada", database=database)
    send_all(database, ob, OrderedService())
    return id


def of_a_request(database: Database, ob: outbox.Outbox) -> UUID:
    Client(database, ob, is_async=False).request()
    (entry,) = database.entries
    id: UUID = entry.id
    return id


def at_a_fair_destination(database: Database, ob: outbox.Outbox) -> UUID:
    fair = outbox.Outbox(ob.configuration.keyring, env="test", fair={"crm"})
    return put_one(database, fair, parent=outbox.ParentKey("order:fair", scope="acct_1"))


def delivered_as_a_lost_commit_said(database: Database, ob: outbox.Outbox) -> UUID:
    """The database was set back to before its claim, and resumed; then the sender of old proves that it happened."""
    id, store = put_one(database, ob), DatabaseStore(database.engine, ob.configuration)
    claimed = claim_one(store)
    change(database, id, state="pending", deliveries=0, first_leased_at=None, **NO_LEASE)
    given = ("--after-restore", "--reason", "the disk was lost", "--actor", "ada", "--since", "1h")
    succeeded("resume", *given, database=database, OUTBOX_ENV="test")
    settle(store, (claimed, Settle("delivered", claimed.attempts + 1)))
    row = settlement_row(database, id)
    assert (row.state, row.deliveries, row.attempts) == ("delivered", 0, 1)
    return id


# --- what a hand may change


ENDED, QUEUE = TABLES.settlement, TABLES.queue


def forget_doubt(connection: sa.Connection, id: UUID) -> None:
    setting(QUEUE, maybe_sent=False, in_doubt_since=None, state="retry")(connection, id)


def for_all(statement: sa.Executable) -> Harm:
    return lambda connection, id: connection.execute(statement)


def delivered_and_blocking(connection: sa.Connection, id: UUID) -> None:
    setting(ENDED, state="delivered", reason=None, attempts=1)(connection, id)


def as_decided(state: str) -> str:
    return f'{{"reason": "-", "known": {{"state": "{state}", "reason": "looked there"}}}}'


HISTORIES: list[tuple[History, list[tuple[Harm, str, str]]]] = [
    (waiting, [
        (setting(QUEUE, destination="mail"), "as enqueued", "was enqueued for destination crm, but waits for mail"),
        (setting(TABLES.entry, destination="mail"), "as enqueued", "was enqueued for destination mail, but waits for crm"),
        (setting(QUEUE, due_at=NEVER), "becomes due", "never becomes due, but it is neither suspended nor blocked"),
        (setting(QUEUE, outcome=as_decided("delivered")), "stored outcome", "has the stored outcome delivered, but its history"),
        (setting(QUEUE, outcome="not JSON"), "stored outcome", "has a stored outcome that cannot be read"),
    ]),
    (delivered, [
        (setting(ENDED, state="failed"), "final state", "is failed, but its history does not contain"),
        (setting(ENDED, state="failed", reason="declined"), "final state", "is failed, but its history does not contain"),
        (setting(ENDED, reason="found at the service"), "final state", "is delivered, but its history does not contain"),
        (setting(ENDED, attempts=0), "final state", "is delivered, but has no attempt"),
        (setting(ENDED, state="cancelled"), "cancelled", "is cancelled, but has 1 attempts"),
        (setting(ENDED, state="cancelled", attempts=0), "cancelled", "is cancelled, but has the answer of a service"),
    ]),
    (delivered_at_last, [
        (setting(ENDED, deliveries=1, attempts=1), "attempt count", "has delivery 2 in its history, but was claimed only 1"),
    ]),
    (failed, [
        (setting(ENDED, state="delivered"), "final state", "is delivered, but its history does not contain"),
        (setting(ENDED, state="cancelled"), "final state", "is cancelled, but its history does not contain"),
        (for_all(TABLES.event.update().values(entry_id=uuid4())), "no orphans", "has a history, but its row in the table"),
        (setting(ENDED, reason="refunded"), "final state", "is failed, but its history does not contain"),
        (taking(TABLES.event), "final state", "is failed, but its history does not contain"),
    ]),
    (failed_conclusively, []),
    (in_doubt, [
        (forget_doubt, "in doubt", "has 1 attempts, but maybe_sent is false"),
        (setting(QUEUE, deliveries=0, attempts=0), "attempt count", "has delivery 1 in its history, but was claimed only 0"),
    ]),
    (uncertain, [
        (setting(QUEUE, maybe_sent=False, in_doubt_since=None), "in doubt", "is uncertain, but maybe_sent is false"),
        (setting(QUEUE, state="pending"), "in doubt", "is pending and may have been sent, but its history"),
    ]),
    (decided("happened"), [
        (setting(QUEUE, outcome=as_decided("failed")), "stored outcome", "has the stored outcome failed, but its history"),
        (setting(QUEUE, outcome=as_decided("cancelled")), "stored outcome", "has the stored outcome cancelled, but its history"),
    ]),
    (decided("send_again"), []),
    (carried_out("happened"), [
        (setting(ENDED, state="failed"), "final state", "is failed, but its history does not contain"),
    ]),
    (carried_out("did_not_happen"), [
        (setting(ENDED, state="delivered"), "final state", "is delivered, but its history does not contain"),
    ]),
    (carried_out("send_again"), []),
    (decided_twice, [
        (setting(ENDED, state="delivered"), "final state", "is delivered, but its history does not contain"),
    ]),
    (sent_again_and_delivered, []),
    (proved_late_though_decided, []),
    (cancelled_by_the_app, [
        (setting(ENDED, state="delivered"), "final state", "is delivered, but has no attempt"),
        (setting(ENDED, state="failed"), "final state", "is failed, but its history does not contain"),
    ]),
    (cancelled_by_an_operator, [
        (setting(ENDED, state="delivered"), "final state", "is delivered, but its history does not contain"),
    ]),
    (found, [
        (setting(ENDED, state="failed"), "final state", "is failed, but its history does not contain"),
    ]),
    (not_found, []),
    (not_found_and_cancelled, [
        (for_all(TABLES.event.update().values(kind="attempt")), "cancelled", "is cancelled, but has 1 attempts"),
    ]),
    (looked_up_without_result, []),
    (blocking_its_group, [
        (delivered_and_blocking, "blocked group", "blocks ordering group ada, but is delivered"),
        (for_all(TABLES.blocked_group.update().values(ordering_key="bob")), "blocked group", "blocks ordering group bob, but"),
    ]),
    (heading_its_group, [
        (setting(QUEUE, ordering_key="bob"), "as enqueued", "was enqueued in ordering group ada, but waits in"),
        (setting(QUEUE, ordering_key=None, position=None), "as enqueued", "was enqueued in ordering group ada, but"),
        (setting(QUEUE, position=None), "unique position", "has an ordering key without a position"),
        (for_all(QUEUE.update().values(position=7)), "unique position", "has the same position in its ordering group as entry "),
        (for_all(QUEUE.update().values(due_at=NEVER)), "becomes due", "is blocked, but it is the first entry"),
    ]),
    (of_a_group_that_was_released, []),
    (of_a_request, [
        (for_all(TABLES.record.delete()), "request record", "is in the queue, but the record of its request was deleted: "),
    ]),
    (at_a_fair_destination, [
        (setting(QUEUE, scope="acct_2"), "as enqueued", "waits in the fair share of another scope"),
        (setting(QUEUE, fair="mail"), "as enqueued", "waits in the fair share of another scope"),
        (setting(QUEUE, scope=None), "as enqueued", "waits in the fair share of another scope"),
    ]),
    (delivered_as_a_lost_commit_said, []),
]  # fmt: skip
"""Each with what a hand may change in it, the rule that is then broken, and how the violation begins."""


@pytest.mark.parametrize(("history", "harms"), HISTORIES)
def test_a_history_breaks_no_rule_until_a_hand_changes_it(
    database: Database, ob: outbox.Outbox, history: History, harms: list[tuple[Harm, str, str]]
) -> None:
    require_only_harms_to_break(database, history(database, ob), harms)
