"""Batches of messages in one transaction, and what a handler may do to it."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import outbox
from support.consumer import Poison
from support.database import CHARGE, PAYLOAD, Database, Order, colliding_order

Action = Callable[[Session], object]
MESSAGES = 4
SPOILT = 1  # the message of the batch whose handler misbehaves


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
