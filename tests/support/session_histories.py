"""What an app may do to its session, in any order, and the one rule that its entries must obey.

A `History` does it, and keeps in `frames` what was enqueued in the transaction and in each open savepoint: what must be committed
if these are, and must not if they are not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa
from hypothesis import strategies as st
from sqlalchemy.orm import Session, SessionTransaction, object_session

import outbox
from support.database import REQUEST, TABLES, Database, Order, colliding_order

_numbers = count(1)
_STANDING = 1_000_000  # the id of an order that is always there


class Do(NamedTuple):
    """A step that enqueues nothing."""

    step: str


class Enqueue(NamedTuple):
    name: int


class Listen(NamedTuple):
    """At this moment a listener enqueues, once, and then lets the session forget its objects where `forget` says so.

    is_first: it is called before the outbox's own listener.
    """

    moment: str
    is_first: bool
    name: int
    forget: str


class Nested(NamedTuple):
    """A savepoint, with what is done in it."""

    script: "list[Any]"
    end: Literal["release", "rollback", "fail", "close"]


MOMENTS = ("before_flush", "after_flush", "after_flush_postexec", "before_commit", "after_transaction_create")
MAPPER_MOMENTS = ("before_insert", "after_insert", "after_update")


def _change(session: Session) -> None:
    order = session.scalars(sa.select(Order).where(Order.id == _STANDING)).one()
    order.amount += 100


STEPS: dict[str, Callable[[Session], object]] = {
    "add": lambda session: session.add(Order(customer="ada", amount=2000)),
    "change": _change,
    "query": lambda session: session.scalars(sa.select(Order).limit(2)).all(),
    "flush": lambda session: session.flush(),
    "autoflush": lambda session: setattr(session, "autoflush", not session.autoflush),
    "expire": lambda session: [session.expire(each) for each in list(session.identity_map.values())[:1]],
    "expire_all": lambda session: session.expire_all(),
    "expunge": lambda session: [session.expunge(each) for each in list(session)[:1]],
    "expunge_all": lambda session: session.expunge_all(),
    "merge": lambda session: session.merge(Order(id=_STANDING, customer="bob", amount=3000)),
    "bulk": lambda session: session.execute(sa.insert(Order), [{"customer": "eve", "amount": n} for n in (1, 2)]),
    "bulk_save": lambda session: session.bulk_save_objects([Order(customer="eve", amount=3)]),
    "core": lambda session: session.connection().execute(sa.insert(Order).values(customer="eve", amount=4)),
}

names = st.integers(0, 4)
steps = st.builds(Do, st.sampled_from(sorted(STEPS)))
listens = st.builds(
    Listen,
    st.sampled_from(MOMENTS + MAPPER_MOMENTS),
    st.booleans(),
    names,
    st.sampled_from(["", "expire_all", "expunge_all"]),
)
single = st.one_of(st.builds(Enqueue, names), steps, listens)
some = st.lists(single, max_size=4)
scripts = st.lists(
    st.recursive(
        single,
        lambda inner: st.builds(
            Nested, st.lists(inner, max_size=5), st.sampled_from(["release", "rollback", "fail", "close"])
        ),
        max_leaves=6,
    ),
    max_size=8,
)


class History:
    """What is done to one plain session, and what of it must be committed. facade: what `enqueue` is handed."""

    def __init__(self, database: Database, ob: outbox.Outbox) -> None:
        self.database = database
        self.ob = ob
        self.prefix = f"history {next(_numbers)}/"
        self.facade: Any = None
        self.frames: list[set[str]] = [set()]
        self.committed: set[str] = set()
        self.savepoints: list[tuple[SessionTransaction, int]] = []  # with the index of its frame
        self.armed: dict[tuple[str, bool], Listen] = {}

    # --- steps

    def run(self, session: Session, script: list[Any]) -> None:
        for step in script:
            match step:
                case Do(name):
                    STEPS[name](session)
                case Enqueue(name):
                    self.enqueue(self.facade or session, f"entry {name}")
                case Listen(moment, is_first, _, _):
                    self.armed[moment, is_first and moment in MOMENTS] = step
                case Nested(inner, end):
                    self.begin_nested(session)
                    self.run(session, inner)
                    self.end_nested(session, end)

    def enqueue(self, session: Any, name: str) -> None:
        exists = name in self.committed or any(name in frame for frame in self.frames)
        self.ob.enqueue(session, "crm.upsert", {}, parent=self.prefix + name, if_exists="ignore" if exists else "raise")
        if not exists:
            self.frames[-1].add(name)

    def begin_nested(self, session: Session) -> None:
        self.savepoints.append((session.begin_nested(), len(self.frames)))
        self.frames.append(set())

    def end_nested(self, session: Session, end: str, index: int = -1) -> None:
        """End a savepoint, by default the innermost, and with it those in it."""
        if end == "fail":
            index = -1
            self.collide(session)
        savepoint, frame = self.savepoints[index]
        if end == "release":
            savepoint.commit()
            self.frames[frame - 1].update(*self.frames[frame:])
        elif end == "close":
            while (inner := session.get_nested_transaction()) is not None and inner is not savepoint:
                inner.close()
            savepoint.close()
        else:
            savepoint.rollback()
        del self.frames[frame:], self.savepoints[index:]

    def collide(self, session: Session) -> None:
        """A flush that fails. What was done in the innermost savepoint, or in the transaction, is undone."""
        self.armed = {at: listen for at, listen in self.armed.items() if not listen.forget}
        session.add(colliding_order())
        try:
            session.flush()
        except sa.exc.IntegrityError:
            return
        raise AssertionError("the flush did not fail")

    def commit(self, session: Session) -> None:
        session.commit()
        self.committed.update(*self.frames)
        self.forget()

    def forget(self) -> None:
        """The transaction is over."""
        self.frames, self.savepoints = [set()], []

    def claim(self, session: Session, script: list[Any], end: str) -> None:
        """A request's claim around the script, answered, rejected, or given up for an error that the caller survives."""
        key = f"record {next(_numbers)}"
        try:
            with self.ob.idempotent(session, self.prefix + key, scope="ada", content=REQUEST) as claim:
                self.frames.append(set())
                self.run(session, script)
                if end == "respond":
                    claim.respond(201)
                elif end == "reject":
                    self.armed.clear()
                    claim.reject(402)
                    self.frames[-1] = set()
                else:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            self.frames.pop()
        else:
            done = self.frames.pop()
            self.frames[-1] |= done | {key}

    # --- listeners

    @contextmanager
    def listening(self, target: Any) -> Iterator[None]:
        """Listen on `target`, a Session or a class of its own, before the outbox's own listeners where that is a class."""
        heard: list[tuple[Any, str, Any]] = []

        def listen(target: Any, moment: str, is_first: bool) -> None:
            def listener(*arguments: Any) -> None:
                session = object_session(arguments[2]) if moment in MAPPER_MOMENTS else arguments[0]
                if moment != "after_transaction_create" or arguments[1].nested:
                    self._hear(session, moment, is_first)

            sa.event.listen(target, moment, listener, insert=is_first)
            heard.append((target, moment, listener))

        for moment in MOMENTS:
            for is_first in (True, False):
                listen(target, moment, is_first)
        for moment in MAPPER_MOMENTS:
            listen(Order, moment, False)
        try:
            yield
        finally:
            for each in heard:
                sa.event.remove(*each)

    def _hear(self, session: Session, moment: str, is_first: bool) -> None:
        armed = self.armed.pop((moment, is_first), None)
        if armed is None:
            return
        self.enqueue(session, f"entry {armed.name}")
        if armed.forget and moment in ("before_flush", "before_commit"):  # within a flush SQLAlchemy forbids it
            getattr(session, armed.forget)()

    # --- the rule

    def check(self) -> None:
        entry, record = TABLES.entry.c.parent, TABLES.record.c.parent
        found = [sa.select(parent).where(parent.startswith(self.prefix)) for parent in (entry, record)]
        with self.database.engine.connect() as connection:
            kept = connection.scalars(sa.union_all(*found)).all()
        found_names = sorted(parent.removeprefix(self.prefix) for parent in kept)
        assert found_names == sorted(self.committed), (found_names, sorted(self.committed))


def prepare(database: Database) -> None:
    """What a history finds: an order to collide with, and one to change."""
    with database.begin() as session:
        session.add_all([colliding_order(), Order(id=_STANDING, customer="bob", amount=2000)])
