"""The role of the app in PostgreSQL: it enqueues and claims requests, and can neither forge nor revive what is sent."""

from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from support.database import PAYLOAD, REQUEST, Database
from support.entries import put, run_once, states
from support.roles import HONEST, NEW_ENTRY, As, refused

import outbox
from dispatchers.adapters import MemoryAdapter
from outbox import migrations
from outbox.sql.errors.driver import sqlstate
from outbox.sql.schema.identifiers import quoted


def test_the_app_enqueues_looks_and_cancels(as_role: As, ob: outbox.Outbox) -> None:
    app = as_role("app")
    put(app, ob, count=3)
    put(app, ob, parent="order:9", ordering_key="ada", due=timedelta(hours=1))
    put(app, ob, parent="order:9", if_exists="ignore")

    with app.begin() as session:
        (entry,) = ob.status(session, "order:9")
        cancelled = ob.cancel(session, entry.id)

    assert cancelled
    with app.begin() as session:
        assert [entry.state for entry in ob.status(session, "order:9")] == ["cancelled"]
    assert states(app) == {"pending": 3, "cancelled": 1}


def test_the_app_claims_a_request_replays_it_and_frees_an_expired_key(
    as_role: As, owners: Database, ob: outbox.Outbox
) -> None:
    app = as_role("app")

    def request() -> bool:
        with app.begin() as session, ob.idempotent(session, "retry-1", scope="acct_1", content=REQUEST) as claim:
            if not claim.replayed:
                claim.respond(201, {"order": "placed"})
            return claim.replayed

    replayed = [request(), request()]
    owners.age_records(timedelta(days=40))
    replayed.append(request())

    assert replayed == [False, True, False]


def test_the_app_checks_the_tables(as_role: As) -> None:
    migrations.check(as_role("app").engine)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE outbox_entry SET payload = ''",
        "DELETE FROM outbox_entry",
        "UPDATE outbox_queue SET state = 'retry'",
        "DELETE FROM outbox_queue",
        "INSERT INTO outbox_settlement SELECT id, 'delivered', NULL, NULL, 1, 1, 0, now() FROM outbox_queue",
        "UPDATE outbox_settlement SET state = 'delivered'",
        "DELETE FROM outbox_settlement",
        "DELETE FROM outbox_event",
        "DELETE FROM outbox_tombstone",
        "TRUNCATE outbox_queue",
        "DROP TABLE outbox_queue",
        "SELECT id FROM outbox_entry FOR UPDATE",
        "UPDATE outbox_version SET version_num = '0001'",
        "CREATE OR REPLACE FUNCTION outbox_guard_queue() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
    ],
)
def test_the_app_cannot_change_or_delete_what_must_be_sent(as_role: As, ob: outbox.Outbox, statement: str) -> None:
    app = as_role("app")
    put(app, ob)

    assert refused(app, statement)


LEASED = {
    "state": "'sending'",
    "more": ", lease_token, lease_until, leased_at",
    "values": ", gen_random_uuid(), now() + interval '90 years', now()",
}
FORGED: dict[str, dict[str, str]] = {
    "due at -infinity": {"due_at": "'-infinity'"},
    "due before Christ": {"due_at": "'0044-03-15 BC'"},
    "due at infinity": {"due_at": "'infinity'"},
    "created at infinity": {"created_at": "'infinity'"},
    "created long ago": {"created_at": "now() - interval '90 years'"},
    "queued before it is due": {"due_at": "now() + interval '1 day'", "queue_due": "now()"},
    "never due": {"queue_due": "'9999-12-31 00:00:00+00'"},
    "for another destination": {"destination": "'stripe'"},
    "counted to the end": {"deliveries": "2147483647"},
    "delivered once": {"deliveries": "1"},
    "attempted": {"attempts": "1"},
    "in doubt": {"maybe_sent": "true"},
    "under another key": {"epoch": "1"},
    "uncertain": {"state": "'uncertain'"},
    "under a lease": LEASED,
    "suspended": {"more": ", suspended_reason", "values": ", 'mine'"},
    "with an outcome": {"more": ", outcome", "values": ", '{}'"},
    "for another callback": {"more": ", callback", "values": ", 'settled'"},
    "sent as another form": {"more": ", sent_as", "values": ", 'uuid'"},
    "in a group of its own": {"more": ", ordering_key, position", "values": ", 'ada', 1"},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED.keys())
def test_the_app_queues_nothing_but_what_enqueue_writes(as_role: As, forged: dict[str, str]) -> None:
    app = as_role("app")

    with app.engine.connect() as connection:
        connection.exec_driver_sql(NEW_ENTRY.format(**HONEST))
        with pytest.raises(DBAPIError) as caught:
            connection.exec_driver_sql(NEW_ENTRY.format(**HONEST | forged))

    assert sqlstate(caught.value.orig) in ("42501", "23514")  # insufficient_privilege, check_violation


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_the_app_cannot_revive_what_was_sent(as_role: As, ob: outbox.Outbox, level: str) -> None:
    """Not even in a transaction that began before the entry, and sees neither it nor its settlement."""
    app = as_role("app")
    revive = (
        "INSERT INTO outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch)"
        " VALUES ('{}', 'crm', 'pending', now(), 0, 0, false, {})"
    )

    with app.engine.connect().execution_options(isolation_level=level) as earlier:
        earlier.exec_driver_sql("SELECT count(*) FROM outbox_entry")
        (id,) = put(app, ob)
        assert refused(app, "INSERT INTO outbox_queue SELECT * FROM outbox_queue WHERE false") is False
        run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter()})
        with pytest.raises(DBAPIError) as caught:
            earlier.exec_driver_sql(revive.format(id, 0))

    assert sqlstate(caught.value.orig) == "42501"
    assert refused(app, revive.format(id, 1))
    assert states(app) == {"delivered": 1}


def test_a_search_path_of_the_apps_own_does_not_lead_the_guard_astray(
    as_role: As, owners: Database, names: dict[str, str], ob: outbox.Outbox
) -> None:
    app = as_role("app")
    (id,) = put(app, ob)
    run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter()})
    owners.execute(sa.text(f"CREATE SCHEMA own AUTHORIZATION {quoted(names['app'])}"))

    with app.engine.connect() as connection:
        for name in ("entry", "queue"):
            connection.exec_driver_sql(f"CREATE TEMP TABLE outbox_{name} AS SELECT * FROM public.outbox_{name}")
        for type, operator, answer in (("xid", "=", "true"), ("timestamptz", "=", "true"), ("text", "<>", "false")):
            function = f"own.always(one {type}, other {type})"
            connection.exec_driver_sql(f"CREATE FUNCTION {function} RETURNS boolean LANGUAGE sql AS 'SELECT {answer}'")
            connection.exec_driver_sql(
                f"CREATE OPERATOR own.{operator} (FUNCTION = own.always, LEFTARG = {type}, RIGHTARG = {type})"
            )
        connection.exec_driver_sql("SET LOCAL search_path = own, pg_catalog, public")
        with pytest.raises(DBAPIError, match="only a new entry enters the queue"):
            connection.exec_driver_sql(
                "INSERT INTO public.outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch)"
                f" VALUES ('{id}', 'crm', 'pending', now(), 0, 0, false, 0)"
            )


def test_the_owner_restores_the_queue_from_a_backup(owners: Database, as_role: As, ob: outbox.Outbox) -> None:
    put(as_role("app"), ob, count=2)
    with owners.begin() as session:
        session.execute(sa.text("CREATE TEMP TABLE backup AS SELECT * FROM outbox_queue"))
        session.execute(sa.text("DELETE FROM outbox_queue"))
        session.execute(sa.text("INSERT INTO outbox_queue SELECT * FROM backup"))

    assert run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter()}) == 2


def test_the_app_changes_no_answer_and_deletes_no_current_record(as_role: As, ob: outbox.Outbox) -> None:
    app = as_role("app")
    with app.begin() as session, ob.idempotent(session, "retry-1", scope="acct_1", content=REQUEST) as claim:
        claim.respond(201, {"order": "placed"})
    (before,) = app.records

    with app.begin() as session:
        session.execute(sa.text("UPDATE outbox_record SET body = 'forged', status = 200"))
        session.execute(sa.text("DELETE FROM outbox_record"))

    assert app.records == [before]
    for forged in ("scope = 'acct_2'", "fingerprint = sha256('x')", "kid = 'k0'", "body_day = NULL"):
        assert refused(app, f"UPDATE outbox_record SET {forged}")


def test_the_app_deletes_no_expired_record_whose_entries_remain(
    as_role: As, owners: Database, ob: outbox.Outbox
) -> None:
    app = as_role("app")
    for number in (1, 2):
        with app.begin() as session, ob.idempotent(session, f"retry-{number}", scope="a", content=REQUEST) as claim:
            if number == 1:
                ob.enqueue(session, "crm.upsert", PAYLOAD)
            claim.respond(201)
    owners.age_records(timedelta(days=40))

    with app.begin() as session:
        session.execute(sa.text("DELETE FROM outbox_record"))

    assert [row.parent for row in app.records] == ["retry-1"]


def test_who_is_app_and_dispatcher_in_one_may_do_what_both_may(
    as_role: As, owners: Database, names: dict[str, str], ob: outbox.Outbox
) -> None:
    with as_role("app").begin() as session, ob.idempotent(session, "k", scope="a", content=REQUEST) as claim:
        claim.respond(201)
    with owners.begin() as session:
        session.execute(sa.text(f"GRANT {quoted(names['dispatcher'])} TO {quoted(names['app'])}"))
        session.execute(sa.text(f"SET LOCAL ROLE {quoted(names['app'])}"))
        session.execute(sa.text("DELETE FROM outbox_record"))
        session.execute(sa.text("RESET ROLE"))
        session.execute(sa.text(f"REVOKE {quoted(names['dispatcher'])} FROM {quoted(names['app'])}"))

    assert owners.records == []
