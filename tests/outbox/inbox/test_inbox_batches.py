"""Many messages in one transaction, whatever a handler does to it: what is acknowledged is committed, the rest comes again."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import Session
from support.consumer import Poison
from support.database import CHARGE, PAYLOAD, TABLES, Database, Order
from support.examples import divided
from support.inbox_batches import ACTIONS, ENDINGS, ENDINGS_BY_SQL, MESSAGES, SPOILT, Action, Batch, Step, fail

import outbox

pytestmark = pytest.mark.on_mariadb

kinds = pytest.mark.parametrize("driver", [None, "psycopg", "asyncpg"], ids=["session", "psycopg", "asyncpg"])
ended_on_its_connection = pytest.mark.filterwarnings(
    "ignore:.*already deassociated from connection:sqlalchemy.exc.SAWarning",
    "ignore:Session's state has been changed on a non-active transaction:sqlalchemy.exc.SAWarning",
)
steps_of_a_handler = st.lists(
    st.builds(lambda action, swallowed: Step(action, swallowed=swallowed), st.sampled_from(ACTIONS), st.booleans()),
    max_size=3,
)


@ended_on_its_connection
@kinds
@given(before=steps_of_a_handler, after=steps_of_a_handler, begun=st.booleans(), again=st.booleans())
@settings(max_examples=divided(over=3), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_handler_does_each_message_is_handled_once(
    postgresql: Database,
    ob: outbox.Outbox,
    driver: str | None,
    before: list[Step],
    after: list[Step],
    begun: bool,
    again: bool,
) -> None:
    batch = Batch(postgresql, ob, driver, begun=begun)
    if again:  # the spoilt one is a duplicate
        Batch.run(only := Batch(postgresql, ob, driver, begun=True))
        only.prefix, batch.prefix = batch.prefix, only.prefix

    acknowledged = batch.run(before, after)

    assert acknowledged <= set(batch.kept), "lost"
    assert again or set(batch.kept) == acknowledged

    assert batch.run() == set(range(MESSAGES))
    assert batch.kept == dict.fromkeys(range(MESSAGES), 1)


@ended_on_its_connection
@kinds
@pytest.mark.parametrize("begun", [True, False], ids=["begin", "autobegin"])
@pytest.mark.parametrize("fails", [False, True], ids=["and continue", "and raise"])
def test_after_the_transaction_was_ended_every_use_raises_one_error(
    postgresql: Database, ob: outbox.Outbox, driver: str | None, begun: bool, fails: bool
) -> None:
    for ending in ENDINGS + ENDINGS_BY_SQL:
        batch = Batch(postgresql, ob, driver, begun=begun)
        steps = [Step(ending, swallowed=True), *([Step(fail, swallowed=False)] if fails else [])]

        assert batch.run(after=steps) == set(), ending
        assert isinstance(batch.refusal, outbox.ClaimLost), (ending, batch.refusal)
        assert all(batch.errors[number] is batch.refusal for number in range(SPOILT + 1, MESSAGES)), (
            ending,
            batch.errors,
        )
        assert str(batch.refusal) == (
            f"the transaction of message {batch.name(SPOILT)!r} was rolled back, closed or committed inside its outbox.inbox"
            " block, and cannot be committed any more: roll the session back after the block, and acknowledge none of the"
            " messages that were handled in this transaction, so that all of them are redelivered"
        )
        assert not batch.kept, ending


def uses(ob: outbox.Outbox) -> list[Action]:
    return [
        lambda session: session.execute(sa.select(Order)),
        lambda session: session.scalars(sa.text("SELECT 1")),
        lambda session: (session.add(Order(customer="ada", amount=1)), session.flush()),
        lambda session: ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42"),
        lambda session: ob.inbox(session, consumer="billing", message_id="evt_2", scope="shop").__enter__(),
        lambda session: ob.idempotent(session, "retry-001", scope="acct_1", content=b"").__enter__(),
        lambda session: session.commit(),
    ]


def test_a_session_whose_transaction_was_ended_is_usable_after_a_rollback(
    database: Database, ob: outbox.Outbox
) -> None:
    for number, use in enumerate(uses(ob)):
        with database.session() as session:
            with (
                pytest.raises(outbox.ClaimLost) as caught,
                ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop"),
            ):
                session.rollback()
            with pytest.raises(outbox.ClaimLost) as again:
                use(session)
            assert again.value is caught.value

            session.rollback()
            with ob.inbox(session, consumer="billing", message_id=f"evt_1{number}", scope="shop") as message:
                session.add(Order(customer=message.parent.key, amount=1))
            session.commit()

    assert len(database.orders) == len(database.records) == len(uses(ob))


def test_a_handlers_own_error_is_the_cause_of_the_loss(database: Database, ob: outbox.Outbox) -> None:
    def consume(session: Session) -> None:
        with ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop"):
            with suppress(outbox.ClaimLost):
                session.rollback()
            raise Poison

    with database.session() as session, pytest.raises(outbox.ClaimLost) as caught:
        consume(session)

    assert isinstance(caught.value.__cause__, Poison)


def test_an_exit_at_which_the_handler_rolls_back_is_still_an_exit(database: Database, ob: outbox.Outbox) -> None:
    def consume(session: Session) -> None:
        with ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop"):
            try:
                raise SystemExit
            except BaseException:
                session.rollback()
                raise

    with database.session() as session, pytest.raises(SystemExit):
        consume(session)


def test_a_cancelled_task_whose_handler_rolls_back_is_cancelled(database: Database, ob: outbox.Outbox) -> None:
    async def consume(inside: asyncio.Event) -> None:
        async with (
            database.async_session() as session,
            ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop"),
        ):
            try:
                inside.set()
                await asyncio.Event().wait()
            except BaseException:
                await session.rollback()
                raise

    async def cancel() -> bool:
        task = asyncio.create_task(consume(inside := asyncio.Event()))
        await inside.wait()
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancel())


# --- a claim that the database ends


def test_a_claim_that_fails_in_the_database_dooms_the_batch(postgresql: Database, ob: outbox.Outbox) -> None:
    """PostgreSQL answers the COMMIT of a transaction in which a statement failed with a ROLLBACK, and no error."""
    with postgresql.begin() as session, ob.inbox(session, consumer="billing", message_id="evt_2", scope="shop"):
        pass
    postgresql.age_records(timedelta(days=36))  # so that the claim deletes it, and waits for who locks it
    with postgresql.session() as session, postgresql.begin() as other:
        with ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop"):
            session.add(Order(customer="evt_1", amount=1))
        session.execute(sa.text("SET LOCAL statement_timeout = '50ms'"))
        other.execute(sa.select(TABLES.record).with_for_update())
        with pytest.raises(outbox.KeyInFlight, match="message 'evt_2' is being handled"):
            ob.inbox(session, consumer="billing", message_id="evt_2", scope="shop").__enter__()

        with pytest.raises(
            outbox.ClaimLost, match="do not answer or acknowledge anything that was done in this transaction"
        ):
            session.commit()


def test_two_batches_that_wait_for_each_other_both_commit(postgresql: Database, ob: outbox.Outbox) -> None:
    """PostgreSQL ends the deadlock: one gets the error that a message is in flight, and continues without it."""
    barrier = threading.Barrier(2)

    def consume(names: list[str]) -> list[str]:
        refused: list[str] = []
        with postgresql.begin() as session:
            for name in names:
                wait = timedelta(seconds=30)
                block = ob.inbox(session, consumer="billing", message_id=name, scope="shop", wait=wait)
                try:
                    with block as message:
                        if not message.duplicate:
                            session.add(Order(customer=name, amount=1))
                except outbox.KeyInFlight:
                    refused.append(name)
                if name == names[0]:
                    barrier.wait(60)
        return refused

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(consume, (["evt_1", "evt_2"], ["evt_2", "evt_1"]))

    assert sorted([first, second]) in ([[], ["evt_1"]], [[], ["evt_2"]])
    assert sorted(order.customer for order in postgresql.orders) == ["evt_1", "evt_2"]


def test_a_timeout_while_a_claim_waits_leaves_the_batch_as_it_was(postgresql: Database, ob: outbox.Outbox) -> None:
    waiting = {"consumer": "billing", "scope": "shop", "wait": timedelta(seconds=30)}
    with postgresql.begin() as other, ob.inbox(other, **waiting, message_id="evt_2"):  # type: ignore[arg-type]
        with postgresql.begin() as session:
            with ob.inbox(session, **waiting, message_id="evt_1"):  # type: ignore[arg-type]
                session.add(Order(customer="evt_1", amount=1))
            session.execute(sa.text("SET LOCAL statement_timeout = '50ms'"))
            block = ob.inbox(session, **waiting, message_id="evt_2")  # type: ignore[arg-type]
            with pytest.raises(outbox.KeyInFlight, match="message 'evt_2' is being handled"):
                block.__enter__()

        assert [order.customer for order in postgresql.orders] == ["evt_1"]
