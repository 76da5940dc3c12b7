"""Apps and dispatchers on nodes of a Galera cluster. One test for most of it, because a cluster takes ten seconds to start.

`python3 dev.py galera --chaos` is the long form.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID, uuid4

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from support.database import IMPORT_PATH, TABLES
from support.entries import HOUR, claim_request, dispatcher, pumping, quota, run_once
from support.galera_chaos import chaos
from support.galera_cluster import missing_part, running_cluster, wait_until
from support.galera_nodes import (
    Race,
    claim,
    claimed_with_an_expired_lease,
    ended_states,
    ending,
    enqueued,
    in_transaction,
    left,
    on_a_node,
    race,
    wait_for_all,
)

import outbox
from dispatchers import Delivery, Outcome
from dispatchers.adapters.memory import MemoryAdapter
from dispatchers.admin.check import doctor
from dispatchers.admin.decide.again import again as ask_again
from dispatchers.cli.connections import repeated_after_conflicts
from dispatchers.maintenance.retention import Retention
from dispatchers.maintenance.retention_sql import Scan, delete_entries
from dispatchers.store.connections.outage_log import cause_of, is_outage
from dispatchers.store.database import DatabaseStore
from dispatchers.store.queue import claims_rows
from dispatchers.store.queue.ordering import advance_groups, sort_out
from dispatchers.transitions import ClaimedEntry, MarkUncertain, SendAgain, Settle
from outbox import migrations
from outbox.sql.clock import clock, earlier
from outbox.sql.connections.engines import engine_of
from outbox.sql.errors.driver import DEADLOCK, sqlstate
from outbox.sql.key_locks import certify
from outbox.sql.mariadb.errors import leaves_cluster
from outbox.sql.mariadb.settings import NodeLags


def test_the_outbox_keeps_its_guarantees_on_three_nodes_of_galera(ob: outbox.Outbox) -> None:
    if (missing := missing_part()) is not None:
        pytest.skip(f"{missing} is not installed")
    with running_cluster() as cluster:
        chaos(cluster, 300, ["kill"])
        engines = [engine_of(url) for url in cluster.urls("shop")]
        for check in CHECKS:
            check(engines, ob)
        for engine in engines:
            engine.dispose()


def one_node_sends_in_order_what_two_others_enqueue(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    service = MemoryAdapter()
    for number in range(100):
        entry = {"parent": f"sorted:{number}", "ordering_key": f"group {number % 10}"}
        enqueue = partial(ob.enqueue, operation="crm.upsert", payload={"number": number}, **entry)
        in_transaction(engines[number // 10 % 2], enqueue)
    wait_until(lambda: left(engines[2]) == 100, "all entries on the third node")

    wait_until(lambda: (run_once(engines[2], ob, adapters={"crm": service}), left(engines[2]))[1] == 0, "all are sent")

    sent = [delivery.payload["number"] for delivery in service.deliveries]
    assert Counter(sent) == Counter(range(100))
    for group in range(10):
        assert [number for number in sent if number % 10 == group] == [*range(group, 100, 10)]


def one_of_two_claims_of_an_entry_is_refused(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    id = enqueued(engines, ob, "race:claimed")

    raced = race(engines, claim, claim)

    assert ([each.id for each in raced.first], raced.is_refused) == ([id], True)
    assert [each.id for each in raced.second] == [id]
    on_a_node(engines[0], ending(raced.first[0], "delivered"))


def a_refused_claim_is_not_sent_and_takes_no_outcome_with_it(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    """Before the dispatcher commits the outcome of the first entry and its next claim, another one has claimed the same."""
    ids = [enqueued(engines, ob, f"race:{number}") for number in range(3)]
    service, taken = MemoryAdapter(), list[UUID]()
    engine = engine_of(engines[1].url)

    def note(connection: sa.Connection, cursor: Any, statement: str, *rest: Any) -> None:
        if "lease_token = X" in statement and statement.startswith("UPDATE"):
            connection.info["claims"] = True

    def take_first(connection: sa.Connection) -> None:
        if connection.info.pop("claims", False) and service.deliveries and len(taken) < 2:
            one = claim_request(quota(permits=1))
            (entry,) = on_a_node(engines[0], lambda other: claims_rows.claim(other, TABLES, one))
            taken.append(entry.id)

    sa.event.listen(engine, "before_cursor_execute", note)
    sa.event.listen(engine, "commit", take_first)
    working = dispatcher(engine, ob, adapters={"crm": service}, concurrency=1)
    asyncio.run(pumping(working, lambda: len(taken) == 2 and ended_states(engines, ids[0])[0] == []))
    engine.dispose()

    assert [delivery.id for delivery in service.deliveries] == ids[:1]
    assert (taken, ended_states(engines, ids[0])) == (ids[1:], ([], ["delivered"]))
    on_a_node(engines[0], lambda connection: connection.execute(TABLES.queue.delete()))


def a_takeover_is_refused_if_the_outcome_was_stored_first(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    entry = claimed_with_an_expired_lease(engines, ob, "race:late 1")

    raced = race(engines, ending(entry, "failed"), claim)

    assert (raced.first, len(raced.second), raced.is_refused) == ({entry.id}, 1, True)
    assert ended_states(engines, entry.id) == ([], ["failed"])


def an_outcome_is_refused_after_a_takeover_and_only_a_success_is_kept(
    engines: list[sa.Engine], ob: outbox.Outbox
) -> None:
    entry = claimed_with_an_expired_lease(engines, ob, "race:late 2")

    raced = race(engines, claim, ending(entry, "failed"))

    assert (len(raced.first), raced.second, raced.is_refused) == (1, {entry.id}, True)
    assert on_a_node(engines[1], ending(entry, "failed")) == set()
    assert ended_states(engines, entry.id) == (["sending"], [])
    assert on_a_node(engines[1], ending(entry, "delivered")) == {entry.id}
    assert ended_states(engines, entry.id) == ([], ["delivered"])


def an_outcome_is_stored_on_a_node_that_has_not_applied_its_claim_yet(
    engines: list[sa.Engine], ob: outbox.Outbox
) -> None:
    """As behind a proxy that leads the connections of one dispatcher to several nodes. A node has two threads that apply: one is
    busy with many rows, and the other one waits, because a node commits in the order of the cluster.
    """
    engine = engine_of(engines[1].url)
    claiming, settling = [DatabaseStore(each, ob.configuration) for each in (engines[0], engine)]
    asyncio.run(settling.survey())  # a new connection waits for its node
    on_a_node(engines[0], lambda connection: connection.exec_driver_sql("CREATE TABLE filler (id INT PRIMARY KEY)"))
    id = enqueued(engines, ob, "race:unseen")
    for rows in ("SELECT seq FROM seq_1_to_20000", "VALUES (0)"):
        fill = f"INSERT INTO filler {rows}"
        on_a_node(engines[0], lambda connection: connection.exec_driver_sql(fill))  # noqa: B023  # called at once

    (entry,) = asyncio.run(claiming.exchange([], claim_request(quota()))).claimed

    @repeated_after_conflicts  # as a dispatcher does: on a busy node even a ROLLBACK is answered with 1213
    def settle() -> set[UUID]:
        return {id for id, _ in asyncio.run(settling.exchange([(entry, Settle("failed", 1))], None)).settled}

    settled = settle()
    engine.dispose()

    assert settled == {id}


def a_request_on_two_nodes_at_once_is_kept_once_and_then_replayed(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    on_a_node(engines[0], lambda connection: connection.exec_driver_sql("CREATE TABLE sold (id INT PRIMARY KEY)"))

    def handle(connection: sa.Connection, number: int) -> tuple[bool, Any]:
        with Session(connection, join_transaction_mode="rollback_only") as session:
            with ob.idempotent(session, "8e03978e", scope="ada", content={"amount": 1}) as claimed:
                if not claimed.replayed:
                    session.execute(sa.text("INSERT INTO sold VALUES (:number)"), {"number": number})
                    ob.enqueue(session, "crm.upsert", {"number": number})
                    claimed.respond(201, {"number": number})
            return claimed.replayed, claimed.require_response().body

    raced = race(engines, partial(handle, number=1), partial(handle, number=2))

    assert raced == Race((False, b'{"number":1}'), (False, b'{"number":2}'), is_refused=True)
    assert on_a_node(engines[1], partial(handle, number=2)) == (True, b'{"number":1}')
    wait_for_all(engines)
    with engines[2].connect() as connection:
        assert connection.scalars(sa.text("SELECT id FROM sold")).all() == [1]
        assert connection.scalars(
            sa.select(TABLES.entry.c.payload).join(TABLES.queue, TABLES.queue.c.id == TABLES.entry.c.id)
        ).all() == [b'{"number":1}']
    on_a_node(engines[0], lambda connection: connection.execute(TABLES.queue.delete()))


def a_cancelled_entry_cannot_be_claimed_and_a_claimed_one_not_cancelled(
    engines: list[sa.Engine], ob: outbox.Outbox
) -> None:
    def cancel(connection: sa.Connection, id: UUID) -> bool:
        with Session(connection, join_transaction_mode="rollback_only") as session:
            return ob.cancel(session, id)

    first = enqueued(engines, ob, "race:cancelled")
    raced = race(engines, partial(cancel, id=first), claim)
    assert (raced.first, len(raced.second), raced.is_refused) == (True, 1, True)
    assert ended_states(engines, first) == ([], ["cancelled"])

    second = enqueued(engines, ob, "race:sent")
    raced = race(engines, claim, partial(cancel, id=second))
    assert (len(raced.first), raced.second, raced.is_refused) == (1, True, True)
    assert on_a_node(engines[1], partial(cancel, id=second)) is False
    assert ended_states(engines, second) == (["sending"], [])
    on_a_node(engines[1], ending(raced.first[0], "delivered"))


def a_later_entry_of_a_group_is_not_claimed_by_a_node_that_has_not_seen_send_again(
    engines: list[sa.Engine], ob: outbox.Outbox
) -> None:
    """A lease that such a node gives would begin after the delay by which the entry that is sent again waits for others."""
    with Session(engines[0]) as session, session.begin():
        sent = [
            ob.enqueue(session, "crm.upsert", {}, parent=f"race:group {number}", ordering_key="again").id
            for number in range(2)
        ]
        # A claim locks the first row after those that it may take, and that must not be the row of the uncertain entry
        ob.enqueue(session, "crm.upsert", {}, parent="race:later", due=HOUR)
    wait_for_all(engines)
    (entry,) = on_a_node(engines[0], claim)
    passed = [(entry, MarkUncertain("no answer", 1, True, entry.leased_at, failure_blocks_group=False))]
    store = DatabaseStore(engines[0], ob.configuration)
    asyncio.run(store.exchange(passed, None))
    decided = sa.update(TABLES.queue).where(TABLES.queue.c.id == sent[0])
    lease = {"state": "sending", "lease_token": entry.lease_token, "lease_until": clock(), "leased_at": clock()}

    def send_again(connection: sa.Connection) -> None:
        change = SendAgain(0, None, HOUR, "an operator")
        connection.execute(decided.values(**lease))
        claims_rows.settle(connection, TABLES, [(entry, change)])
        advance_groups(connection, TABLES, [(entry, change)])

    def claim_heads(connection: sa.Connection) -> list[ClaimedEntry]:
        return sort_out(connection, TABLES, claim(connection)).may_go

    raced = race(engines, send_again, claim_heads)
    wait_for_all(engines)

    assert (entry.id, [each.id for each in raced.second], raced.is_refused) == (sent[0], sent[1:], True)
    assert on_a_node(engines[1], claim_heads) == []
    wait_for_all(engines)
    on_a_node(engines[0], lambda connection: connection.execute(TABLES.queue.delete()))


def an_entry_asked_for_again_while_it_is_deleted_is_sent(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    """Neither is refused: the new entry has all that it needs."""
    retention = Retention(entries=HOUR, refuse=HOUR)
    delete: Callable[..., Any] = partial(delete_entries, tables=TABLES, scan=Scan(retention, 1000))
    for number in range(2):
        id = enqueued(engines, ob, f"race:again {number}")
        (entry,) = on_a_node(engines[0], claim)
        on_a_node(engines[0], ending(entry, "failed"))
        past = sa.update(TABLES.settlement).values(settled_at=earlier(clock(), 2 * HOUR))
        on_a_node(engines[0], lambda connection: connection.execute(past))  # noqa: B023  # called at once
        asked = {"configuration": ob.configuration, "entry_id": id, "actor": "eve", "reason": "the address was wrong"}
        again: Callable[..., Any] = partial(ask_again, **asked)
        service = MemoryAdapter()

        raced = race(engines, *((delete, again) if number else (again, delete)))
        wait_for_all(engines)
        run_once(engines[2], ob, adapters={"crm": service})

        made = raced.second if number else raced.first
        assert (raced.is_refused, made.is_new) == (False, True)
        assert [delivery.id for delivery in service.deliveries] == [made.id]
        assert ended_states(engines, id) == ([], [])


def a_node_outside_the_cluster_keeps_outcomes_and_connections_are_new(
    engines: list[sa.Engine], ob: outbox.Outbox
) -> None:
    """wsrep_reject_queries makes a node answer as one that is outside the majority."""
    id = enqueued(engines, ob, "race:outside")
    refused: list[Any] = []
    engine = engine_of(engines[1].url)
    sa.event.listen(engine, "handle_error", refused.append)

    def reject(which: str) -> None:
        with pymysql.connect(unix_socket=engine.url.query["unix_socket"], user="root", autocommit=True) as connection:
            connection.cursor().execute(f"SET GLOBAL wsrep_reject_queries = {which}")

    class Leaving(MemoryAdapter):
        async def send(self, delivery: Delivery) -> Outcome:
            reject("ALL")
            return await super().send(delivery)

    def is_over() -> bool:
        if len(refused) >= 3:
            reject("NONE")
        return left(engines[0]) == 0

    service = Leaving()
    working = dispatcher(engine, ob, adapters={"crm": service})
    asyncio.run(pumping(working, is_over))
    engine.dispose()

    assert [delivery.id for delivery in service.deliveries] == [id]
    assert ended_states(engines, id) == ([], ["delivered"])
    assert all(context.is_disconnect for context in refused)


def a_node_that_lags_is_an_outage_and_not_a_locked_row(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    """As a locked row it would be tried again with each half of the outcomes, and each try waits for the node."""
    for number in range(4):
        enqueued(engines, ob, f"race:lagging {number}")
    outcomes = [(entry, Settle("delivered", 1)) for entry in on_a_node(engines[0], claim)]
    wait_for_all(engines)
    engine, tries = engine_of(engines[1].url), list[Any]()
    sa.event.listen(engine, "handle_error", tries.append)
    store = DatabaseStore(engine, ob.configuration)
    with engines[1].connect() as operator:
        operator.exec_driver_sql("SET GLOBAL wsrep_provider_options = 'repl.causal_read_timeout=PT0.1S'")
        operator.exec_driver_sql("FLUSH TABLES WITH READ LOCK")
        try:
            on_a_node(engines[0], lambda other: certify(other, TABLES, ["what the second node cannot apply"]))
            with pytest.raises(NodeLags) as raised:
                asyncio.run(store.exchange(outcomes, claim_request(quota())))
        finally:
            operator.exec_driver_sql("UNLOCK TABLES")
            operator.exec_driver_sql("SET GLOBAL wsrep_provider_options = 'repl.causal_read_timeout=PT30S'")

    assert (is_outage(raised.value), len(tries)) == (True, 1)
    assert "has not applied in time" in cause_of(raised.value)
    assert len(asyncio.run(store.exchange(outcomes, None)).settled) == 4
    engine.dispose()


def only_one_of_the_nodes_that_certify_a_name_commits(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    def certify_group(connection: sa.Connection) -> set[str]:
        return certify(connection, TABLES, ["group"])

    assert race(engines, certify_group, certify_group) == Race({"group"}, {"group"}, is_refused=True)


def the_doctor_names_settings_and_states_that_weaken_a_guarantee(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    """A dispatcher makes the same checks at its start.

    On an engine of its own: a connection that is made meanwhile keeps these settings.
    """
    engine = engine_of(engines[0].url)
    store, context = DatabaseStore(engine, ob.configuration), doctor.Context(tables=TABLES, prefix="outbox_")

    def found() -> list[str]:
        findings = asyncio.run(doctor.diagnose(store.run, context, doctor.OF_SERVER)).findings
        return [f"{each.severity}: {each.text}" for each in findings if each.check == "galera"]

    changes = {
        "GLOBAL wsrep_OSU_method": ("RSU", "TOI", "warning: wsrep_osu_method is RSU"),
        "GLOBAL wsrep_desync": ("ON", "OFF", "warning: wsrep_local_state_comment is Donor/Desynced"),
        "GLOBAL wsrep_provider_options": ("'pc.ignore_sb=true'", "'pc.ignore_sb=no'", "error: pc.ignore_sb is true"),
        "GLOBAL wsrep_on": ("OFF", "ON", "error: wsrep_on is OFF"),
    }
    with engines[0].connect() as connection:
        for name, (other, usual, expected) in changes.items():
            connection.exec_driver_sql(f"SET {name} = {other}")
            shown = found()
            connection.exec_driver_sql(f"SET {name} = {usual}")
            wait_until(lambda: not found(), f"{name} is {usual}")
            assert shown == [expected]
    engine.dispose()


CHECKS = (
    the_doctor_names_settings_and_states_that_weaken_a_guarantee,
    one_node_sends_in_order_what_two_others_enqueue,
    only_one_of_the_nodes_that_certify_a_name_commits,
    one_of_two_claims_of_an_entry_is_refused,
    a_refused_claim_is_not_sent_and_takes_no_outcome_with_it,
    a_takeover_is_refused_if_the_outcome_was_stored_first,
    an_outcome_is_refused_after_a_takeover_and_only_a_success_is_kept,
    an_outcome_is_stored_on_a_node_that_has_not_applied_its_claim_yet,
    a_request_on_two_nodes_at_once_is_kept_once_and_then_replayed,
    a_cancelled_entry_cannot_be_claimed_and_a_claimed_one_not_cancelled,
    a_later_entry_of_a_group_is_not_claimed_by_a_node_that_has_not_seen_send_again,
    an_entry_asked_for_again_while_it_is_deleted_is_sent,
    a_node_outside_the_cluster_keeps_outcomes_and_connections_are_new,
    a_node_that_lags_is_an_outage_and_not_a_locked_row,
)


@pytest.mark.parametrize(("number", "cause"), [(1047, "outside the cluster's majority"), (1180, "result is unknown")])
def test_a_node_that_left_its_cluster_is_an_outage_with_its_cause_named(number: int, cause: str) -> None:
    error = sa.exc.OperationalError("COMMIT", None, pymysql.err.OperationalError(number, "WSREP"))

    assert is_outage(error)
    assert cause in cause_of(error)
    assert leaves_cluster(error.orig)  # so no ROLLBACK is sent, which would fail too


# --- Requests on the nodes of a Galera cluster whose commits are refused.


def test_the_holder_of_a_lease_answers_although_a_commit_is_refused(ob: outbox.Outbox) -> None:
    if (missing := missing_part()) is not None:
        pytest.skip(f"{missing} is not installed")
    with running_cluster() as cluster:
        engines = [engine_of(url) for url in cluster.urls("shop")]
        migrations.upgrade(engines[0])
        the_holder_of_a_lease_answers(engines, ob)
        for engine in engines:
            engine.dispose()


def the_holder_of_a_lease_answers(engines: list[sa.Engine], ob: outbox.Outbox) -> None:
    """Meanwhile another node changes the table, or another attempt takes the request over."""

    def change_table(connection: sa.Connection) -> None:
        connection.exec_driver_sql(f"ALTER TABLE {TABLES.record.name} COMMENT 'changed'")

    def take_over(connection: sa.Connection) -> None:
        taken = sa.update(TABLES.record).where(TABLES.record.c.lease_token.is_not(None))
        connection.execute(taken.values(lease_token=uuid4()))

    for work, expected in ((change_table, nullcontext()), (take_over, pytest.raises(outbox.LeaseLost))):
        engine, refused = engine_of(engines[0].url), list[Any]()
        sa.event.listen(engine, "handle_error", refused.append)
        leased = ob.leased(engine, work.__name__, scope="ada", content={"amount": 1}, lease=HOUR)
        with suppress(outbox.NotAnswered), leased as claim:
            wait_for_all(engines)
            sa.event.listen(engine, "commit", lambda _, work=work: on_a_node(engines[1], work), once=True)
            with expected:
                claim.respond(201, {"order": 42})
        engine.dispose()
        assert [sqlstate(context.original_exception) for context in refused] == [DEADLOCK]


# --- What `python3 dev.py galera` leaves on the machine. dev.py itself could make the environment of this run again.


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_that_starts_a_cluster_removes_it_when_it_ends(end: signal.Signals) -> None:
    """The signal reaches the command's own process only, as that of a supervisor."""
    if (missing := missing_part()) is not None:
        pytest.skip(f"{missing} is not installed")
    command = [sys.executable, "-m", "support.galera_cluster"]

    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # pytest's own folders are closed to the servers' user
        variables = os.environ | {"TMPDIR": folder, "PYTHONPATH": IMPORT_PATH}
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=variables) as running:
            wait_until(lambda: any(Path(folder).glob("galera*/n0")), "its first node is being made")
            running.send_signal(end)
        left = list(Path(folder).iterdir())

    assert (running.returncode, left) == (0, [])
