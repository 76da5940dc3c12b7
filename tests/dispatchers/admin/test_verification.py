"""`outbox verify`: silent about what the library wrote, and finding each way in which a row can break an invariant."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT, command, document, put_ended, put_suspended, put_uncertain
from support.database import TABLES, Database
from support.entries import claim_one, put, put_one, settle

import outbox
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import RetryCallback, Settle
from outbox.sql.schema.tables import Tables
from outbox.sql.statements import own_row

Harm = Callable[[sa.Connection, UUID], object]


def verdicts(database: Database) -> dict[str, list[str]]:
    """The rules that are broken, and by what."""
    result = command("verify", "--json", database=database, OUTBOX_SECRET=SECRET_TEXT)
    assert result.exit_code in (0, 6), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["is_clean"] == (result.exit_code == 0)
    broken = [verdict for verdict in found["verdicts"] if verdict["violations"]]
    return {verdict["rule"]: [violation["text"] for violation in verdict["violations"]] for verdict in broken}


def test_what_the_library_wrote_breaks_no_rule(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    put_uncertain(database, ob)
    put_suspended(database, ob)
    put_ended(database, ob)

    report = document("verify", database=database, OUTBOX_SECRET=SECRET_TEXT)

    assert report["is_clean"]
    assert report["without_secret"] == 0
    assert [verdict["violations"] for verdict in report["verdicts"]] == [[]] * len(report["verdicts"])


def _set(table: sa.Table, **values: object) -> Harm:
    return lambda connection, id: connection.execute(table.update().where(table.c.id == id).values(values))


def _sent(**counts: int) -> Harm:
    return _set(TABLES.queue, state="retry", maybe_sent=True, **counts)


def _end(tables: Tables, **values: object) -> Harm:
    row = {"state": "delivered", "deliveries": 1, "attempts": 1, "key_epoch": 0, "settled_at": sa.func.now()} | values

    def harm(connection: sa.Connection, id: UUID) -> None:
        created = sa.select(tables.entry.c.created_at).where(tables.entry.c.id == id).scalar_subquery()
        connection.execute(tables.settlement.insert().values(row | {"id": id, "settled_at": created}))

    return harm


def _take(table: sa.Table) -> Harm:
    return lambda connection, id: connection.execute(table.delete().where(table.c.id == id))


def _give_another_its_key(connection: sa.Connection, id: UUID) -> None:
    entry = TABLES.entry
    tag = own_row(sa.select(entry.c.tag).where(entry.c.id == id).limit(1))
    connection.execute(entry.update().where(entry.c.id != id).values(tag=tag))


def _block(connection: sa.Connection, id: UUID) -> None:
    connection.execute(
        TABLES.blocked_group.insert().values(ordering_key="group", entry_id=uuid4(), reason="-", since=sa.func.now())
    )


@pytest.mark.every_value
@pytest.mark.parametrize(
    ("rule", "harm", "text"),
    [
        ("not lost", _take(TABLES.queue), "has no row in the queue and no settlement"),
        ("ended once", _end(TABLES), "has the settlement delivered, but is still in the queue as pending"),
        ("no orphans", _take(TABLES.entry), "has a row in the queue or a settlement, but its row"),
        ("unique key", _give_another_its_key, "has the same key as entry "),
        ("attempt count", _sent(attempts=2, deliveries=1), "has 2 attempts, but was claimed only 1 times"),
        ("same key", _set(TABLES.queue, key_epoch=1), "has key epoch 1, but its history has fewer decisions"),
        ("blocked group", _block, "blocks ordering group group, but its row in the table of entries is"),
        ("derived key", _set(TABLES.entry, scope="another"), "has another id than the one derived from its fields, "),
        ("derived key", _set(TABLES.entry, parent_id=uuid4()), "has another parent id than the one derived from its parent key"),
        ("derived key", _set(TABLES.entry, tag=b"x" * 32), "has another key than the one derived from its fields and the secret"),
        ("derived key", _set(TABLES.entry, operation="Not One"), "has invalid fields: operation "),
    ],
)  # fmt: skip
def test_a_row_that_breaks_a_rule_is_named(
    database: Database, ob: outbox.Outbox, rule: str, harm: Harm, text: str
) -> None:
    put(database, ob)
    id = put_one(database, ob, parent="harmed")
    with database.engine.begin() as connection:
        harm(connection, id)

    broken = verdicts(database)

    assert any(f" {text}" in found for found in broken[rule])
    alone = {"unique key": {"unique key", "derived key"}}  # the other entry's key is not its own either
    assert set(broken) == alone.get(rule, {rule})


def test_one_decision_explains_one_new_key_and_no_second(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    decision = {"entry_id": id, "kind": "decision", "reason": "send_again: it is not there"}
    with database.engine.begin() as connection:
        connection.execute(TABLES.event.insert().values(decision | {"at": _created(id)}))
        connection.execute(TABLES.queue.update().values(key_epoch=1))
    assert verdicts(database) == {}

    with database.engine.begin() as connection:
        connection.execute(TABLES.queue.update().values(key_epoch=2))

    assert set(verdicts(database)) == {"same key"}


def _created(id: UUID) -> Any:
    return sa.select(TABLES.entry.c.created_at).where(TABLES.entry.c.id == id).scalar_subquery()


@pytest.mark.parametrize("has_failed_callback", [False, True])
def test_a_resolution_that_a_restore_forgot_may_be_brought_by_a_dispatcher(
    database: Database, ob: outbox.Outbox, has_failed_callback: bool
) -> None:
    """A dispatcher claims an entry that an operator has resolved; then the database is restored to before the decision."""
    id = put_one(database, ob)
    store = DatabaseStore(database.engine, ob.configuration)
    resolved = claim_one(store)._replace(attempts=1, maybe_sent=True)
    end = Settle("delivered", 1, reason="looked at it", decided=True)
    brought = RetryCallback(end, timedelta(0), "delivered, but its callback raised ValueError")
    settle(store, (resolved, brought if has_failed_callback else end))
    assert set(verdicts(database)) == {"stored outcome" if has_failed_callback else "final state"}

    with database.engine.begin() as connection:
        connection.execute(TABLES.meta.delete())
        connection.execute(TABLES.meta.insert().values(id=1, resumed_at=_created(id)))

    assert verdicts(database) == {}


def test_an_end_before_the_enqueueing_is_named(postgresql: Database, ob: outbox.Outbox) -> None:
    put_ended(postgresql, ob)
    with postgresql.engine.begin() as connection:
        connection.execute(TABLES.settlement.update().values(settled_at=sa.text("now() - interval '1 year'")))

    assert set(verdicts(postgresql)) == {"times"}


def test_without_the_secret_the_keys_are_not_checked_and_that_is_reported(
    database: Database, ob: outbox.Outbox
) -> None:
    put(database, ob, count=2)

    result = command("verify", database=database)

    assert result.exit_code == 0
    assert result.stdout.endswith("2 entries; the keys of 2 were not checked: their secrets are not in OUTBOX_SECRET\n")


def test_many_violations_are_cut_and_that_is_reported(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=101)
    with database.engine.begin() as connection:
        connection.execute(TABLES.queue.delete())

    report: dict[str, Any] = json.loads(command("verify", "--json", database=database).stdout)

    (kept,) = [verdict for verdict in report["verdicts"] if verdict["rule"] == "not lost"]
    assert (len(kept["violations"]), kept["has_more"]) == (100, True)
