"""The shop that the tests of outbox.http have in each framework: what a request's body has it do."""

from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox.http import Policy
from support.database import CHARGE, PAYLOAD, Database, Order

HEADERS = {"Location": "/orders/1", "X-Trace": "t1", "Set-Cookie": "cart=; Max-Age=0"}
CHUNKS = [b"first,", b"second"]
CALLERS = {"ada-token": "ada", "bob-token": "bob"}


@dataclass
class Shop:
    """What the handlers of every framework share. calls: how often a handler ran. deferred: what ran after an answer."""

    database: Database
    ob: outbox.Outbox
    settings: dict[str, Any] = field(default_factory=dict)
    engine_settings: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    deferred: list[dict[str, int]] = field(default_factory=list)
    entered: Event = field(default_factory=Event)
    may_leave: Event = field(default_factory=Event)
    has_deferred: Event = field(default_factory=Event)

    @property
    def policy(self) -> Policy:
        return Policy(outbox=self.ob, **self.settings)

    def sessions(self) -> sessionmaker[Session]:
        return sessionmaker(self.database.engine.execution_options(**self.engine_settings))

    def async_sessions(self) -> async_sessionmaker[AsyncSession]:
        return async_sessionmaker(self.database.async_engine(**self.engine_settings))

    def work(self, session: Session, claim: outbox.Claim, do: str) -> outbox.Response | None:
        """Place an order and charge for it; then call `do`. Returns the answer, if the claim got one."""
        self.calls += 1
        session.add(Order(customer="ada", amount=2000))
        self.ob.enqueue(session, CHARGE, PAYLOAD)
        match do:
            case "choose" | "contradict" | "choose and abort":
                return claim.respond(402, {"error": "declined"}, headers={"X-Reason": "declined"})
            case "reject":
                return claim.reject(402, {"error": "declined"})
            case "raise":
                raise RuntimeError("the handler failed")
            case "commit fails":
                session.execute(sa.text("INSERT INTO fussy VALUES (1), (1)"))
            case "meets another":
                self.meet_another()
                session.execute(sa.text("UPDATE hot SET n = n + 1"))
            case "meets another at its commit":
                self.meet_another()
                session.execute(sa.text("INSERT INTO late VALUES (1)"))
            case "takes too long":
                session.execute(sa.text("SELECT pg_sleep(60)"))
            case "commits itself":
                session.commit()
            case "collide and abort":
                session.add_all([Order(customer="ada", amount=13), Order(customer="ada", amount=13)])
                with suppress(sa.exc.IntegrityError):
                    session.flush()
            case "roll back and abort":
                with suppress(outbox.ClaimLost):
                    session.rollback()
            case "close and abort":
                with suppress(outbox.ClaimLost):
                    session.close()
            case "wait":
                session.flush()
        return None

    def meet_another(self) -> None:
        """Let another transaction change the row that this one, whose snapshot is older, is to change; the first time only."""
        if self.calls == 1:
            self.database.execute(sa.text("UPDATE hot SET n = n + 1"))

    def wait(self, do: str) -> None:
        """Hold a handler that is to wait until the test lets it leave."""
        if do == "wait":
            self.entered.set()
            assert self.may_leave.wait(60)

    def defer(self) -> None:
        self.deferred.append(self.database.counts())
        self.has_deferred.set()


def shop_with_a_hot_row(database: Database, ob: outbox.Outbox) -> Shop:
    """A shop at REPEATABLE READ, where "meets another" and "meets another at its commit" end with 40001."""
    for statement in (
        "CREATE TABLE hot (n int)",
        "INSERT INTO hot VALUES (0)",
        "CREATE TABLE late (id int)",
        "CREATE FUNCTION warm() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN UPDATE hot SET n = n + 1; RETURN NULL; END'",
        "CREATE CONSTRAINT TRIGGER warm AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION warm()",
    ):
        database.execute(sa.text(statement))
    return Shop(database, ob, engine_settings={"isolation_level": "REPEATABLE READ"})
