"""Many messages in one transaction, whatever a handler does to it: what is acknowledged is committed, the rest comes again."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from support.consumer import Poison
from support.database import CHARGE, PAYLOAD, TABLES, Database, Order, colliding_order, statements_of

import outbox

Action = Callable[[Session], object]
MESSAGES = 4
SPOILT = 1  # the message of the batch whose handler misbehaves


# --- what a handler may do to the transaction that is not its own


def roll_back(session: Session) -> None:
    session.rollback()


def close(session: Session) -> None:
    session.close()


def roll_back_and_close(session: Session) -> None:
    try:
        session.rollback()
    finally:
        session.close()


def roll_back_inside_a_savepoint(session: Session) -> None:
    with session.begin_nested():
        session.rollback()


def close_inside_a_savepoint(session: Session) -> None:
    with session.begin_nested():
        session.close()


def reset(session: Session) -> None:
    session.reset()


def invalidate(session: Session) -> None:
    session.invalidate()


def roll_back_the_blocks_savepoint(session: Session) -> None:
    savepoint = session.get_nested_transaction()
    assert savepoint is not None
    savepoint.rollback()


def roll_back_the_sessions_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.rollback()


def roll_back_on_the_connection(session: Session) -> None:
    session.connection().rollback()


def roll_back_by_sql(session: Session) -> None:
    session.execute(sa.text("ROLLBACK"))


def roll_back_by_sql_and_begin(session: Session) -> None:
    session.execute(sa.text("ROLLBACK"))
    session.execute(sa.text("BEGIN"))


def fail_a_flush(session: Session) -> None:
    session.add_all([colliding_order(), colliding_order()])
    session.flush()


def fail_a_flush_and_roll_back(session: Session) -> None:
    try:
        fail_a_flush(session)
    except sa.exc.IntegrityError:
        session.rollback()


def fail_a_statement(session: Session) -> None:
    session.execute(sa.text("SELECT 1 / 0"))


def commit(session: Session) -> None:
    session.commit()


def roll_back_a_savepoint_of_its_own(session: Session) -> None:
    session.begin_nested().rollback()


def read(session: Session) -> None:
    session.scalars(sa.select(Order)).all()


def fail(session: Session) -> None:
    raise Poison


INSIDE_A_SAVEPOINT: list[Action] = [roll_back_inside_a_savepoint, close_inside_a_savepoint]
ENDINGS: list[Action] = [
    roll_back,
    close,
    roll_back_and_close,
    *INSIDE_A_SAVEPOINT,
    reset,
    invalidate,
    roll_back_the_sessions_transaction,
    roll_back_on_the_connection,
    fail_a_flush_and_roll_back,
]
"""What ends the batch's transaction, were it not for the guard."""

ENDINGS_BY_SQL: list[Action] = [roll_back_by_sql, roll_back_by_sql_and_begin]
"""These nothing can prevent. With asyncpg each statement after them is a transaction of its own."""

ACTIONS: list[Action] = [
    *ENDINGS,
    roll_back_the_blocks_savepoint,
    fail_a_flush,
    fail_a_statement,
    commit,
    roll_back_a_savepoint_of_its_own,
    read,
    fail,
]


class Step:
    """One action; `swallowed`: the handler continues after an error of it."""

    def __init__(self, action: Action, *, swallowed: bool) -> None:
        self.action = action
        # Inside its own savepoint's block a session cannot be kept from a second ending: SQLAlchemy begins no savepoint there.
        self.swallowed = swallowed and action not in INSIDE_A_SAVEPOINT

    def __repr__(self) -> str:
        return self.action.__name__ + (" and continue" if self.swallowed else "")

    def __call__(self, session: Session) -> None:
        try:
            self.action(session)
        except Exception:
            if not self.swallowed:
                raise


class Batch:
    """A consumer that handles its messages in one transaction, and acknowledges after the commit what came out of its block.

    begun: by `session.begin()`, else by the first statement, and committed with `session.commit()`.
    errors: what came out of each block. refusal: what came out of the commit.
    """

    def __init__(self, database: Database, ob: outbox.Outbox, driver: str | None, *, begun: bool) -> None:
        self.ob = ob
        self.begun = begun
        self.prefix = uuid4().hex[:8]
        self.errors: dict[int, Exception] = {}
        self.refusal: Exception | None = None
        self._database = database
        self._driver = driver

    def run(self, steps: list[Step] = [], after: list[Step] = []) -> set[int]:  # noqa: B006  # read only
        """Handle them all; the spoilt one's handler takes `steps`, writes its order, and takes those of `after`. Returns which
        are acknowledged."""
        self.errors, self.refusal = {}, None
        handled: set[int] = set()

        def handle(session: Session, number: int, message: outbox.InboxMessage) -> None:
            spoilt = number == SPOILT
            for step in steps if spoilt else []:
                step(session)
            if not message.duplicate:
                session.add(Order(customer=self.name(number), amount=1))
                self.ob.enqueue(session, CHARGE, PAYLOAD)
            for step in after if spoilt else []:
                step(session)

        def consume(session: Session) -> None:
            for number in range(MESSAGES):
                try:
                    with self.block(session, number) as message:
                        handle(session, number, message)
                    handled.add(number)
                except Exception as error:
                    self.errors[number] = error

        async def consume_async(session: AsyncSession) -> None:
            for number in range(MESSAGES):
                try:
                    async with self.block(session, number) as message:
                        await session.run_sync(handle, number, message)
                    handled.add(number)
                except Exception as error:
                    self.errors[number] = error

        async def in_async_session() -> None:
            async with AsyncSession(self._async_engine()) as session:
                if self.begun:
                    async with session.begin():
                        await consume_async(session)
                else:
                    await consume_async(session)
                    await session.commit()

        def in_session() -> None:
            with self._database.session() as session:
                if self.begun:
                    with session.begin():
                        consume(session)
                else:
                    consume(session)
                    session.commit()

        try:
            asyncio.run(in_async_session()) if self._driver else in_session()
        except Exception as error:
            self.refusal = error
            return set()
        return handled

    def block(self, session: Any, number: int) -> Any:
        return self.ob.inbox(session, consumer="billing", message_id=self.name(number), scope="shop")

    def name(self, number: int) -> str:
        return f"{self.prefix}-{number}"

    @property
    def kept(self) -> Counter[int]:
        """The orders that are committed."""
        orders = (order.customer.partition("-") for order in self._database.orders)
        return Counter(int(number) for prefix, _, number in orders if prefix == self.prefix)

    def _async_engine(self) -> Any:
        url = self._database.url.set(drivername=f"postgresql+{self._driver}")
        return sa.ext.asyncio.create_async_engine(url, poolclass=sa.NullPool)


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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        lambda session: ob.idempotent(session, "retry-001", scope="acct_1", request=b"").__enter__(),
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


# --- a duplicate whose handler forgot to look


INSERT = "INSERT INTO shop_order (customer, amount) VALUES ('twice', 1)"


def add(session: Session) -> None:
    session.add(Order(customer="twice", amount=1))


def add_and_flush(session: Session) -> None:
    session.add(Order(customer="twice", amount=1))
    session.flush()


def change(session: Session) -> None:
    session.scalars(sa.select(Order)).first().amount += 1  # type: ignore[union-attr]


def change_in_bulk(session: Session) -> None:
    session.execute(sa.update(Order).values(amount=7))


def delete(session: Session) -> None:
    session.delete(session.scalars(sa.select(Order)).first())


def insert_in_bulk(session: Session) -> None:
    session.bulk_save_objects([Order(customer="twice", amount=1)])


def insert_into_the_table(session: Session) -> None:
    session.connection().execute(sa.insert(Order).values(customer="twice", amount=1))


def insert_as_text(session: Session) -> None:
    session.execute(sa.text(INSERT))


def insert_as_text_after_a_comment(session: Session) -> None:
    session.execute(sa.text(f"/* app */ -- of the shop\n {INSERT}"))


def insert_through_the_driver(session: Session) -> None:
    session.connection().exec_driver_sql(INSERT)


def insert_and_continue(session: Session) -> None:
    with suppress(outbox.AlreadyAnswered):
        session.execute(sa.text(INSERT))
    session.scalars(sa.select(Order)).all()


def add_and_continue(session: Session) -> None:
    session.add(Order(customer="twice", amount=1))
    with suppress(outbox.AlreadyAnswered):
        session.flush()


def insert_on_the_drivers_connection(session: Session) -> None:
    session.connection().connection.cursor().execute(INSERT)


FORGOTTEN: list[Action] = [
    add,
    add_and_flush,
    change,
    change_in_bulk,
    delete,
    insert_in_bulk,
    insert_into_the_table,
    insert_as_text,
    insert_as_text_after_a_comment,
    insert_through_the_driver,
    add_and_continue,
]


def consume_with_a_duplicate(database: Database, ob: outbox.Outbox, forgotten: Action) -> dict[str, Exception]:
    """Three messages in one transaction, of which the second was handled before; its handler writes all the same."""
    errors: dict[str, Exception] = {}
    prefix = uuid4().hex

    def consume(session: Session, number: int) -> None:
        name = f"{prefix}-{number}"
        try:
            with ob.inbox(session, consumer="billing", message_id=name, scope="shop") as message:
                if message.duplicate:
                    forgotten(session)
                else:
                    session.add(Order(customer=name, amount=1))
        except Exception as error:
            errors[name] = error

    with database.begin() as session:
        consume(session, 1)
    with database.begin() as session:
        for number in range(3):
            consume(session, number)

    orders = [(order.customer, order.amount) for order in database.orders if not order.customer.startswith("old")]
    assert sorted(orders) == [(f"{prefix}-{number}", 1) for number in range(3)], forgotten
    database.execute(sa.update(Order).values(customer="old"))
    return errors


def test_a_duplicate_whose_handler_writes_costs_the_batch_nothing(database: Database, ob: outbox.Outbox) -> None:
    for forgotten in FORGOTTEN:
        (error,) = consume_with_a_duplicate(database, ob, forgotten).values()

        assert isinstance(error, outbox.AlreadyAnswered), forgotten


def test_what_a_duplicates_handler_writes_unrecognised_is_undone(postgresql: Database, ob: outbox.Outbox) -> None:
    postgresql.execute(sa.text(f"CREATE FUNCTION place() RETURNS int LANGUAGE sql AS $$ {INSERT} RETURNING id $$"))
    selects: list[Action] = [
        insert_on_the_drivers_connection,
        insert_and_continue,
        lambda session: session.execute(sa.text("SELECT place()")),
        lambda session: session.execute(sa.select(sa.func.place())),
        lambda session: session.execute(sa.text(f"WITH o AS ({INSERT} RETURNING id) SELECT * FROM o")),
    ]
    for forgotten in selects:
        assert consume_with_a_duplicate(postgresql, ob, forgotten) == {}


def test_a_duplicates_handler_cannot_write_on_an_older_connection(postgresql: Database, ob: outbox.Outbox) -> None:
    postgresql.execute(sa.text(f"CREATE FUNCTION place() RETURNS int LANGUAGE sql AS $$ {INSERT} RETURNING id $$"))
    for _ in range(2):
        with postgresql.begin() as session:
            connection = session.connection()
            with ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop") as message:
                if message.duplicate:
                    connection.execute(sa.text("SELECT place()"))

    assert postgresql.orders == []


def test_a_duplicate_that_is_looked_at_takes_one_statement(postgresql: Database, ob: outbox.Outbox) -> None:
    for _ in range(2):
        with postgresql.begin() as session:
            session.connection()
            block = ob.inbox(session, consumer="billing", message_id="evt_1", scope="shop")
            with statements_of(postgresql.engine) as sent, block as message:
                pass

    assert message.duplicate
    assert len(sent) == 1


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
                block = ob.inbox(
                    session, consumer="billing", message_id=name, scope="shop", in_flight="wait", wait=wait
                )
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
    waiting = {"consumer": "billing", "scope": "shop", "in_flight": "wait", "wait": timedelta(seconds=30)}
    with postgresql.begin() as other, ob.inbox(other, **waiting, message_id="evt_2"):  # type: ignore[arg-type]
        with postgresql.begin() as session:
            with ob.inbox(session, **waiting, message_id="evt_1"):  # type: ignore[arg-type]
                session.add(Order(customer="evt_1", amount=1))
            session.execute(sa.text("SET LOCAL statement_timeout = '50ms'"))
            block = ob.inbox(session, **waiting, message_id="evt_2")  # type: ignore[arg-type]
            with pytest.raises(outbox.KeyInFlight, match="message 'evt_2' is being handled"):
                block.__enter__()

        assert [order.customer for order in postgresql.orders] == ["evt_1"]
