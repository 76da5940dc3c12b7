"""What the tests of leased claims share: a shop that charges inside the request, sync and async alike."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

import outbox
from outbox.requests.leases import LeasedAttempt, LeasedBlock
from support.database import CHARGE, PAYLOAD, REQUEST, TABLES, Database, Order
from support.retention import shift

RECEIPT = "email.send"
KEY = "retry-001"
MINUTE = timedelta(minutes=1)


class Shop:
    """Handles one leased request at a time. Nested requests, by another shop, are sync ones."""

    def __init__(self, database: Database, ob: outbox.Outbox, *, is_async: bool = False) -> None:
        self.database = database
        self.ob = ob
        self.is_async = is_async

    def block(self, source: Any, **changed: Any) -> LeasedBlock:
        arguments = {"key": KEY, "scope": "acct_1", "content": REQUEST} | changed
        return self.ob.leased(source, **arguments)

    def request(
        self,
        call_out: Callable[[LeasedAttempt], object] = lambda claim: None,
        write: Callable[[Session, outbox.Claim], object] | None = None,
        **changed: Any,
    ) -> outbox.Response:
        """`call_out(claim)` without a transaction, then `write(session, fence)` in one. Returns the answer, new or replayed."""
        place = write or self.place_order

        async def run_async() -> outbox.Response:
            async with self.block(self.database.async_engine(), **changed) as claim:
                if claim.replayed:
                    return claim.require_response()
                call_out(claim)
                async with self.database.async_session() as session, session.begin(), claim.fence(session) as fence:
                    await session.run_sync(place, fence)
            return claim.require_response()

        def run() -> outbox.Response:
            with self.block(self.database.engine, **changed) as claim:
                if claim.replayed:
                    return claim.require_response()
                call_out(claim)
                with self.database.session() as session, session.begin(), claim.fence(session) as fence:
                    place(session, fence)
            return claim.require_response()

        return asyncio.run(run_async()) if self.is_async else run()

    def place_order(self, session: Session, fence: outbox.Claim) -> None:
        session.add(Order(customer="ada", amount=2000))
        self.ob.enqueue(session, RECEIPT, PAYLOAD)
        fence.respond(201, {"order": "placed"})

    def run_out(self, by: timedelta = MINUTE) -> None:
        """As if every lease had run out."""
        shift(self.database, TABLES.record.c.lease_until, MINUTE + by, TABLES.record.c.state == "leased")

    def record(self) -> sa.Row[Any]:
        (record,) = self.database.records
        return record


def charge_key(claim: LeasedAttempt) -> str:
    return claim.child_key(CHARGE)
