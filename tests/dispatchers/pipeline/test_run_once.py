"""`run_once` leaves what becomes due again for its next call, however late a group's claim comes, and ends if a loop fails."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest
import sqlalchemy as sa
from support.database import Database
from support.entries import dispatcher, put

import outbox
from dispatchers import Deferred, Delivery, Outcome
from dispatchers.adapters import MemoryAdapter
from dispatchers.store.database import DatabaseStore
from dispatchers.store.protocol import Exchange
from dispatchers.store.queue.claim_request import ClaimRequest
from dispatchers.transitions import Ending

pytestmark = [pytest.mark.on_mariadb, pytest.mark.in_portable_mode]


class LateClaims(DatabaseStore):
    """The second exchange reaches the database late, as it waits for SQLite's one writer."""

    calls = 0

    async def exchange(self, settlements: list[Ending], request: ClaimRequest) -> Exchange:  # type: ignore[override]
        self.calls += 1
        if self.calls == 2:
            await asyncio.sleep(0.3)
        return await super().exchange(settlements, request)


def test_no_entry_is_sent_twice_in_one_call(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=4)
    adapter = MemoryAdapter(lambda delivery: Deferred("busy", after=timedelta(0)))

    class Never:
        """Jitter of nothing: what waits is due again at once."""

        def random(self) -> float:
            return 0.0

        def getrandbits(self, bits: int) -> int:
            return adapter_token.pop()

    adapter_token = list(range(1, 1000))
    store = LateClaims(database.engine, ob.configuration)
    working = dispatcher(None, ob, adapters={"crm": adapter}, store=store, rng=Never())

    settled = asyncio.run(working.run_once())

    assert settled == 4
    assert len({delivery.id for delivery in adapter.deliveries}) == len(adapter.deliveries) == 4


def test_it_ends_if_the_database_fails_at_a_postponed_outcome(
    postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other loop waits for the outcome of this one, and for nothing else."""
    exchange = DatabaseStore.exchange

    async def postponing(self: DatabaseStore, settlements: Sequence[Ending], request: ClaimRequest | None) -> Exchange:
        if not settlements:
            return await exchange(self, settlements, request)
        await asyncio.sleep(0.05)  # meanwhile the other loop begins to wait
        if request is None:
            raise sa.exc.OperationalError("settle", None, ConnectionRefusedError())
        return Exchange(postponed=frozenset(entry.lease for entry, _ in settlements))

    monkeypatch.setattr(DatabaseStore, "exchange", postponing)
    put(postgresql, ob)

    async def main() -> None:
        working = dispatcher(postgresql.engine, ob, adapters={"crm": MemoryAdapter()})
        with pytest.raises(sa.exc.OperationalError):
            await asyncio.wait_for(working.run_once(), 30)

    asyncio.run(main())


def test_a_prepared_statement_of_an_altered_table_is_prepared_again(postgresql: Database, ob: outbox.Outbox) -> None:
    """The driver prepares what it executes often, and PostgreSQL refuses such a statement when its columns have changed."""
    engine = postgresql.new_engine(connect_args={"prepare_threshold": 0})
    working = dispatcher(engine, ob, adapters={"crm": MemoryAdapter()})

    async def sent_before_and_after() -> list[int]:
        counts = []
        for _ in range(3):
            put(postgresql, ob, count=1)
            counts.append(await working.run_once())
            kind = ("varchar(300)", "text")[len(counts) % 2]
            postgresql.execute(sa.text(f"ALTER TABLE outbox_entry ALTER COLUMN operation TYPE {kind}"))
        await working.close()
        return counts

    assert asyncio.run(sent_before_and_after()) == [1, 1, 1]


def test_a_second_call_meanwhile_is_refused(database: Database, ob: outbox.Outbox) -> None:
    """It would wait for the events of the first one, without end."""
    put(database, ob)
    sending, answered = asyncio.Event(), asyncio.Event()

    class Waiting(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            sending.set()
            await answered.wait()
            return await super().send(delivery)

    async def main() -> int:
        working = dispatcher(database, ob, adapters={"crm": Waiting()})
        first = asyncio.create_task(working.run_once())
        await sending.wait()
        for second in (working.run_once(), working.pump(asyncio.Event())):
            with pytest.raises(RuntimeError, match="is running already"):
                await asyncio.wait_for(second, 20)
        answered.set()
        return await first + await working.run_once()

    assert asyncio.run(main()) == 1
