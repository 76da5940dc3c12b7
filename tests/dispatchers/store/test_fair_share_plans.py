"""What sharing out costs, in terms that do not depend on the machine: plans, statements, index entries; and what others pay."""

import pytest
import sqlalchemy as sa
from support.database import TABLES, Database, statements_of
from support.entries import claim, put, quota, settle
from test_claim_plans import HOT_MIN, drained, fill, number, updates_of_queue

import outbox
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue.fair_share import read_scopes
from outbox.times import NEVER

FILL = """
    WITH written AS (
        INSERT INTO outbox_entry (id, env, scope, source, parent, operation, discriminator, kid, tag, parent_id,
            destination, payload, options, headers, schema_version, due_at, created_at)
        SELECT gen_random_uuid(), 'test', 'tenant ' || s, 'app', 'order:' || n, 'crm.upsert', '', 'k1', sha256(n::text::bytea),
            gen_random_uuid(), 'crm', '{}', '{}', '{}', 1, now() - n * interval '1 ms', now()
        FROM generate_series(1, :scopes) AS s, generate_series(1, :each) AS n
        RETURNING id, destination, due_at, scope
    )
    INSERT INTO outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch, fair, scope)
    SELECT id, destination, 'pending', due_at, 0, 0, false, 0, destination, scope FROM written
"""


@pytest.fixture
def fair() -> outbox.Outbox:
    return outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}, current="k1"), env="test", fair={"crm"})


def fill_scopes(database: Database, scopes: int, each: int) -> None:
    database.execute(sa.text(FILL).bindparams(scopes=scopes, each=each))


def test_what_is_shared_out_is_planned_for_the_queue_as_it_is(postgresql: Database, fair: outbox.Outbox) -> None:
    """Psycopg prepares what it has sent five times; PostgreSQL may then keep a plan that it made while little was there."""
    store = DatabaseStore(postgresql.new_engine(pool_size=1), fair.configuration)
    fill_scopes(postgresql, 3, 10)
    for _ in range(15):
        claim(store, quota(permits=1))

    with store._engine.connect() as connection:
        prepared = connection.exec_driver_sql("SELECT statement, generic_plans FROM pg_prepared_statements").all()

    kept = {statement.split()[0]: plans for statement, plans in prepared}
    assert kept["WITH"] == kept["UPDATE"] == 0  # the walk, and the leases


def test_a_claim_costs_the_same_few_statements_however_many_scopes_wait(
    postgresql: Database, fair: outbox.Outbox
) -> None:
    store = DatabaseStore(postgresql.engine, fair.configuration)
    claim(store, quota("nobody"))  # a store's first transaction asks for the isolation level

    with statements_of(postgresql.engine) as of_none:
        assert claim(store, quota(permits=16)) == []
    put(postgresql, fair, count=16)
    with statements_of(postgresql.engine) as of_few:
        assert len(claim(store, quota(permits=16))) == 16
    fill_scopes(postgresql, 1, 100)
    with statements_of(postgresql.engine) as of_one_scope:
        assert len(claim(store, quota(permits=16))) == 16
    fill_scopes(postgresql, 1000, 2)
    with statements_of(postgresql.engine) as of_many_scopes:
        assert len(claim(store, quota(permits=16))) == 16

    assert [len(sent) for sent in (of_none, of_few, of_one_scope, of_many_scopes)] == [
        2,
        3,
        4,
        4,
    ]  # with the guards


def test_a_claim_looks_no_further_than_to_an_entry_for_each_permit(postgresql: Database, fair: outbox.Outbox) -> None:
    fill_scopes(postgresql, 100, 1)

    with postgresql.engine.connect() as connection:
        following, before = read_scopes(connection, TABLES, quota(permits=16), NEVER, "tenant 95")

    assert [scope for scope, _ in following] == [f"tenant {number}" for number in (96, 97, 98, 99)]
    assert (len(before), {entries for _, entries in before}) == (12, {1})


def test_what_goes_to_no_fair_destination_is_in_no_index_of_theirs(
    postgresql: Database, ob: outbox.Outbox, fair: outbox.Outbox
) -> None:
    size = "SELECT pg_relation_size('outbox_queue_fair')"
    empty = number(postgresql, size)
    fill(postgresql, 5000, "mail")
    put(postgresql, fair, "mail.send", count=10)
    put(postgresql, ob, count=10)

    with statements_of(postgresql.engine) as sent:
        claim(DatabaseStore(postgresql.engine, fair.configuration), quota("mail"))

    assert number(postgresql, size) == empty
    assert len([statement for statement in sent if "outbox_queue" in statement]) == 1


def test_leases_of_a_fair_destination_are_hot_updates(postgresql: Database, fair: outbox.Outbox) -> None:
    fill_scopes(postgresql, 50, 40)
    store = DatabaseStore(postgresql.engine, fair.configuration)

    with updates_of_queue(postgresql.engine) as updates:
        while entries := claim(store, quota(permits=500)):
            settle(store, *drained(entries))

    assert sum(each.updates for each in updates) == 2000
    assert sum(each.hot for each in updates) / 2000 >= HOT_MIN
