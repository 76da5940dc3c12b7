"""What the tests of the inbox share: consumers that handle messages, and one elsewhere that is at it already."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import outbox
from outbox.inboxes import MessageIdentity
from support.database import CHARGE, PAYLOAD, Database, Order
from support.relays import Relay, relay

ORDER = {"amount": 2000}
"""What each message carries, as JSON."""


class Poison(Exception):
    """What the consumer raises for a message that it cannot handle."""


class Crash(BaseException):
    """The process dies: between the commit and the acknowledgement, say."""


class Billing:
    """Places an order and enqueues its charge for each message, in a transaction of its own.

    poison: the ids of the messages at which it fails, when its work is done and flushed.
    duplicates: the ids of those that it had handled before.
    attempts: how often it was called.
    before_attempt: what happens elsewhere just before the attempt of this number.
    dies_after_its_commit, dies_at_work: at the next message.
    """

    def __init__(self, database: Database, ob: outbox.Outbox) -> None:
        self.poison: set[str] = set()
        self.duplicates: list[str] = []
        self.attempts = 0
        self.before_attempt: dict[int, Callable[[], object]] = {}
        self.dies_after_its_commit = self.dies_at_work = False
        self._database = database
        self._ob = ob

    def handle(self, identity: MessageIdentity, order: Mapping[str, int] = ORDER) -> None:
        """What every recipe does between receiving a message and acknowledging it."""
        self.attempts += 1
        self.before_attempt.get(self.attempts, lambda: None)()
        with (
            self._database.begin() as session,
            self._ob.inbox(session, consumer="billing", **identity) as message,
        ):
            if message.duplicate:
                self.duplicates.append(message.parent.key)
            else:
                self.work(session, message, order)
                self._die_if(self.dies_at_work)
        self._die_if(self.dies_after_its_commit)

    def _die_if(self, dies: bool) -> None:
        if dies:
            self.dies_at_work = self.dies_after_its_commit = False
            raise Crash

    def work(self, session: Session, message: outbox.InboxMessage, order: Mapping[str, int] = ORDER) -> None:
        session.add(Order(customer=message.parent.key, amount=order["amount"]))
        self._ob.enqueue(session, CHARGE, PAYLOAD)
        session.flush()
        if message.parent.key in self.poison:
            raise Poison(message.parent.key)

    @contextmanager
    def elsewhere(self, identity: MessageIdentity) -> Iterator[None]:
        """During the block another process has the message in its hands; at its end, that process commits."""
        with (
            self._database.begin() as session,
            self._ob.inbox(session, consumer="billing", **identity) as message,
        ):
            self.work(session, message)
            yield

    @property
    def orders(self) -> list[str]:
        """The ids of the messages that were handled, as the database has them."""
        return sorted(order.customer for order in self._database.orders)

    @property
    def nothing_is_stored(self) -> bool:
        return not any(self._database.counts().values())


@contextmanager
def through_a_relay(database: Database, ob: outbox.Outbox) -> Iterator[tuple[Billing, Relay]]:
    """A Billing whose database is unavailable while the relay refuses. A connection is in its pool already."""
    with relay(database.url) as (between, url):
        reached = Database(url)
        with reached.begin() as session:
            session.execute(sa.text("SELECT 1"))
        yield Billing(reached, ob), between
        reached.dispose()


def until(done: Callable[[], object], step: Callable[[], object], max_seconds: float = 20) -> None:
    """Take steps, each of which waits for the broker by itself, until it is done."""
    deadline = time.monotonic() + max_seconds
    while not done():
        assert time.monotonic() < deadline, f"not done after {max_seconds} s"
        step()


class Consumer:
    """Consumes the message `evt_1`, with a Session or an AsyncSession; its handler is `handler(session, message)`."""

    def __init__(self, database: Database, ob: outbox.Outbox, *, is_async: bool) -> None:
        self.database = database
        self.ob = ob
        self.is_async = is_async

    def consume(
        self,
        handler: Callable[[Session, outbox.InboxMessage], object] | None = None,
        *,
        even_a_duplicate: bool = False,
        **changed: Any,
    ) -> outbox.InboxMessage:
        """Handle the message and commit. Returns the `InboxMessage`."""
        handle = handler or self.place_order

        def work(session: Session, message: outbox.InboxMessage) -> None:
            if even_a_duplicate or not message.duplicate:
                handle(session, message)

        async def run() -> outbox.InboxMessage:
            async with self.database.async_session() as session:
                async with self.block(session, **changed) as message:
                    await session.run_sync(work, message)
                await session.commit()
            return message

        if self.is_async:
            return asyncio.run(run())
        with self.database.session() as session:
            with self.block(session, **changed) as message:
                work(session, message)
            session.commit()
        return message

    def place_order(self, session: Session, message: outbox.InboxMessage) -> None:
        session.add(Order(customer="ada", amount=2000))
        self.ob.enqueue(session, CHARGE, PAYLOAD)

    def block(self, session: Session | AsyncSession, **changed: Any) -> Any:
        return self.ob.inbox(session, **{"consumer": "billing", "message_id": "evt_1", "scope": "shop"} | changed)


def wait_until_one_waits_for_a_lock(database: Database) -> None:
    waiting = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    deadline = time.monotonic() + 30
    with database.unprepared_engine(isolation_level="AUTOCOMMIT").connect() as connection:
        while not connection.scalar(waiting):
            assert time.monotonic() < deadline, "no process waits"
