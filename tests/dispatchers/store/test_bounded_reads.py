"""What the app and the dispatcher ask of a large outbox reads some rows by an index, and no table from end to end.

Whatever the planner believes of the tables. PostgreSQL counts what is read (`support.large_outbox`).
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.daemons import wait_for
from support.database import PAYLOAD, REQUEST, TABLES, Database
from support.entries import HOUR, claim_request, quota
from support.large_outbox import DUE, ReadCounter, believe, fill, on_each

import outbox
from dispatchers import Limits
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.check import doctor
from dispatchers.admin.read import entries as admin
from dispatchers.admin.read.entry_filter import ENDED_STATES, Filter, ParentWanted
from dispatchers.admin.read.groups import list_groups, read_group
from dispatchers.admin.read.plain_values import Place
from dispatchers.admin.read.requests import RequestFilter, list_requests, read_request
from dispatchers.admin.read.search import find
from dispatchers.admin.read.summary import read_summary
from dispatchers.callbacks import Calls
from dispatchers.flow_control.state import FlowUpdate, News
from dispatchers.maintenance.jobs import report_gauges, report_lag
from dispatchers.maintenance.retention import Retention
from dispatchers.maintenance.retention_sql import STEPS, Scan
from dispatchers.process.dispatcher_work import DispatcherWork
from dispatchers.settings import RETENTION
from dispatchers.store.database import DatabaseStore
from dispatchers.transitions import ClaimedEntry, MarkUncertain, Retry, Settle
from outbox.times import EPOCH

ROWS = 30_000  # some 3,000 are due at each destination
MILLION = 1_000_000


class Paths:
    """A process of the app and of the dispatcher, over one connection: each method asks for one thing."""

    def __init__(self, database: Database, life: str) -> None:
        self.engine = database.new_engine(pool_size=1, max_overflow=0)
        self.ob, fair = (
            outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test", fair=names, hints=False)
            for names in ((), {"shared"})
        )
        self.store = DatabaseStore(self.engine, self.ob.configuration)
        self.fair_store = DatabaseStore(self.engine, fair.configuration)
        self.life, self.number = life, 0
        self.claimed: list[ClaimedEntry] = []
        self.entry = self.record = UUID(int=0)

    @property
    def name(self) -> str:
        """Of the present parent, request and message."""
        return f"{self.life} {self.number}"

    # --- the app

    def enqueue(self) -> None:
        self.number += 1
        with Session(self.engine) as session, session.begin():
            self.entry = self.ob.enqueue(session, "app.x", PAYLOAD, parent=self.name).id
            for operation in ("ordered.x", "ordered.y"):
                self.ob.enqueue(session, operation, PAYLOAD, parent=self.name, ordering_key=self.name)

    def enqueue_again(self) -> None:
        with Session(self.engine) as session, session.begin():
            self.ob.enqueue(session, "app.x", PAYLOAD, parent=self.name, if_exists="ignore")

    def read_status(self) -> None:
        with Session(self.engine) as session:
            assert len(self.ob.status(session, self.name)) == 3
            session.commit()

    def cancel(self) -> None:
        with Session(self.engine) as session, session.begin():
            assert self.ob.cancel(session, self.entry)

    @contextmanager
    def request(self, suffix: str) -> Iterator[tuple[Session, outbox.Claim]]:
        with Session(self.engine) as session, session.begin():
            block = self.ob.idempotent(session, f"{self.name} {suffix}", scope="acct_1", content=REQUEST)
            with block as claim:
                yield session, claim

    def answer(self) -> None:
        with self.request("answered") as (session, claim):
            if not claim.replayed:
                self.ob.enqueue(session, "app.x", PAYLOAD)
                claim.respond(201)

    def accept(self) -> None:
        with self.request("accepted") as (session, claim):
            self.record = claim.id
            self.ob.enqueue(session, "app.x", PAYLOAD)
            claim.accept("checkout", headers={"Location": "/requests/1"})

    def lease(self) -> None:
        with self.ob.leased(self.engine, f"{self.name} leased", scope="acct_1", content=REQUEST) as claim:
            claim.respond(201)

    def consume(self) -> None:
        with Session(self.engine) as session, session.begin():
            block = self.ob.inbox(session, consumer="mail", message_id=self.name, scope="acct_1")
            with block as message:
                assert message.parent.key == self.name

    # --- the dispatcher

    def exchange(self, settlements: Any = (), request: Any = None, store: DatabaseStore | None = None) -> Any:
        return asyncio.run((store or self.store).exchange(settlements, request))

    def claim(self) -> None:
        self.claimed = self.exchange((), claim_request(*(quota(name, 50) for name in DUE))).claimed

    def claim_served(self) -> None:
        quotas = [quota(name, 50)._replace(recent=HOUR) for name in DUE]
        self.exchange((), claim_request(*quotas, unserved=["sms.send"]))

    def claim_decided(self) -> None:
        """What needs no send: nothing, among a backlog."""
        assert self.exchange((), claim_request(quota("a", 250)._replace(known=True, admitted=True))).claimed == []

    def settle_and_claim(self) -> None:
        ended = [(entry, Settle("delivered", 1, result={"id": "pi_1"})) for entry in self.claimed[::3]]
        waits = [(entry, Retry(HOUR, "slow", 1, True, EPOCH)) for entry in self.claimed[1::3]]
        parks = [(entry, MarkUncertain("vanished", 1, True, EPOCH)) for entry in self.claimed[2::3]]
        self.exchange([*ended, *waits, *parks], claim_request(quota("a", 50)))

    def share_out(self) -> None:
        self.exchange((), claim_request(quota("shared", 50)), self.fair_store)

    def send_heads(self) -> None:
        heads = self.exchange((), claim_request(quota("ordered", 50))).claimed
        self.exchange([(entry, Settle("delivered", 1)) for entry in heads])

    def limit(self) -> None:
        update = FlowUpdate(news={"a": News(failures=1)}, decided=frozenset({"a", "b"}), limits={"a": Limits(rate=100)})
        self.exchange((), claim_request(quota("a", 50), quota("b", 50), flow_update=update))
        asyncio.run(self.store.survey())

    def call_back(self) -> None:
        for entry in self.exchange((), claim_request(quota("b", 1))).claimed:
            assert asyncio.run(self.store.settle_with(entry, Settle("delivered", 1), Calls(lambda *_: None)))

    def complete(self) -> None:
        asyncio.run(self.store.accepted(None))
        asyncio.run(self.store.complete(self.record, lambda *_: None))

    def start(self) -> None:
        async def ask() -> None:
            await self.store.callbacks(["on_settled app"])
            await self.store.take_over(["on_settled app"])
            await self.store.check_identity("test", None)
            await self.store.require_usable("test", self.ob.configuration.keyring)
            await self.store.survey()

        asyncio.run(ask())

    def report_lag(self) -> None:
        asyncio.run(report_lag(self.store.run, TABLES))

    def look_up(self) -> None:
        asyncio.run(self.store.request_lookups(lambda operation, form: True, timedelta(seconds=1), None))

    def count(self) -> None:
        asyncio.run(report_gauges(self.store.run, TABLES))

    def retain(self) -> None:
        for step in STEPS.values():
            after = None
            for _ in range(2):
                scan = Scan(Retention.of(RETENTION, [timedelta(days=1)]), 50, after)
                after = asyncio.run(self.store.run(lambda connection: step(connection, TABLES, scan))).after  # noqa: B023

    # --- operators

    def list_ended(self) -> None:
        with self.engine.begin() as connection:
            for since in (None, HOUR):
                admin.list_entries(connection, TABLES, Filter(states=ENDED_STATES, since=since), max_entries=50)

    def list_waiting(self) -> None:
        self.list_pages(Filter())
        self.list_pages(Filter(since=HOUR))

    def list_waiting_of_a_destination(self) -> None:
        self.list_pages(Filter(destination="a"))
        self.list_pages(Filter(destination="a", since=HOUR))

    def list_uncertain(self) -> None:
        self.list_pages(Filter(states=["uncertain"]))

    def list_filtered(self) -> None:
        self.search(Filter(operation="a.upsert", reason="lost"))
        self.search(Filter(parent=ParentWanted("order:7")))
        self.search(Filter(states=["failed"]))

    def find(self) -> None:
        with self.engine.begin() as connection:
            found = find(connection, TABLES, self.name, max_rows=500)
            assert self.entry in {entry.id for entry in found.entries}
            find(connection, TABLES, "pi_3MtwBwLkdIwHu7ix", max_rows=500)

    def summarize(self) -> None:
        with self.engine.begin() as connection:
            assert read_summary(connection, TABLES).waiting.value >= 10_000

    def list_groups(self) -> None:
        with self.engine.begin() as connection:
            assert len(list_groups(connection, TABLES, max_groups=5, only_blocked=False).groups) == 5
            read_group(connection, TABLES, "group 1")

    def list_requests(self) -> None:
        with self.engine.begin() as connection:
            page = list_requests(connection, TABLES, RequestFilter(), max_requests=50, max_rows=500)
            assert len(page.requests) == 50
            missing = RequestFilter(key="nobody's")
            list_requests(connection, TABLES, missing, max_requests=50, after=page.next, max_rows=500)
            assert read_request(connection, TABLES, self.record).record is not None

    def list_pages(self, wanted: Filter) -> None:
        after: Place[UUID] | None = None
        for _ in range(3):
            with self.engine.begin() as connection:
                page = admin.list_entries(connection, TABLES, wanted, max_entries=50, after=after)
            assert len(page.entries) == 50
            after = page.next

    def search(self, wanted: Filter) -> None:
        with self.engine.begin() as connection:
            page = admin.list_entries(connection, TABLES, wanted, max_entries=50, max_rows=500)
        assert len(page.entries) < 50
        assert page.next is not None

    def list_parent(self) -> None:
        with self.engine.begin() as connection:
            parent = ParentWanted(self.name, "test", "", "app")
            admin.read_entries_of_parent(connection, TABLES, parent)

    def show(self) -> None:
        with self.engine.begin() as connection:
            assert admin.find_ids(connection, TABLES, self.entry.hex[:12]) == [self.entry]
            admin.read_entry(connection, TABLES, self.entry)

    def diagnose(self) -> None:
        """With a live dispatcher that serves nothing of what waits."""
        own = DispatcherWork(self.engine, outbox=self.ob, adapters={"mail": MemoryAdapter()}).heartbeats.as_seen()
        configuration = self.ob.configuration
        context = doctor.Context(
            tables=TABLES, prefix=configuration.prefix, env="test", keyring=configuration.keyring, own=own
        )
        found = asyncio.run(doctor.diagnose(self.store.run, context))
        assert {"served", "registered", "running", "key ids"} <= set(found.checked)


APP: list[tuple[Callable[[Paths], None], int]] = [
    # each with how many rows of the indexes it may read in all
    (Paths.enqueue, 20),
    (Paths.enqueue_again, 20),
    (Paths.read_status, 40),
    (Paths.cancel, 20),
    (Paths.answer, 20),
    (Paths.answer, 20),
    (Paths.accept, 20),
    (Paths.lease, 20),
    (Paths.consume, 20),
    (Paths.consume, 20),
]
DISPATCHER: list[tuple[Callable[[Paths], None], int]] = [
    (Paths.claim, 2500),  # also passes over what is leased
    (Paths.claim_served, 3000),
    (Paths.claim_decided, 50),
    (Paths.settle_and_claim, 2500),
    (Paths.share_out, 2500),
    (Paths.send_heads, 2500),
    (Paths.limit, 2500),
    (Paths.call_back, 2500),
    (Paths.complete, 500),
    (Paths.start, 5000),
    (Paths.report_lag, 4000),
    (Paths.look_up, 20_000),  # a page of the queue
    (Paths.count, 25_000),  # what of each destination may be counted
    (Paths.retain, 4000),
]
OPERATOR: list[tuple[Callable[[Paths], None], int]] = [
    (Paths.list_ended, 500),
    (Paths.list_waiting, 25_000),  # six pages, each with some 3,000 that have no due time
    (Paths.list_waiting_of_a_destination, 1000),  # six pages
    (Paths.list_uncertain, 2000),  # three pages, of which each entry is read from the queue, and with its entry
    (
        Paths.list_filtered,
        30_000,
    ),  # two searches of 500 rows of each destination, with all that have no due time; one of what ended
    (Paths.find, 13_000),  # two searches of 500 of each list, each with its entry and its row
    (Paths.summarize, 100_000),  # what may be counted
    (Paths.list_groups, 10_000),
    (Paths.list_requests, 1200),
    (Paths.list_parent, 40),
    (Paths.show, 20),
    (Paths.diagnose, 60_000),  # of each destination the first due entries and the last, by several checks
]
BELIEFS: dict[str, Callable[[Database], None]] = {
    "all that waited was uncertain": lambda database: None,
    "the queue had been drained": lambda database: believe(database, "reltuples = 0", "queue"),
    "all had been deleted": lambda database: believe(database, "reltuples = 0"),
    "never analyzed": lambda database: believe(database, "reltuples = -1, relpages = 0"),
    "as it is": lambda database: on_each(database, "ANALYZE {}"),
    "a million": lambda database: believe(database, f"reltuples = {MILLION}"),
}


def test_no_path_reads_more_than_it_asks_for_whatever_the_statistics_say(postgresql: Database) -> None:
    on_each(postgresql, "ALTER TABLE {} SET (autovacuum_enabled = off)")
    on_each(postgresql, "VACUUM ANALYZE {}")
    old = Paths(postgresql, "old")
    for _ in range(12):  # so often that its statements are prepared, and their plans kept
        for path, _ in APP:
            path(old)
    fill(postgresql, 500, uncertain=True)
    on_each(postgresql, "ANALYZE {}")
    fill(postgresql, ROWS)

    found = excesses(postgresql, old, APP, "prepared for empty tables")
    for belief, instill in BELIEFS.items():
        instill(postgresql)
        asked = APP + DISPATCHER + (OPERATOR if belief == "a million" else [])
        found += excesses(postgresql, Paths(postgresql, belief), asked, belief)
    on_each(postgresql, "ALTER TABLE {} RESET (autovacuum_enabled)")

    assert not found, "\n".join(found)


def test_what_ended_at_one_instant_is_deleted_in_the_order_of_an_index(postgresql: Database) -> None:
    fill(postgresql, 10_000)
    for name, column in (("settlement", "settled_at"), ("record", "keep_until"), ("tombstone", "forget_at")):
        expired_at = "date_trunc('day', now()) - interval '90 days'"
        postgresql.execute(sa.text(f"UPDATE outbox_{name} SET {column} = {expired_at}"))
    on_each(postgresql, "VACUUM ANALYZE {}")

    found = excesses(postgresql, Paths(postgresql, "one instant"), [(Paths.retain, 4000)], "ended at one instant")

    assert not found, "\n".join(found)


def test_what_others_read_before_is_not_counted_when_they_report_it_late(postgresql: Database) -> None:
    engine, other = (postgresql.new_engine(pool_size=1, max_overflow=0) for _ in range(2))
    for _ in range(2):  # a backend reports at most once a second
        with other.begin() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM outbox_queue")
    with other.connect() as connection:
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    counter = ReadCounter(postgresql, engine)

    other.dispose()
    alive = sa.text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid").bindparams(pid=pid)
    with postgresql.owner() as connection:
        wait_for(lambda: connection.execute(alive).scalar_one() == 0, "its end")

    assert counter.since_last().scanned == []


def excesses(
    database: Database, paths: Paths, asked: list[tuple[Callable[[Paths], None], int]], belief: str
) -> list[str]:
    """What was read from end to end, and what read more rows than it may."""
    found = []
    counter = ReadCounter(database, paths.engine)
    for path, most in asked:
        path(paths)
        scanned, rows = counter.since_last()
        if scanned or sum(rows.values()) > most:
            found.append(f"{belief}, {path.__name__}: from end to end {scanned}, by an index {rows}, at most {most}")
    paths.engine.dispose()
    return found
