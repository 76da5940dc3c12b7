"""Operator decisions: on record under a name, refused where it could be untrue, carried out by a dispatcher, also at once."""

import json
import threading
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from support.callbacks import Shop
from support.daemons import wait_for
from support.database import TABLES, Database
from support.decisions import MAYBE_SENT, decide, history, in_doubt, uncertain
from support.entries import HOUR, age, change, claim, put_one, queue_row, run_once, settlement_row, state

import outbox
from dispatchers import Deferred, Delivered, Outcome, Rejected, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.errors import DecisionRefused, EntryNotFound
from dispatchers.store.database import DatabaseStore
from dispatchers.stored_outcome import read_outcome
from outbox.sql.clock import clock
from outbox.times import NEVER

KNOWN = "its outcome is recorded as delivered, and only its callback is due"


@pytest.fixture(params=["sync", "async"])
def shop(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Shop:
    """The app with callbacks on a Session, and on an AsyncSession."""
    return Shop(database, ob, is_async=request.param == "async")


def in_state(name: str, database: Database, ob: outbox.Outbox) -> UUID:
    if name == "uncertain":
        return uncertain(database, ob)
    id = put_one(database, ob)
    answers: dict[str, Outcome] = {
        "retry": Deferred("busy"),
        "maybe sent": Unknown("no answer"),
        "delivered": Delivered(),
        "failed": Rejected("no"),
    }
    if name in answers:
        run_once(database, ob, adapters={"crm": MemoryAdapter([answers[name]])})
    elif name == "sending":
        claim(DatabaseStore(database.engine, ob.configuration))
    elif name == "suspended":
        change(database, id, suspended_reason="a clone")
    elif name == "cancelled":
        with database.begin() as session:
            ob.cancel(session, id)
    elif name == "its callback is due":
        shop = Shop(database, ob, is_async=False)
        shop.on_settled(lambda *_: 1 / 0)  # type: ignore[arg-type, return-value]
        shop.run_once(adapters={"crm": MemoryAdapter()})
    return id


def resolve(connection: Any, tables: Any, id: UUID, **settings: Any) -> None:
    decisions.resolve(connection, tables, id, "happened", **settings)


BEING_SENT = "a send or a status lookup is in flight; try again when it has ended"
ENDED = "it has ended, and that is final"
SUSPENDED = r"it is suspended \(a clone\): `release` it first"
LOOKUP_FIRST = "it may have happened: check with the service, then `resolve` it"
NOT_SUSPENDED = "it is not suspended"
UNCERTAIN_ONLY = "only an uncertain entry can be resolved"
ALLOWED: list[tuple[Any, str]] = [
    (decisions.retry, "pending"),
    (decisions.retry, "retry"),
    (decisions.retry, "maybe sent"),
    (decisions.retry, "its callback is due"),
    (decisions.cancel, "pending"),
    (decisions.cancel, "retry"),
    (resolve, "uncertain"),
    (decisions.release, "suspended"),
]
REFUSED: list[tuple[Any, str, str, str]] = [
    (decisions.retry, "sending", "sending", BEING_SENT),
    (decisions.retry, "uncertain", "uncertain", LOOKUP_FIRST),
    (decisions.retry, "suspended", "pending", SUSPENDED),
    (decisions.retry, "failed", "failed", ENDED),
    (decisions.cancel, "sending", "sending", BEING_SENT),
    (decisions.cancel, "uncertain", "uncertain", "only a waiting entry can be cancelled"),
    (decisions.cancel, "maybe sent", "retry", MAYBE_SENT),
    (decisions.cancel, "its callback is due", "retry", KNOWN),
    (decisions.cancel, "suspended", "pending", SUSPENDED),
    (decisions.cancel, "delivered", "delivered", ENDED),
    (resolve, "pending", "pending", UNCERTAIN_ONLY),
    (resolve, "retry", "retry", UNCERTAIN_ONLY),
    (resolve, "maybe sent", "retry", UNCERTAIN_ONLY),
    (resolve, "sending", "sending", BEING_SENT),
    (resolve, "its callback is due", "retry", UNCERTAIN_ONLY),
    (resolve, "cancelled", "cancelled", ENDED),
    (decisions.release, "pending", "pending", NOT_SUSPENDED),
    (decisions.release, "uncertain", "uncertain", NOT_SUSPENDED),
    (decisions.release, "delivered", "delivered", ENDED),
]


def named(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("what", "given"), ALLOWED, ids=named)
def test_an_allowed_decision_makes_the_entry_due_and_is_on_record(
    database: Database, ob: outbox.Outbox, what: Any, given: str
) -> None:
    id = in_state(given, database, ob)
    change(database, id, due_at=NEVER)
    before = history(database, id)

    decide(database, what, id, actor="ada@shop", reason="a good one")

    assert queue_row(database, id).due_at < NEVER
    verdict = "happened: " if what is resolve else ""
    assert history(database, id) == [*before, ("decision", "ada@shop", f"{verdict}a good one")]


@pytest.mark.parametrize(("what", "given", "shown", "text"), REFUSED, ids=named)
def test_a_decision_that_a_state_does_not_allow_changes_nothing(
    database: Database, ob: outbox.Outbox, what: Any, given: str, shown: str, text: str
) -> None:
    id = in_state(given, database, ob)
    before = (queue_row(database, id), history(database, id))

    with pytest.raises(DecisionRefused, match=f"entry {id} is {shown}: {text}") as refused:
        decide(database, what, id)

    assert refused.value.state == shown
    assert (queue_row(database, id), history(database, id)) == before


@pytest.mark.parametrize("what", [decisions.retry, decisions.cancel, resolve, decisions.release], ids=named)
def test_an_unknown_entry_is_said_to_be_unknown(database: Database, what: Any) -> None:
    id = uuid4()

    with pytest.raises(EntryNotFound, match=f"no entry has the id {id}"):
        decide(database, what, id)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"reason": "  "}, outbox.InvalidValue, "reason '  ': must say why, and how you know; it is recorded"),
        ({"reason": "\u200b \u2060"}, outbox.InvalidValue, "must say why, and how you know; it is recorded"),
        ({"actor": ""}, outbox.InvalidValue, "actor '': must name the operator; it is recorded"),
        ({"actor": "a" * 256}, outbox.InvalidValue, "has 256 characters; the maximum is 255"),
        ({"reason": "r" * 1001}, outbox.InvalidValue, "has 1001 characters; the maximum is 1000"),
        ({"reason": "a\0b"}, outbox.InvalidValue, "contains a NUL character or a lone surrogate"),
        ({"reason": "a\ud83d"}, outbox.InvalidValue, "contains a NUL character or a lone surrogate"),
        ({"result": float("nan")}, outbox.NotSerializable, "the result is not JSON: it contains NaN"),
        ({"result": "x" * 70_000}, outbox.NotSerializable, "the result has 70002 bytes of JSON, and at most 65536 are"),
    ],
)
def test_what_cannot_stay_on_record_is_refused_before_anything_is_written(
    database: Database, ob: outbox.Outbox, given: Any, error: type[Exception], text: str
) -> None:
    id = uncertain(database, ob)
    before = queue_row(database, id)

    with pytest.raises(error, match=text):
        decide(database, resolve, id, **given)

    assert queue_row(database, id) == before


def test_an_unknown_verdict_is_refused(database: Database, ob: outbox.Outbox) -> None:
    with pytest.raises(outbox.InvalidValue, match="verdict 'perhaps': must be one of"):
        decide(database, decisions.resolve, uncertain(database, ob), "perhaps")


# --- happened, did not happen


@pytest.mark.parametrize(("verdict", "ends"), [("happened", "delivered"), ("did_not_happen", "failed")])
def test_an_operators_decision_settles_with_its_reason_and_its_callback(shop: Shop, verdict: str, ends: str) -> None:
    database = shop.database
    id = uncertain(database, shop.ob)
    shop.on_settled(shop.pay)
    adapter = MemoryAdapter()

    decide(database, decisions.resolve, id, verdict, reason="seen in the list", result={"id": "c_1"})
    assert state(database, id) == "uncertain", "until a dispatcher carries it out"
    assert shop.run_once(adapters={"crm": adapter}) == 1

    row = settlement_row(database, id)
    assert (row.state, row.reason, json.loads(row.result), row.attempts) == (ends, "seen in the list", {"id": "c_1"}, 1)
    assert [(each.state, each.reason, each.result) for each in shop.seen] == [(ends, "seen in the list", {"id": "c_1"})]
    assert (adapter.deliveries, len(database.orders)) == ([], 1)


def test_a_decision_on_what_no_adapter_serves_waits_and_stays_uncertain(database: Database, ob: outbox.Outbox) -> None:
    id = uncertain(database, ob, parent="invoice:42")
    decide(database, decisions.resolve, id, "happened")

    assert run_once(database, ob, adapters={"mail": MemoryAdapter()}) == 0

    with database.begin() as session:
        (status,) = ob.status(session, "invoice:42")
    assert (status.state, status.reason) == ("uncertain", "looked at it")
    age(database, HOUR)
    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 1
    assert state(database, id) == "delivered"


# --- what is suspended


def test_an_uncertain_entry_that_is_released_is_not_sent(database: Database, ob: outbox.Outbox) -> None:
    id = in_doubt(database, ob)
    change(database, id, suspended_reason="a clone")
    adapter = MemoryAdapter()

    decide(database, decisions.release, id)

    assert run_once(database, ob, adapters={"crm": adapter}) == 0
    assert (state(database, id), queue_row(database, id).suspended_reason, adapter.deliveries) == (
        "uncertain",
        None,
        [],
    )


def test_a_decision_that_was_suspended_is_carried_out_once_it_is_released(
    database: Database, ob: outbox.Outbox
) -> None:
    id = uncertain(database, ob)
    decide(database, decisions.resolve, id, "happened")
    change(database, id, suspended_reason="a clone", due_at=NEVER)

    decide(database, decisions.release, id)

    assert run_once(database, ob, adapters={"crm": MemoryAdapter()}) == 1
    assert state(database, id) == "delivered"


def test_a_blocked_group_is_released_and_that_is_on_record(database: Database) -> None:
    id = uuid4()
    blocked = {"ordering_key": "acct_1", "entry_id": id, "reason": "uncertain", "since": clock()}
    database.execute(sa.insert(TABLES.blocked_group).values(blocked))

    with database.engine.begin() as connection:
        decisions.release_group(connection, TABLES, "acct_1", actor="ada", reason="asked")

    assert database.rows(TABLES.blocked_group) == []
    assert history(database, id) == [("decision", "ada", "asked")]
    with (
        pytest.raises(EntryNotFound, match="ordering group 'acct_1' is not blocked"),
        database.engine.begin() as connection,
    ):
        decisions.release_group(connection, TABLES, "acct_1", actor="ada", reason="asked")


# --- An operator's decision at the same time as another one, or as a claim.


def waiting_for_a_lock(database: Database) -> int:
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with database.new_engine().connect() as connection:
        return connection.scalar(sa.text(query)) or 0


def test_of_two_who_decide_at_once_the_second_sees_what_the_first_did(postgresql: Database, ob: outbox.Outbox) -> None:
    id = uncertain(postgresql, ob)
    first = postgresql.engine.connect()
    first.begin()
    decisions.resolve(first, TABLES, id, "did_not_happen", actor="bob", reason="not in the list")

    second = threading.Thread(target=decide, args=(postgresql, decisions.resolve, id, "happened"))
    second.start()
    wait_for(lambda: not second.is_alive() or waiting_for_a_lock(postgresql), "the second to meet the first's lock")
    first.commit()
    first.close()
    second.join()

    assert read_outcome(queue_row(postgresql, id).outcome).known.state == "delivered"  # type: ignore[union-attr]
    assert [reason for kind, _, reason in history(postgresql, id) if kind == "decision"] == [
        "did_not_happen: not in the list",
        "happened: looked at it",
    ]


def test_a_claim_passes_over_what_an_operator_is_deciding(postgresql: Database, ob: outbox.Outbox) -> None:
    deciding, other = put_one(postgresql, ob), put_one(postgresql, ob)
    adapter = MemoryAdapter()

    with postgresql.engine.begin() as connection:
        decisions.cancel(connection, TABLES, deciding, actor="ada", reason="asked")
        assert run_once(postgresql.new_engine(), ob, adapters={"crm": adapter}) == 1
    assert run_once(postgresql, ob, adapters={"crm": adapter}) == 1

    assert [delivery.id for delivery in adapter.deliveries] == [other]
    assert state(postgresql, deciding) == "cancelled"


def test_a_decision_never_lands_on_an_entry_that_was_claimed_meanwhile(
    sqlite: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = put_one(sqlite, ob)
    store = DatabaseStore(sqlite.engine, ob.configuration)
    refresh = decisions._require

    def look_and_be_late(*arguments: Any) -> None:
        refresh(*arguments)
        claim(store)  # between the look and the write: SQLite, unprepared, has no lock on what was only read

    monkeypatch.setattr(decisions, "_require", look_and_be_late)
    with (
        pytest.raises(DecisionRefused, match="has just changed: show it again"),
        sqlite.unprepared_engine().begin() as connection,
    ):
        decisions.cancel(connection, TABLES, id, actor="ada", reason="asked")

    assert (state(sqlite, id), queue_row(sqlite, id).outcome) == ("sending", None)
