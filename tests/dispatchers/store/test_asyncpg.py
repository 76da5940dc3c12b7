"""asyncpg as the driver of the app and of the dispatcher: what holds for the other drivers holds for it as well."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from support.cli_runner import document
from support.database import CHARGE, PAYLOAD, REQUEST, Database, Order
from support.entries import age, dispatcher, state, states

import outbox
from dispatchers import Deferred, Delivered, Delivery, Operations, Outcome, Rejected, Settlement, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.maintenance.jobs import Maintenance
from dispatchers.maintenance.retention import Retention
from dispatchers.settings import RETENTION
from dispatchers.store.database import DatabaseStore
from outbox.errors import DuplicateEntry, KeyInFlight, RequestMismatch


def asyncpg_url(database: Database) -> sa.URL:
    return database.url.set(drivername="postgresql+asyncpg")


@asynccontextmanager
async def engine_of(database: Database) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(asyncpg_url(database))
    try:
        yield engine
    finally:
        await engine.dispose()


def test_an_app_enqueues_claims_replays_reads_and_cancels(postgresql: Database, ob: outbox.Outbox) -> None:
    async def request(engine: AsyncEngine, **changed: Any) -> outbox.Response:
        async with AsyncSession(engine) as session, session.begin():
            given = {"key": "retry-001", "scope": "acct_1", "content": REQUEST} | changed
            async with ob.idempotent(session, **given) as claim:
                if not claim.replayed:
                    session.add(Order(customer="ada", amount=2000))
                    for line in range(3):
                        ob.enqueue(session, CHARGE, PAYLOAD, discriminator=str(line), ordering_key="acct_1")
                    claim.respond(201, {"order": "placed"})
        return claim.require_response()

    parent = outbox.ParentKey("retry-001", scope="acct_1", source="http")

    async def enqueue_again(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session, session.begin():
            ob.enqueue(session, CHARGE, PAYLOAD, parent=parent, discriminator="1")

    async def main() -> None:
        async with engine_of(postgresql) as engine:
            await ob.check(engine)
            answers = [await request(engine), await request(engine)]
            assert answers[0] == answers[1]
            with pytest.raises(RequestMismatch):
                await request(engine, content={"amount": 1})
            async with AsyncSession(engine) as session, session.begin():
                entries = await ob.status(session, parent)
                assert [entry.state for entry in entries] == ["pending"] * 3
                assert await ob.cancel(session, entries[0].id)
            with pytest.raises(DuplicateEntry):
                await enqueue_again(engine)
            assert postgresql.counts() == {"orders": 1, "records": 1, "entries": 3, "queue": 2}

    asyncio.run(main())


def test_two_requests_of_one_key_at_once_and_a_leased_claim(postgresql: Database, ob: outbox.Outbox) -> None:
    async def main() -> None:
        async with engine_of(postgresql) as engine, AsyncSession(engine) as first, AsyncSession(engine) as second:
            async with first.begin(), ob.idempotent(first, "retry-1", scope="a", content=b"") as claim:
                with pytest.raises(KeyInFlight):
                    async with ob.idempotent(second, "retry-1", scope="a", content=b""):
                        pass
                claim.respond(200, {})
            async with ob.leased(engine, "retry-2", scope="a", content=b"", lease=timedelta(seconds=30)) as leased:
                await leased.renew()
                await leased.respond(201, {"leased": True})
            async with ob.leased(engine, "retry-2", scope="a", content=b"") as again:
                assert (again.replayed, again.response.status) == (True, 201)

    asyncio.run(main())


def test_a_dispatcher_brings_every_kind_of_outcome_to_its_end(postgresql: Database, ob: outbox.Outbox) -> None:
    """Sends, waits, failures, doubt, a callback that enqueues, an ordering group, maintenance, the command line beside it."""
    effects, ended, asked = Operations(), [], []

    @effects.operation("crm.upsert")
    async def upsert(delivery: Delivery) -> Outcome:
        kind = delivery.payload["kind"]
        asked.append(kind)
        if kind == "later" and asked.count(kind) == 1:
            return Deferred("asked to wait")
        return {"no": Rejected("status 422"), "lost": Unknown("no answer")}.get(kind, Delivered({"id": "ü1"}))

    @effects.on_settled("crm.upsert")
    async def settled(session: AsyncSession, settlement: Settlement) -> None:
        ended.append((settlement.state, settlement.result))
        session.add(Order(customer=settlement.state, amount=1))
        ob.enqueue(session, "mail.send", {}, discriminator=str(settlement.entry.id))

    async def main() -> None:
        async with engine_of(postgresql) as engine:
            async with AsyncSession(engine) as session, session.begin():
                ids = [
                    ob.enqueue(session, "crm.upsert", {"kind": kind}, parent=f"order:{kind}", ordering_key=key).id
                    for kind, key in [("ok", "g"), ("later", "g"), ("no", "h"), ("lost", None)]
                ]
            working = dispatcher(engine, ob, include=[effects], adapters={"mail": MemoryAdapter()})
            await working.check()
            for _ in range(4):
                await working.run_once()
                await asyncio.to_thread(age, postgresql, timedelta(hours=1))
            assert [state(postgresql, id) for id in ids] == ["delivered", "delivered", "failed", "uncertain"]
            assert sorted(ended, key=str) == [("delivered", {"id": "ü1"})] * 2 + [("failed", None)]
            resolve = ("resolve", str(ids[3]), "--did-not-happen", "--reason", "seen", "--actor", "ada")
            await asyncio.to_thread(document, *resolve, DATABASE_URL=asyncpg_url(postgresql).render_as_string())
            for _ in range(2):
                await working.run_once()
            assert states(postgresql) == {"delivered": 6, "failed": 2}
            assert len(postgresql.orders) == 4
            maintenance = Maintenance(
                DatabaseStore(engine, ob.configuration).run, ob.configuration.tables, Retention.of(RETENTION, [None])
            )
            await asyncio.to_thread(age, postgresql, timedelta(days=1))
            async for _ in maintenance.sweep():
                pass
            await working.close()

    asyncio.run(main())


def test_dispatchers_at_once_share_the_work_and_send_everything_once(postgresql: Database, ob: outbox.Outbox) -> None:
    async def main() -> None:
        service = MemoryAdapter()
        async with engine_of(postgresql) as engine, engine_of(postgresql) as other:
            async with AsyncSession(engine) as session, session.begin():
                for number in range(200):
                    ob.enqueue(session, "crm.upsert", {"number": number}, parent=f"order:{number}")
            workers = [dispatcher(each, ob, adapters={"crm": service}) for each in (engine, other)]
            await asyncio.gather(*(worker.run_once() for worker in workers))
            for worker in workers:
                await worker.close()
        assert states(postgresql) == {"delivered": 200}
        assert len(service.deliveries) == len({delivery.key for delivery in service.deliveries}) == 200

    asyncio.run(main())


def test_the_command_line_takes_its_url(postgresql: Database, ob: outbox.Outbox) -> None:
    url = asyncpg_url(postgresql).update_query_dict({"command_timeout": "60"}).render_as_string(hide_password=False)

    assert document("status", DATABASE_URL=url)["destinations"] == []
