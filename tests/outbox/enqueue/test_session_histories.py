"""An entry is committed if and only if the transaction and every savepoint around its enqueue are, whatever an app does."""

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from support.callbacks import Shop
from support.database import Database
from support.entries import put_one, state
from support.session_histories import Do, History, prepare, scripts, some

import outbox
from dispatchers.adapters import MemoryAdapter

EXAMPLES = int(os.environ.get("OUTBOX_TEST_EXAMPLES", "5"))
"""How many histories each test tries. Thousands find what is rare."""

CHECKS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    print_blob=True,
)
Run = Callable[[Callable[[Session], Any]], Any]


class Histories(RuleBasedStateMachine):
    """An app's session. kind: which of SQLAlchemy's it is."""

    def __init__(self, database: Database, ob: outbox.Outbox, kind: str) -> None:
        super().__init__()
        self.history = History(database, ob)
        self.ending = ExitStack()
        app_session = type("AppSession", (Session,), {})  # listeners of this history's own
        self.ending.enter_context(self.history.listening(app_session))
        self.facade, self.do = self._open(database, kind, app_session)
        self.history.facade = self.facade

    def _open(self, database: Database, kind: str, app_session: type[Session]) -> tuple[Any, Run]:
        if kind == "async":
            loop = asyncio.new_event_loop()
            engine = database.async_engine()
            session = AsyncSession(engine, sync_session_class=app_session)
            self.ending.callback(loop.close)
            self.ending.callback(lambda: loop.run_until_complete(engine.dispose()))
            self.ending.callback(lambda: loop.run_until_complete(session.close()))
            return session, lambda work: loop.run_until_complete(session.run_sync(work))
        maker = sessionmaker(database.engine, class_=app_session)
        if kind == "scoped":
            scoped = scoped_session(maker)
            self.ending.callback(scoped.remove)
            return scoped, lambda work: work(scoped())
        plain = maker()
        self.ending.callback(plain.close)
        return plain, lambda work: work(plain)

    def run(self, script: list[Any]) -> None:
        """What needs no I/O is done as an app with an AsyncSession does it: outside any greenlet."""
        for step in script:
            if isinstance(step, Do):
                self.do(lambda session, step=step: self.history.run(session, [step]))  # type: ignore[misc]
            else:
                self.history.run(self.facade, [step])

    @rule(before=some)
    def begin_nested(self, before: list[Any]) -> None:
        self.run(before)
        self.do(self.history.begin_nested)

    @precondition(lambda self: self.history.savepoints)
    @rule(before=some, end=st.sampled_from(["release", "rollback", "fail", "close"]), index=st.integers(-3, -1))
    def end_nested(self, before: list[Any], end: str, index: int) -> None:
        self.run(before)
        index = max(index, -len(self.history.savepoints))
        self.do(lambda session: self.history.end_nested(session, end, index))

    @rule(before=some)
    def commit(self, before: list[Any]) -> None:
        self.run(before)
        self.do(self.history.commit)
        self.history.check()

    @rule(before=some, failing=st.booleans())
    def rollback(self, before: list[Any], failing: bool) -> None:
        self.run(before)

        def roll_back(session: Session) -> None:
            if failing:
                self.history.collide(session)
            session.rollback()

        self.do(roll_back)
        self.history.forget()

    @rule(before=some)
    def close(self, before: list[Any]) -> None:
        self.run(before)
        self.do(lambda session: session.close())
        self.history.forget()

    @rule(script=scripts, end=st.sampled_from(["respond", "reject", "raise"]))
    def claim(self, script: list[Any], end: str) -> None:
        def work(session: Session) -> None:
            self.history.facade = session  # `run_sync` has no AsyncSession at hand
            self.history.claim(session, script, end)

        try:
            self.do(work)
        finally:
            self.history.facade = self.facade

    def teardown(self) -> None:
        try:
            with self.ending:
                self.do(self.history.commit)
            self.history.check()
        finally:
            self.ending.close()


@pytest.mark.parametrize("kind", ["plain", "async", "scoped"])
def test_entries_share_the_fate_of_their_savepoints(database: Database, ob: outbox.Outbox, kind: str) -> None:
    prepare(database)
    run_state_machine_as_test(lambda: Histories(database, ob, kind), settings=CHECKS)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_a_callback_enqueues_commits_with_the_settling(
    database: Database, ob: outbox.Outbox, is_async: bool
) -> None:
    prepare(database)

    @given(script=scripts)
    @settings(CHECKS)
    def check(script: list[Any]) -> None:
        history = History(database, ob)
        shop = Shop(database, ob, is_async=is_async)

        def callback(session: Session, settlement: object) -> None:
            with history.listening(session):
                history.run(session, script)
                session.flush()

        shop.on_settled(callback, "bank.charge")
        settled = put_one(database, ob, "bank.charge", parent=f"{history.prefix}settled")
        history.committed.add("settled")
        assert shop.run_once(adapters={"bank": MemoryAdapter(), "crm": MemoryAdapter()}) >= 1
        assert state(database, settled) == "delivered"
        history.committed.update(*history.frames)
        history.check()

    check()
