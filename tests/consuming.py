"""What the tests of the inbox share: a consumer that handles messages, and one elsewhere that is at it already."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy.orm import Session
from support import CHARGE, PAYLOAD, Database, Order

import outbox
from outbox.inboxes import MessageIdentity


class Poison(Exception):
    """What the consumer raises for a message that it cannot handle."""


class Crash(BaseException):
    """The process dies: between the commit and the acknowledgement, say."""


class Billing:
    """Places an order and enqueues its charge for each message, in a transaction of its own.

    poison: the ids of the messages at which it fails, when its work is done and flushed.
    duplicates: the ids of those that it had handled before.
    """

    def __init__(self, database: Database, ob: outbox.Outbox) -> None:
        self.poison: set[str] = set()
        self.duplicates: list[str] = []
        self._database = database
        self._ob = ob

    def handle(self, identity: MessageIdentity) -> None:
        """What every recipe does between receiving a message and acknowledging it."""
        with (
            self._database.begin() as session,
            self._ob.inbox(session, consumer="billing", **identity) as message,
        ):
            if message.duplicate:
                self.duplicates.append(message.parent.key)
                return
            self.work(session, message)

    async def handle_async(self, identity: MessageIdentity) -> None:
        async with (
            self._database.async_session() as session,
            session.begin(),
            self._ob.inbox(session, consumer="billing", **identity) as message,
        ):
            if message.duplicate:
                self.duplicates.append(message.parent.key)
                return
            await session.run_sync(self.work, message)

    def work(self, session: Session, message: outbox.InboxMessage) -> None:
        session.add(Order(customer=message.parent.key, amount=2000))
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


def until(done: Callable[[], object], step: Callable[[], object], steps_max: int = 100) -> None:
    """Take steps, each of which waits for the broker by itself, until it is done."""
    for _ in range(steps_max):
        if done():
            return
        step()
    raise AssertionError(f"not done after {steps_max} steps")
