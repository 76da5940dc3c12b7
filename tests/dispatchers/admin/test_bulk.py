"""Decisions in bulk: the sentence, the count and the effect agree, whatever happens meanwhile and other operators decide."""

import threading
from collections import Counter
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT
from support.database import TABLES, Database, statements_of
from support.entries import age, change, put, put_one, run_once, states

import outbox
from dispatchers import Deferred, Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import bulk, decisions
from dispatchers.admin.decide.again import again
from dispatchers.admin.decide.bulk import (
    CHANGED,
    DELETED,
    LOCKED,
    MAX_BATCH_ENTRIES,
    NEWS,
    BulkDecision,
    Preview,
    Progress,
    decide,
    preview,
)
from dispatchers.admin.read.entry_filter import Filter
from dispatchers.stored_outcome import StoredOutcome, read_outcome, write_outcome
from outbox.configuration import Configuration
from outbox.errors import ConfigurationError, InvalidValue
from outbox.keys import Keyring
from outbox.sql.clock import clock, later
from outbox.times import NEVER

HOUR = timedelta(hours=1)
WHO: dict[str, Any] = {"actor": "ada", "reason": "the service is back"}
CANCEL = BulkDecision(action="cancel", **WHO)
RETRY = BulkDecision(action="retry", **WHO)
GONE = BulkDecision(action="resolve", verdict="did_not_happen", **WHO)
WAITING = Filter(states=("pending", "retry"))
UNCERTAIN = Filter(states=("uncertain",))


def previewed(database: Database, wanted: Filter, decision: BulkDecision) -> Preview:
    with database.engine.connect() as connection:
        return preview(connection, TABLES, wanted, decision)


def decided(database: Database, decision: BulkDecision, found: Preview, **settings: Any) -> Progress:
    steps = list(decide(database.engine, TABLES, decision, found, **{"pause": lambda seconds: None, **settings}))
    return steps[-1] if steps else Progress(0, {})


def decide_all(database: Database, wanted: Filter, decision: BulkDecision) -> Progress:
    return decided(database, decision, previewed(database, wanted, decision))


def decision_events(database: Database) -> Counter[UUID]:
    return Counter(row.entry_id for row in database.rows(TABLES.event) if row.kind == "decision")


def audit_rows(database: Database) -> list[tuple[str, str, str, int]]:
    return [(row.action, row.kind, row.target, row.count) for row in database.rows(TABLES.audit)]


def put_uncertain(database: Database, ob: outbox.Outbox, count: int) -> list[UUID]:
    ids = put(database, ob, count=count)
    lost = {"state": "uncertain", "maybe_sent": True, "due_at": NEVER, "deliveries": 1, "attempts": 1}
    database.execute(sa.update(TABLES.queue).values(**lost, in_doubt_since=clock(), leased_at=None))
    return ids


# --- what is selected, and what is left alone


def test_the_preview_counts_what_the_rules_allow_and_names_the_rest(database: Database, ob: outbox.Outbox) -> None:
    waiting, suspended, decided_before, other = put(database, ob, count=4)
    put_one(database, ob, "mail.send")
    change(database, suspended, suspended_reason="a clone")
    with database.engine.begin() as connection:
        decisions.cancel(connection, TABLES, decided_before, actor="bob", reason="asked")

    found = previewed(database, Filter(states=("pending", "retry"), destination="crm"), CANCEL)

    assert found.sentence == "cancel 2 entries that are pending or retry, for destination 'crm'"
    assert set(found.ids) == {waiting, other}
    assert found.left_alone == {
        "it is suspended (a clone): `release` it first": 1,
        "an operator has decided that it is cancelled; a running dispatcher carries that out": 1,
    }


def test_each_entry_is_decided_once_and_the_audit_log_counts_them(database: Database, ob: outbox.Outbox) -> None:
    ids = put(database, ob, count=7)

    done = decide_all(database, Filter(states=("pending",)), CANCEL)

    assert done == Progress(7, {})
    assert decision_events(database) == Counter(ids)
    assert audit_rows(database) == [("cancel", "entries", "entries that are pending", 7)]
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 7
    assert states(database) == {"cancelled": 7}


def test_many_batches_are_one_row_of_the_audit_log(database: Database, ob: outbox.Outbox) -> None:
    count = 2 * MAX_BATCH_ENTRIES + 1
    put(database, ob, count=count)
    found = previewed(database, WAITING, CANCEL)
    slept: list[float] = []

    steps = list(decide(database.engine, TABLES, CANCEL, found, rate=50.0, pause=slept.append, clock=lambda: 0.0))

    assert [step.done for step in steps] == [50, 100, 150, 200, 201]
    assert slept == [1.0] * 4
    assert [row[3] for row in audit_rows(database)] == [count]


@pytest.mark.parametrize("verdict", ["happened", "did_not_happen", "send_again"])
def test_uncertain_entries_are_resolved_as_one_is(database: Database, ob: outbox.Outbox, verdict: Any) -> None:
    put_uncertain(database, ob, 3)

    done = decide_all(database, UNCERTAIN, BulkDecision(action="resolve", verdict=verdict, **WHO))

    for _ in range(2):  # to be sent again, it first waits for earlier senders
        run_once(database, ob, adapters={"crm": MemoryAdapter()})
        age(database, HOUR)
    assert done == Progress(3, {})
    assert states(database) == {"failed" if verdict == "did_not_happen" else "delivered": 3}
    assert {row.reason for row in database.rows(TABLES.audit)} == {f"{verdict}: the service is back"}


def test_what_was_sent_again_since_it_was_counted_is_left_alone(database: Database, ob: outbox.Outbox) -> None:
    first, _ = put_uncertain(database, ob, 2)
    found = previewed(database, UNCERTAIN, GONE)
    event = {"entry_id": first, "at": clock(), "kind": "attempt", "delivery": 2, "reason": "no answer within 30 s"}
    database.execute(sa.insert(TABLES.event).values(event))

    assert decided(database, GONE, found) == Progress(1, {NEWS: 1})
    assert decide_all(database, UNCERTAIN, GONE).done == 1


def test_waiting_entries_are_due_at_once_and_due_ones_are_left_alone(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=2)
    run_once(database, ob, adapters={"crm": MemoryAdapter([Deferred("busy", after=HOUR)] * 2)})
    due = put_one(database, ob)

    found = previewed(database, WAITING, RETRY)
    done = decided(database, RETRY, found)

    assert (len(found.ids), found.left_alone, done) == (2, {"it is due already": 1}, Progress(2, {}))
    assert due not in found.ids
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 3


def test_suspended_entries_are_released(database: Database, ob: outbox.Outbox) -> None:
    for id in put(database, ob, count=2):
        change(database, id, suspended_reason="a clone", due_at=NEVER)
    put_one(database, ob)

    done = decide_all(database, Filter(suspended=True), BulkDecision(action="release", **WHO))

    assert done == Progress(2, {})
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 3


def test_what_meets_the_filter_only_later_is_not_touched(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=2)
    found = previewed(database, WAITING, CANCEL)
    later = put_one(database, ob)

    done = decided(database, CANCEL, found)

    assert done == Progress(2, {})
    assert decision_events(database)[later] == 0


def test_the_same_decision_again_finds_nothing_to_do(database: Database, ob: outbox.Outbox) -> None:
    put_uncertain(database, ob, 3)
    decide_all(database, UNCERTAIN, GONE)

    assert previewed(database, UNCERTAIN, GONE).ids == []


# --- what changes between the preview and the decision


def test_what_changed_meanwhile_is_skipped_and_counted_with_why(database: Database, ob: outbox.Outbox) -> None:
    rejected, uncertain, suspended, deleted, moved, left = put(database, ob, count=6)
    put_one(database, ob, "mail.send")
    wanted = Filter(states=("pending",), destination="crm")
    found = previewed(database, wanted, CANCEL)
    change(database, suspended, suspended_reason="a clone")
    change(database, moved, state="retry")
    change(database, uncertain, state="uncertain", maybe_sent=True)
    for table in (TABLES.queue, TABLES.entry):
        database.execute(sa.delete(table).where(table.c.id == deleted))
    with database.begin() as session:
        assert ob.cancel(session, rejected)

    done = decided(database, CANCEL, found)

    assert done == Progress(
        1,
        {
            "it is suspended (a clone): `release` it first": 1,
            "it has ended as cancelled": 1,
            CHANGED: 2,
            DELETED: 1,
        },
    )
    assert decision_events(database) == {left: 1}


def test_an_entry_that_another_transaction_has_locked_is_skipped(postgresql: Database, ob: outbox.Outbox) -> None:
    locked, free = put(postgresql, ob, count=2)
    found = previewed(postgresql, WAITING, CANCEL)
    with postgresql.new_engine().begin() as connection:
        connection.execute(sa.select(TABLES.queue).where(TABLES.queue.c.id == locked).with_for_update())
        done = decided(postgresql, CANCEL, found)

    assert done == Progress(1, {LOCKED: 1})
    assert decision_events(postgresql) == {free: 1}


def test_two_operators_with_one_decision_decide_each_entry_once(database: Database, ob: outbox.Outbox) -> None:
    ids = put_uncertain(database, ob, 250)
    found = previewed(database, UNCERTAIN, GONE)
    barrier, results = threading.Barrier(2), []

    def operate() -> None:
        barrier.wait()
        results.append(decided(database, GONE, found))

    operators = [threading.Thread(target=operate) for _ in range(2)]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join()

    assert [result.done + sum(result.skipped.values()) for result in results] == [250, 250]
    changed = sum(result.done for result in results)
    assert changed == sum(row[3] for row in audit_rows(database)) == sum(decision_events(database).values())
    assert max(decision_events(database).values()) == 1
    assert set(decision_events(database)) == set(ids), "an entry that one had locked, it has decided"


def test_beside_a_dispatcher_an_entry_is_sent_or_cancelled_never_both(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=300)
    found = previewed(database, WAITING, CANCEL)
    barrier, adapter = threading.Barrier(2), MemoryAdapter()

    def send() -> None:
        barrier.wait()
        run_once(database.new_engine(), ob, adapters={"crm": adapter})

    sending = threading.Thread(target=send)
    sending.start()
    barrier.wait()
    done = decided(database, CANCEL, found)
    sending.join()
    while run_once(database, ob, adapters={"crm": adapter}):
        pass

    sent = len(adapter.deliveries)
    assert states(database) == {name: n for name, n in (("cancelled", done.done), ("delivered", sent)) if n}
    assert (done.done + sent, done.done + sum(done.skipped.values())) == (300, 300)


def test_a_batch_that_fails_changes_nothing_and_the_ones_before_stay(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=MAX_BATCH_ENTRIES + 5)
    found = previewed(database, WAITING, CANCEL)
    steps = decide(database.engine, TABLES, CANCEL, found, pause=lambda seconds: None)
    first = next(steps)
    database.execute(sa.text("ALTER TABLE outbox_audit RENAME TO moved"))

    with pytest.raises(Exception, match="outbox_audit"):
        next(steps)

    database.execute(sa.text("ALTER TABLE moved RENAME TO outbox_audit"))
    assert first.done == MAX_BATCH_ENTRIES == audit_rows(database)[0][3] == sum(decision_events(database).values())
    assert decide_all(database, WAITING, CANCEL).done == 5


# --- what is refused before anything is read


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"action": "resolve"}, "belongs to the action 'resolve'"),
        ({"action": "cancel", "verdict": "happened"}, "belongs to the action 'resolve'"),
        ({"action": "cancel", "reason": "  "}, "must say why"),
        ({"action": "cancel", "actor": ""}, "must name the operator"),
    ],
)
def test_a_decision_that_cannot_be_recorded_is_refused(made: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        BulkDecision(**{**WHO, **made})


def test_asking_again_without_the_secret_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="OUTBOX_SECRET"):
        BulkDecision(action="again", **WHO)


def test_states_that_a_decision_is_not_about_are_refused(database: Database) -> None:
    with pytest.raises(InvalidValue, match="are not those that `cancel` is about, such as pending, retry"):
        previewed(database, Filter(states=("failed",)), CANCEL)


# --- Decisions in bulk beside other transactions: a lock that is not released costs the entries that it concerns, and no
# others.


def decided_by(database: Database, engine: sa.Engine, wanted: Filter, decision: BulkDecision) -> Progress:
    with database.engine.connect() as connection:
        found = preview(connection, TABLES, wanted, decision)
    *_, last = decide(engine, TABLES, decision, found, pause=lambda seconds: None)
    return last


def test_what_another_operator_is_deciding_is_skipped_and_counted(
    postgresql: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MAX_LOCK_MS", 50)
    app = outbox.Outbox(Keyring.from_text(SECRET_TEXT), env="test")
    first, *_ = put(postgresql, app, count=3)
    run_once(postgresql, app, adapters={"crm": MemoryAdapter(lambda delivery: Rejected("no"))})
    configuration = Configuration(Keyring.from_text(SECRET_TEXT), env="test")
    decision = BulkDecision(action="again", configuration=configuration, **WHO)
    bounded = postgresql.new_engine(connect_args={"options": "-c statement_timeout=20s"})

    with postgresql.engine.connect() as connection:  # which does not commit for a while
        again(connection, configuration, first, actor="bob", reason="asked")
        done = decided_by(postgresql, bounded, Filter(states=("failed",)), decision)
        connection.rollback()

    assert done == Progress(2, {LOCKED: 1})
    assert [row.count for row in postgresql.rows(TABLES.audit)] == [2]
    assert decided_by(postgresql, bounded, Filter(states=("failed",)), decision) == Progress(1, {})
    bounded.dispose()


def test_who_serves_an_operation_is_asked_once_in_a_batch(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=10)
    age(database, HOUR)

    with statements_of(database.engine) as statements:
        done = decided_by(database, database.engine, Filter(states=("pending",)), BulkDecision(action="cancel", **WHO))

    assert done == Progress(10, {})
    assert sum("waiting_since <=" in statement for statement in statements) == 1


DECISIONS = {
    "cancel, by a dispatcher": (Filter(states=("pending",)), BulkDecision(action="cancel", **WHO)),
    "cancel, at once": (Filter(states=("pending",)), BulkDecision(action="cancel", **WHO)),
    "retry": (Filter(states=("pending",)), BulkDecision(action="retry", **WHO)),
    "resolve": (Filter(states=("uncertain",)), BulkDecision(action="resolve", verdict="happened", **WHO)),
    "release": (Filter(states=("pending",)), BulkDecision(action="release", **WHO)),
}


@pytest.mark.parametrize("kind", DECISIONS)
def test_a_batch_costs_as_many_statements_as_one_entry(database: Database, ob: outbox.Outbox, kind: str) -> None:
    """Entries of one state: a few statements for each batch of at most `MAX_BATCH_ENTRIES`, however many entries it has."""
    wanted, decision = DECISIONS[kind]
    sent: dict[int, int] = {}
    for count in (1, 30, 1000):
        prepare(database, kind, put(database, ob, count=count))
        with statements_of(database.engine) as statements:
            done = decided_by(database, database.engine, wanted, decision)
        assert done == Progress(count, {})
        changing = [each for each in statements if not each.startswith(("BEGIN", "COMMIT"))]
        sent[count] = len(changing)
        database.execute(sa.delete(TABLES.queue))

    assert sent[30] == sent[1] < 30
    assert sent[1000] <= 10 * sent[1]


def prepare(database: Database, kind: str, ids: list[Any]) -> None:
    """Bring what was enqueued into the state that the decision is about."""
    changes: dict[str, dict[str, Any]] = {
        "resolve": {"state": "uncertain", "maybe_sent": True, "due_at": NEVER, "deliveries": 1, "attempts": 1},
        "release": {"suspended_reason": "a poison message"},
        "retry": {"due_at": later(clock(), HOUR)},
    }
    if kind == "cancel, at once":
        age(database, HOUR)
        unserved = StoredOutcome().with_unserved_reason("no adapter serves it")
        database.execute(sa.update(TABLES.queue).values(outcome=unserved))
    elif kind in changes:
        database.execute(sa.update(TABLES.queue).values(**changes[kind]))


@pytest.mark.parametrize("kind", ["cancel, by a dispatcher", "resolve"])
def test_entries_with_different_histories_are_decided_by_one_statement(
    database: Database, ob: outbox.Outbox, kind: str
) -> None:
    """What was stored of each is kept."""
    ids = put(database, ob, count=20)
    prepare(database, kind, ids)
    stored = {id: number % 2 == 1 for number, id in enumerate(ids)}
    for id in ids:
        change(database, id, outcome=write_outcome("x", stored=stored[id]))
    wanted, decision = DECISIONS[kind]

    with statements_of(database.engine) as statements:
        assert decided_by(database, database.engine, wanted, decision) == Progress(20, {})

    assert sum(each.startswith("UPDATE outbox_queue") for each in statements) == 1
    outcomes = {row.id: read_outcome(row.outcome) for row in database.rows(TABLES.queue)}
    assert {id: outcome.stored for id, outcome in outcomes.items()} == stored
    assert {row.known for row in database.rows(TABLES.queue)} == {"crm"}
