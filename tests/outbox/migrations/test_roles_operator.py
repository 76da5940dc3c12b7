"""The operator's role: it decides, and PostgreSQL itself keeps it from anything else. Who may write the audit log."""

from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from support.database import TABLES, Database
from support.entries import age, put, run_once, states
from support.roles import HONEST, NEW_ENTRY, As, refused, the_operator_decides_about_schedules

import outbox
from dispatchers import Delivered, Rejected, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.admin.decide.again import again
from dispatchers.admin.decide.audit import read_audit
from dispatchers.admin.decide.payloads import reveal
from dispatchers.admin.read.entries import read_entry
from outbox import migrations
from outbox.sql.schema.identifiers import quoted

ENDED_BY_HAND = (
    "WITH gone AS (DELETE FROM outbox_queue RETURNING *) INSERT INTO outbox_settlement (id, state, deliveries, attempts,"
    " key_epoch, settled_at) SELECT id, 'delivered', deliveries, attempts, key_epoch, now() FROM gone"
)


def test_the_operator_decides_about_entries_and_destinations(as_role: As, ob: outbox.Outbox) -> None:
    waiting, unsent, blind = put(as_role("app"), ob, count=3)
    put(as_role("app"), ob, "mail.send", parent="mail:1")
    run_once(as_role("dispatcher"), ob, adapters={"mail": MemoryAdapter([Unknown("no answer")], window=None)})
    (lost,) = [row.id for row in as_role("dispatcher").queue if row.state == "uncertain"]
    as_role("dispatcher").execute(
        sa.update(TABLES.queue).where(TABLES.queue.c.id == blind).values(suspended_reason="a clone")
    )
    operator = as_role("operator")

    with operator.engine.begin() as connection:
        decisions.retry(connection, TABLES, waiting, actor="ada", reason="asked")
        decisions.cancel(connection, TABLES, unsent, actor="ada", reason="asked")
        decisions.resolve(connection, TABLES, lost, "happened", actor="ada", reason="they have it")
        decisions.release(connection, TABLES, blind, actor="ada", reason="asked")
        decisions.pause(connection, TABLES, "crm", actor="ada", reason="asked")
        decisions.resume(connection, TABLES, "crm", actor="ada", reason="asked")
        payload = reveal(connection, TABLES, waiting, actor="ada", reason="asked").payload
        shown = read_entry(connection, TABLES, lost)
        logged = read_audit(connection, TABLES, max_rows=10).rows
    with as_role("dashboard").engine.connect() as connection:
        viewed = read_audit(connection, TABLES, max_rows=10).rows

    assert payload == {"amount": 2000}
    assert (shown.known, shown.child_key is None) == ("delivered", False)
    assert [row.action for row in logged] == [
        *("reveal_payload", "resume", "pause", "release", "resolve", "cancel", "retry")
    ]
    assert viewed == logged
    run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter(), "mail": MemoryAdapter()})
    assert states(operator) == {"delivered": 3, "cancelled": 1}


def test_the_operator_pauses_triggers_and_resumes_schedules(as_role: As, ob: outbox.Outbox) -> None:
    the_operator_decides_about_schedules(as_role, ob)


def test_the_operator_settles_what_no_dispatcher_serves(as_role: As, owners: Database, ob: outbox.Outbox) -> None:
    (id,) = put(as_role("app"), ob)
    run_once(as_role("dispatcher"), ob, adapters={"mail": MemoryAdapter()})
    age(owners, timedelta(hours=1))

    with as_role("operator").engine.begin() as connection:
        at_once = decisions.cancel(connection, TABLES, id, actor="ada", reason="asked")

    assert (at_once, states(owners)) == (True, {"cancelled": 1})


@pytest.mark.parametrize(
    "statement",
    [
        NEW_ENTRY.format(**HONEST),
        "UPDATE outbox_queue SET state = 'sending', lease_token = gen_random_uuid(), lease_until = now(), leased_at = now()",
        "UPDATE outbox_queue SET maybe_sent = false",
        "UPDATE outbox_queue SET key_epoch = 0",
        "UPDATE outbox_entry SET payload = ''",
        "DELETE FROM outbox_entry",
        "UPDATE outbox_settlement SET state = 'delivered'",
        "DELETE FROM outbox_settlement",
        "DELETE FROM outbox_queue",
        ENDED_BY_HAND,
        "DELETE FROM outbox_event",
        "UPDATE outbox_event SET reason = 'another'",
        "UPDATE outbox_audit SET reason = 'another'",
        "DELETE FROM outbox_audit",
        "UPDATE outbox_meta SET suspended_reason = NULL",
        "DELETE FROM outbox_kid",
    ],
)
def test_the_operator_neither_enqueues_nor_claims_nor_rewrites(as_role: As, ob: outbox.Outbox, statement: str) -> None:
    put(as_role("app"), ob)

    assert refused(as_role("operator"), statement)


@pytest.mark.parametrize("ordering_key", [None, "ada"])
def test_the_operator_asks_again_for_what_failed(as_role: As, ob: outbox.Outbox, ordering_key: str | None) -> None:
    (first,) = put(as_role("app"), ob, ordering_key=ordering_key)
    run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter([Rejected("no")])})

    with as_role("operator").engine.begin() as connection:
        made = again(connection, ob.configuration, first, actor="ada", reason="asked")

    assert made.is_new
    assert [row.id for row in as_role("dispatcher").queue] == [made.id]


@pytest.mark.parametrize("changed", ["payload", "destination", "discriminator", "of one that was delivered"])
def test_the_operator_enqueues_nothing_but_a_copy(as_role: As, ob: outbox.Outbox, changed: str) -> None:
    (first,) = put(as_role("app"), ob)
    outcome = Delivered() if changed == "of one that was delivered" else Rejected("no")
    run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter([outcome])})
    operator = as_role("operator")
    values = {"payload": "'{}'::bytea", "destination": "'mail'", "discriminator": "'again:none'"}
    columns = [
        column.name for column in TABLES.entry.columns if column.name not in ("id", "tag", "created_at", "due_at")
    ]
    given = {"discriminator": f"'again:{first}'"} | ({changed: values[changed]} if changed in values else {})
    copied = ", ".join(given.get(name, name) for name in columns)
    statement = (
        f"WITH written AS (INSERT INTO outbox_entry (id, tag, created_at, due_at, {', '.join(columns)})"
        f" SELECT gen_random_uuid(), sha256('x'), now(), now(), {copied} FROM outbox_entry RETURNING *)"
        " INSERT INTO outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch)"
        " SELECT id, destination, 'pending', due_at, 0, 0, false, 0 FROM written"
    )

    assert refused(operator, statement)


def test_the_app_neither_reads_nor_writes_the_audit_log(as_role: As) -> None:
    assert refused(as_role("app"), "SELECT FROM outbox_audit")
    assert refused(as_role("app"), "INSERT INTO outbox_audit SELECT * FROM outbox_audit")


@pytest.mark.parametrize("kind", ["maintenance", "dashboard"])
def test_only_those_who_enqueue_or_decide_may_cancel(as_role: As, ob: outbox.Outbox, kind: str) -> None:
    (id,) = put(as_role("app"), ob)

    assert refused(as_role(kind), f"SELECT outbox_cancel('{id}')")
    assert not refused(as_role("dispatcher"), f"SELECT outbox_cancel('{id}')")
    assert not refused(as_role("operator"), f"SELECT outbox_cancel('{id}')")


def test_the_audit_log_has_the_servers_clock_and_the_login(as_role: As, owners: Database) -> None:
    forged = "INSERT INTO outbox_audit (at, actor, action, kind, target, count) VALUES"
    forged += " ('2001-01-01', 'grace', 'cancel', 'entries', 'x', 1)"
    operator, maintenance, sending = (as_role(kind) for kind in ("operator", "maintenance", "dispatcher"))

    operator.execute(sa.text(forged))
    with operator.engine.connect() as connection:
        login = connection.exec_driver_sql("SELECT session_user").scalar_one()
        (row,) = read_audit(connection, TABLES, max_rows=10).rows
    assert (row.actor, row.login, row.at.year > 2001) == ("grace", login, True)
    assert not refused(operator, "UPDATE outbox_audit SET count = 2")
    for statement in ("UPDATE outbox_audit SET count = 0", "UPDATE outbox_audit SET count = 9, id = 7"):
        assert refused(operator, statement)
    for role in (maintenance, sending):
        assert refused(role, "DELETE FROM outbox_audit")
    owners.execute(sa.update(TABLES.audit).values(at=sa.text("now() - interval '401 days'")))
    assert not refused(maintenance, "DELETE FROM outbox_audit")


@pytest.mark.parametrize("kind", ["operator", "dispatcher"])
@pytest.mark.parametrize(
    ("columns", "values"),
    [("id", "9"), ("login", "'grace'"), ("count", "-1"), ("count", "0"), ("count", "3000")],
)
def test_no_role_writes_an_id_a_login_or_an_odd_count(as_role: As, kind: str, columns: str, values: str) -> None:
    """An id beyond the sequence's would let later decisions fail."""
    given = {"at": "now()", "actor": "'ada'", "action": "'cancel'", "kind": "'entry'", "target": "'x'", "count": "1"}
    given |= {columns: values}
    statement = f"INSERT INTO outbox_audit ({', '.join(given)}) VALUES ({', '.join(given.values())})"

    if columns == "count":
        with pytest.raises(sa.exc.IntegrityError, match="outbox_audit_count"):
            as_role(kind).execute(sa.text(statement))
    else:
        assert refused(as_role(kind), statement)


def test_the_owner_restores_the_audit_log_as_it_was(as_role: As, owners: Database) -> None:
    given = {"actor": "ada", "action": "retry", "kind": "entry", "target": "x", "count": 1, "login": "shop"}
    at = datetime(2020, 1, 1, tzinfo=UTC)

    owners.execute(sa.insert(TABLES.audit).values(given | {"at": at}))

    assert [(row.login, row.at) for row in owners.rows(TABLES.audit)] == [("shop", at)]


@pytest.mark.parametrize("count", [1, 30, 1000])
def test_no_waiting_entry_is_deleted_by_maintenance(as_role: As, ob: outbox.Outbox, count: int) -> None:
    put(as_role("app"), ob, count=count)
    maintenance = as_role("maintenance")

    assert refused(maintenance, "DELETE FROM outbox_entry")
    run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter()})
    assert not refused(maintenance, "DELETE FROM outbox_entry")


def test_the_guards_follow_no_search_path_of_who_decides(as_role: As, ob: outbox.Outbox) -> None:
    put(as_role("app"), ob)
    maintenance = as_role("maintenance")

    with maintenance.engine.connect() as connection:
        connection.exec_driver_sql("CREATE TEMP TABLE outbox_queue (LIKE public.outbox_queue)")
        with pytest.raises(DBAPIError, match="waits in the queue"):
            connection.exec_driver_sql("DELETE FROM public.outbox_entry")


def test_the_cancelling_function_is_closed_to_everyone_from_the_start(owners: Database, names: dict[str, str]) -> None:
    with owners.engine.connect() as connection:
        migrations.downgrade(connection)
        migrations.upgrade(connection)
        connection.exec_driver_sql(f"SET LOCAL ROLE {quoted(names['app'])}")

        with pytest.raises(DBAPIError, match="permission denied for function outbox_cancel"):
            connection.exec_driver_sql("SELECT outbox_cancel(gen_random_uuid())")


def test_the_callers_search_path_leads_the_function_nowhere_else(as_role: As, ob: outbox.Outbox) -> None:
    app = as_role("app")
    (id,) = put(app, ob)

    with app.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TEMP TABLE outbox_queue (LIKE public.outbox_queue)")
        connection.exec_driver_sql("CREATE TEMP TABLE outbox_settlement (LIKE public.outbox_settlement)")
        assert connection.exec_driver_sql(f"SELECT public.outbox_cancel('{id}')").scalar_one()

    assert states(app) == {"cancelled": 1}
