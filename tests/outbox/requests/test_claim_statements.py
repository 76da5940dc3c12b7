"""What a claim costs in round trips, and that the record is the same whichever way it was written."""

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import object_session
from support.database import CHARGE, PAYLOAD, REQUEST, TABLES, Database, Order, statements_of

import outbox
from outbox.errors import KeyInFlight

PLACED = {"order": 1}


def place(database: Database, ob: outbox.Outbox, key: str, *operations: str, **entry: str) -> None:
    with database.begin() as session, ob.idempotent(session, key, scope="acct_1", content=REQUEST) as claim:
        session.add(Order(customer="ada", amount=2000))
        for operation in operations:
            ob.enqueue(session, operation, PAYLOAD, **entry)
        claim.respond(201, PLACED)


def test_a_claim_of_a_request_with_entries_takes_three_more_round_trips(
    postgresql: Database, ob: outbox.Outbox
) -> None:
    with statements_of(postgresql.engine) as seen:
        place(postgresql, ob, "invoice:42", CHARGE, "crm.upsert")

    assert [statement.split()[0] for statement in seen] == ["SELECT", "SAVEPOINT", "WITH", "INSERT", "RELEASE"]
    assert seen[0].startswith("SELECT * FROM outbox_claim_key(")
    assert "INSERT INTO outbox_record" in seen[2]
    assert seen[3].startswith("INSERT INTO shop_order")


@pytest.mark.parametrize("moment", ["before_flush", "after_insert", "after_flush", "after_flush_postexec"])
def test_a_claim_whose_handler_and_listeners_enqueue_is_answered_once(
    database: Database, ob: outbox.Outbox, moment: str
) -> None:
    """Whatever is written in how many statements, the record goes along with one of them."""

    def enqueue(*arguments: Any) -> None:
        session = object_session(arguments[2]) if moment == "after_insert" else arguments[0]
        ob.enqueue(session, "mail.receipt", PAYLOAD)

    with database.session() as session:
        target = Order if moment == "after_insert" else session
        sa.event.listen(target, moment, enqueue)
        try:
            with ob.idempotent(session, "invoice:42", scope="acct_1", content=REQUEST) as claim:
                session.add(Order(customer="ada", amount=2000))
                ob.enqueue(session, CHARGE, PAYLOAD)
                claim.respond(201, PLACED)
            session.commit()
        finally:
            sa.event.remove(target, moment, enqueue)

    assert database.counts() == {"orders": 1, "records": 1, "entries": 2, "queue": 2}


@pytest.mark.parametrize(
    ("operations", "entry"), [((), {}), ((CHARGE,), {"ordering_key": "ada"})], ids=["no entry", "in a group"]
)
def test_a_record_without_a_statement_to_go_with_is_written_by_its_own(
    postgresql: Database, ob: outbox.Outbox, operations: tuple[str, ...], entry: dict[str, str]
) -> None:
    place(postgresql, ob, "invoice:41", CHARGE)
    with statements_of(postgresql.engine) as seen:
        place(postgresql, ob, "invoice:42", *operations, **entry)

    assert seen[-1].startswith("INSERT INTO outbox_record")
    beside, alone = sorted(postgresql.records, key=lambda record: record.parent)
    differing = {name for name in beside._fields if getattr(beside, name) != getattr(alone, name)}
    assert differing == {"id", "parent", "created_at", "answered_at", "replay_until", "keep_until"}
    kept = [(row.replay_until - row.created_at, row.keep_until - row.created_at) for row in (beside, alone)]
    assert all(abs(one - other) < timedelta(seconds=1) for one, other in zip(*kept, strict=True))


def test_a_record_that_another_has_written_meanwhile_stops_the_commit(postgresql: Database, ob: outbox.Outbox) -> None:
    place(postgresql, ob, "invoice:41", CHARGE)
    (first,) = postgresql.records

    def meet_another() -> None:
        with (
            postgresql.begin() as session,
            ob.idempotent(session, "invoice:42", scope="acct_1", content=REQUEST) as claim,
        ):
            postgresql.execute(sa.insert(TABLES.record).values({**first._mapping, "id": claim.id}))
            ob.enqueue(session, CHARGE, PAYLOAD)
            claim.respond(201, PLACED)

    with pytest.raises(KeyInFlight, match="a request with key 'invoice:42' is being processed now"):
        meet_another()

    assert postgresql.counts() == {"orders": 1, "records": 2, "entries": 1, "queue": 1}
