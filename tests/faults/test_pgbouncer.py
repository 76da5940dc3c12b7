"""PgBouncer in transaction mode is between: each transaction may get another connection of the server."""

import asyncio
import json
import threading
from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from support.cli_runner import SECRET_TEXT, command
from support.concurrency import ANSWER, TEST_TIMEOUT, RacingShop, at_once, retried
from support.database import ALL, CHARGE, NOTHING, PAYLOAD
from support.entries import dispatcher, pumping, put, run_once, settlement_row, states
from support.migrations import blank_database
from support.pgbouncer import NO_PREPARED, BouncedDatabase, find_pgbouncer, pgbouncer

import outbox
from dispatchers.adapters import MemoryAdapter
from dispatchers.pipeline import wakeup
from dispatchers.store.database import DatabaseStore
from outbox import migrations
from outbox.sessions.session import flush_all

WAIT = {"wait": timedelta(seconds=TEST_TIMEOUT)}
POOL = 8


@pytest.fixture(scope="module", autouse=True)
def program():
    find_pgbouncer()


@pytest.fixture
def bounced(postgresql):
    with pgbouncer(postgresql.url, pool_size=POOL) as url:
        database = BouncedDatabase(url)
        yield database
        database.dispose()


@pytest.fixture(params=["sync", "async"])
def shop(request, bounced, ob):
    return RacingShop(bounced, ob, is_async=request.param == "async")


def test_the_connections_do_go_through_it_and_share_a_few_of_the_servers(bounced):
    clients = [bounced.unprepared_engine(poolclass=sa.NullPool).connect() for _ in range(3 * POOL)]

    servers = set()
    for client in clients:
        servers.add(client.scalar(sa.text("SELECT pg_backend_pid()")))
        client.commit()
    for client in clients:
        client.close()

    assert len(servers) < len(clients)


def test_entries_commit_or_roll_back_with_the_transaction(shop):
    def enqueue(session):
        shop.ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")

    def fail(session):
        enqueue(session)
        flush_all(session)
        raise outbox.OutboxError("fails")

    (failed,) = at_once(1, lambda: shop.unit(fail))
    assert (str(failed), shop.database.counts()) == ("fails", NOTHING)

    shop.unit(enqueue)

    assert len(shop.database.entries) == len(shop.database.queue) == 1


def test_the_doctor_makes_every_check_and_reports_the_pooler(bounced, ob):
    """Of its transactions each may get another connection, which lacks what an earlier one has prepared."""
    asyncio.run(dispatcher(bounced, ob, adapters={"crm": MemoryAdapter()}).heartbeats.beat())
    clients = [bounced.unprepared_engine(poolclass=sa.NullPool).connect() for _ in range(POOL - 1)]
    stop = threading.Event()

    def work(client):
        while not stop.is_set():
            client.scalar(sa.text("SELECT pg_sleep(0.001)"))
            client.commit()

    workers = [threading.Thread(target=work, args=(client,)) for client in clients]
    for worker in workers:
        worker.start()
    try:
        settings = {"OUTBOX_ENV": "test", "OUTBOX_SECRET": SECRET_TEXT}
        documents = [json.loads(command("doctor", "--json", database=bounced, **settings).stdout) for _ in range(3)]
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        for client in clients:
            client.close()

    for document in documents:
        found = [(each["check"], each["severity"]) for each in document["findings"]]
        assert (found, document["unchecked"]) == ([("pooler", "notice")], [])


def test_an_entry_of_asyncpg_commits(bounced, ob):
    async def main():
        engine = create_async_engine(
            bounced.url.set(drivername="postgresql+asyncpg"),
            poolclass=sa.NullPool,
            connect_args={"statement_cache_size": 0, "prepared_statement_name_func": lambda: f"__{uuid4()}__"},
        )
        async with AsyncSession(engine) as session, session.begin():
            ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")
        await engine.dispose()

    asyncio.run(main())

    assert len(bounced.entries) == 1


def test_while_one_request_works_the_others_get_a_conflict_at_once(shop):
    def ask_too(session):
        refused.extend(at_once(3, shop.request))

    refused = []
    shop.while_working = ask_too

    answers = at_once(1, shop.request)  # on a thread: in the async case its handler runs on an event loop

    assert [type(outcome) for outcome in refused] == [outbox.KeyInFlight] * 3
    assert [*answers, *at_once(20, shop.request)] == [ANSWER] * 21
    assert shop.executions == 1
    assert shop.database.counts() == ALL


def test_the_others_wait_for_its_answer(shop):
    shop.while_working = lambda session: shop.wait_until_others_wait(5)

    outcomes = at_once(6, lambda: shop.request(**WAIT))

    assert outcomes == [ANSWER] * 6
    assert shop.executions == 1
    assert shop.database.counts() == ALL


def test_of_more_than_it_has_connections_one_works_to_the_end(shop):
    answers = at_once(2 * POOL, lambda: retried(lambda: shop.request(wait=timedelta(seconds=1))))

    assert answers == [answers[0]] * 2 * POOL
    assert shop.database.counts() == ALL


def test_nothing_is_left_on_the_servers_connections(bounced, ob):
    """A lock or a setting of the session would be found by the client that gets the connection next."""
    shop = RacingShop(bounced, ob, is_async=False)
    wait_briefly = {"wait": timedelta(milliseconds=20)}
    shop.while_working = lambda session: at_once(3, lambda: shop.request(**wait_briefly))
    shop.request()
    run_once(bounced, ob, adapters={"stripe": MemoryAdapter()})
    look = sa.text(
        "SELECT current_setting('lock_timeout'), current_setting('synchronous_commit'), current_setting('search_path'),"
        " (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'), (SELECT count(*) FROM pg_prepared_statements)"
    )

    clients = [bounced.unprepared_engine(poolclass=sa.NullPool).connect() for _ in range(POOL)]
    found = {tuple(client.execute(look).one()) for client in clients}  # each in an open transaction: all the servers'
    for client in clients:
        client.close()

    assert found == {("0", "on", '"$user", public', 0, 0)}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_two_dispatchers_deliver_each_entry_once(bounced, ob, kind):
    put(bounced, ob, count=200)
    service = MemoryAdapter()

    def drain():
        engine = bounced.async_engine() if kind == "async" else bounced.new_engine()
        return run_once(engine, ob, adapters={"crm": service})

    assert sum(at_once(2, drain)) == 200
    assert len({delivery.id for delivery in service.deliveries}) == len(service.deliveries) == 200
    assert states(bounced) == {"delivered": 200}


def test_a_level_that_the_engine_sets_ends_with_the_transaction(bounced, ob):
    shop = RacingShop(bounced, ob, is_async=False, isolation_level="SERIALIZABLE")
    look = sa.text("SHOW transaction_isolation")

    seen = shop.unit(lambda session: session.execute(look).scalar_one())
    store = DatabaseStore(shop.engine, ob.configuration)
    stores = asyncio.run(store.run(lambda connection: connection.execute(look).scalar_one()))
    asyncio.run(store.close())
    with bounced.engine.connect() as connection:
        after = connection.scalar(look)

    assert (seen, stores, after) == ("serializable", "read committed", "read committed")


def test_migrations_run_through_it_two_at_once(server_url):
    with blank_database(server_url) as blank, pgbouncer(blank.url, pool_size=POOL) as url:
        engine = sa.create_engine(url, connect_args=NO_PREPARED, poolclass=sa.NullPool)

        outcomes = at_once(2, lambda: migrations.upgrade(engine))

        assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        migrations.check(engine)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_dispatcher_that_connects_through_it_polls_and_logs_it_once(bounced, ob, kind, caplog, monkeypatch):
    monkeypatch.setattr(wakeup, "RETRY_SECONDS", (0.01, 0.01))

    async def main():
        engine = bounced.async_engine() if kind == "async" else bounced.new_engine()
        working = dispatcher(engine, ob, adapters={"crm": MemoryAdapter()})
        id = await asyncio.to_thread(lambda: put(bounced, ob)[0])
        await pumping(working, lambda: settlement_row(bounced, id) is not None and "pooler" in caplog.text)
        await working.close()

    asyncio.run(main())

    assert caplog.text.count("the connection leads to a pooler") == 1


def test_the_doctor_notices_it(bounced):
    url = bounced.url.render_as_string(hide_password=False)

    (finding,) = json.loads(command("doctor", "--json", DATABASE_URL=url).stdout)["findings"]

    assert (finding["check"], finding["severity"]) == ("pooler", "notice")


def test_a_dispatchers_check_warns_of_prepared_statements(bounced, ob):
    def checked(engine):
        return asyncio.run(dispatcher(engine, ob, adapters={"crm": MemoryAdapter()}).check()).findings

    (warning,) = checked(sa.create_engine(bounced.url, poolclass=sa.NullPool))
    (notice,) = checked(bounced.unprepared_engine())

    assert (warning.severity, notice.severity) == ("warning", "notice")
