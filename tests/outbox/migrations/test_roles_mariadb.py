"""The roles on MariaDB: the server keeps each process to what it must do. The app's own tests run with its role: `APP_SIDE`."""

import asyncio
from collections.abc import Iterator
from uuid import uuid4

import pytest
import sqlalchemy as sa
from support.database import REQUEST, TABLES, Database
from support.entries import dispatcher, put, run_once, states
from support.roles import (
    KINDS,
    As,
    refused,
    the_dashboard_shows_entries_without_their_contents,
    the_operator_decides_about_schedules,
    the_retention_runs_with_the_rights_of_maintenance,
)

import outbox
from dispatchers import Rejected, Unknown
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.decide import decisions
from dispatchers.admin.decide.again import again
from dispatchers.admin.decide.audit import read_audit
from dispatchers.admin.decide.payloads import reveal
from outbox import migrations
from outbox.errors import InvalidValue, SchemaError


@pytest.fixture
def names(mariadb: Database) -> Iterator[dict[str, str]]:
    """Roles of this test's own: a role belongs to the server, not to a database. Their names must be quoted."""
    names = {kind: f"{kind}'s \\ {uuid4().hex[:8]}" for kind in KINDS}
    run(mariadb, migrations.roles(mariadb.server, **names))
    yield names
    run(mariadb, "".join(f"DROP ROLE IF EXISTS `{name}`;\n" for name in names.values()))


@pytest.fixture
def as_role(mariadb: Database, names: dict[str, str]) -> Iterator[As]:
    """The database as one of the roles, which is a login's default: `as_role("app")`."""
    opened: dict[str, Database] = {}

    def open_as(kind: str) -> Database:
        if kind not in opened:
            login = f"login_{uuid4().hex[:8]}"
            password = mariadb.owners_url.password
            identified = f" IDENTIFIED BY '{password}'" if password else ""
            run(mariadb, f"CREATE USER {login}{identified};\nGRANT `{names[kind]}` TO {login};\n")
            run(mariadb, f"SET DEFAULT ROLE `{names[kind]}` {for_user(mariadb)} {login};\n")
            opened[kind] = Database(mariadb.owners_url.set(username=login))
        return opened[kind]

    yield open_as
    for database in opened.values():
        database.dispose()
        run(mariadb, f"DROP USER {database.owners_url.username};\n")


def for_user(database: Database) -> str:
    """The word before the login in SET DEFAULT ROLE."""
    return "TO" if database.server == "mysql" else "FOR"


def run(database: Database, script: str) -> None:
    with sa.create_engine(database.owners_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool).connect() as owner:
        for statement in script.splitlines():
            owner.exec_driver_sql(statement)


def test_an_app_and_a_dispatcher_need_no_other_rights(as_role: As, ob: outbox.Outbox) -> None:
    app, sending = as_role("app"), as_role("dispatcher")
    migrations.check(app.engine)
    ids = put(app, ob, count=5)
    put(app, ob, "mail.send", count=2, ordering_key="ada")
    with app.begin() as session:
        assert ob.cancel(session, ids[0])
    for _ in range(2):
        with app.begin() as session, ob.idempotent(session, "retry-1", scope="acct_1", content=REQUEST) as claim:
            if not claim.replayed:
                claim.respond(201, {"order": "placed"})

    working = dispatcher(sending, ob, adapters={"crm": MemoryAdapter()})
    asyncio.run(working.check())
    asyncio.run(working.heartbeats.beat())
    mail = MemoryAdapter(lambda delivery: Rejected("no such mailbox"))
    run_once(sending, ob, adapters={"crm": MemoryAdapter(), "mail": mail})

    assert states(app) == {"cancelled": 1, "delivered": 4, "failed": 1, "pending": 1}
    assert claim.replayed


NOT_ALLOWED = {
    "app": (
        "UPDATE outbox_entry SET payload = ''",
        "DELETE FROM outbox_entry",
        "UPDATE outbox_queue SET state = 'retry'",
        "UPDATE outbox_settlement SET state = 'delivered'",
        "DELETE FROM outbox_settlement",
        "UPDATE outbox_record SET scope = 'acct_2'",
        "DELETE FROM outbox_tombstone",
        "SELECT id FROM outbox_audit",
        "TRUNCATE outbox_queue",
        "DROP TABLE outbox_queue",
        "CREATE TRIGGER mine BEFORE INSERT ON outbox_queue FOR EACH ROW SET NEW.attempts = 0",
        "ALTER TABLE outbox_queue DROP CONSTRAINT outbox_queue_state",
    ),
    "dispatcher": (
        "UPDATE outbox_entry SET payload = ''",
        "UPDATE outbox_settlement SET state = 'delivered'",
        "UPDATE outbox_audit SET reason = 'another'",
        "DROP TABLE outbox_queue",
    ),
    "maintenance": (
        "DELETE FROM outbox_queue",
        "UPDATE outbox_entry SET payload = ''",
        "UPDATE outbox_settlement SET state = 'failed'",
    ),
    "dashboard": (
        "SELECT payload FROM outbox_entry",
        "SELECT outcome FROM outbox_queue",
        "SELECT result FROM outbox_settlement",
        "SELECT body FROM outbox_record",
        "SELECT secret_check FROM outbox_kid",
        "DELETE FROM outbox_destination",
    ),
    "operator": (
        "UPDATE outbox_queue SET state = 'sending', lease_token = id, lease_until = NOW(), leased_at = NOW()",
        "UPDATE outbox_queue SET maybe_sent = false",
        "UPDATE outbox_entry SET payload = ''",
        "DELETE FROM outbox_settlement",
        "UPDATE outbox_event SET reason = 'another'",
        "DELETE FROM outbox_audit",
        "INSERT INTO outbox_audit (at, actor, action, kind, target, count, login) VALUES (NOW(), 'a', 'b', 'entry', 'x', 1, 'c')",
        "DELETE FROM outbox_kid",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_refuses_what_a_role_need_not_do(as_role: As, kind: str) -> None:
    database = as_role(kind)

    assert [statement for statement in NOT_ALLOWED[kind] if not refused(database, statement)] == []


def test_maintenance_runs_the_retention_with_its_role(as_role: As, mariadb: Database, ob: outbox.Outbox) -> None:
    the_retention_runs_with_the_rights_of_maintenance(as_role, mariadb, ob)


def test_the_dashboards_role_shows_entries_without_their_contents(as_role: As, ob: outbox.Outbox) -> None:
    the_dashboard_shows_entries_without_their_contents(as_role, ob)


def test_the_operators_role_decides_about_schedules(as_role: As, ob: outbox.Outbox) -> None:
    the_operator_decides_about_schedules(as_role, ob)


def test_the_operators_role_decides_and_asks_again(as_role: As, ob: outbox.Outbox) -> None:
    unsent, failed = put(as_role("app"), ob, count=2)
    put(as_role("app"), ob, "mail.send", parent="mail:1")
    mail = MemoryAdapter([Unknown("no answer")], window=None)
    operator = as_role("operator")
    with operator.engine.begin() as connection:
        decisions.cancel(connection, TABLES, unsent, actor="ada", reason="asked")
        decisions.retry(connection, TABLES, failed, actor="ada", reason="asked")
    run_once(as_role("dispatcher"), ob, adapters={"crm": MemoryAdapter([Rejected("no")]), "mail": mail})
    (lost,) = [row.id for row in as_role("dispatcher").queue if row.state == "uncertain"]

    with operator.engine.begin() as connection:
        decisions.resolve(connection, TABLES, lost, "happened", actor="ada", reason="they have it")
        decisions.pause(connection, TABLES, "crm", actor="ada", reason="asked")
        decisions.resume(connection, TABLES, "crm", actor="ada", reason="asked")
        payload = reveal(connection, TABLES, failed, actor="ada", reason="asked").payload
        made = again(connection, ob.configuration, failed, actor="ada", reason="asked")
        logged = [row.action for row in read_audit(connection, TABLES, max_rows=10).rows]

    assert payload == {"amount": 2000}
    assert made.is_new
    assert logged == ["again", "reveal_payload", "resume", "pause", "resolve", "retry", "cancel"]


def grants(database: Database, names: dict[str, str]) -> list[str]:
    with database.observer.connect() as connection:
        shown = [connection.exec_driver_sql(f"SHOW GRANTS FOR `{name}`").scalars() for name in names.values()]
        return sorted(grant for each in shown for grant in each)


def test_printed_again_it_changes_nothing_but_takes_other_rights_away(
    mariadb: Database, names: dict[str, str], as_role: As
) -> None:
    before = grants(mariadb, names)
    run(mariadb, f"GRANT ALL ON outbox_entry TO `{names['app']}`;\n")
    run(mariadb, f"GRANT UPDATE (state, outcome) ON outbox_queue TO `{names['app']}`;\n")
    assert not refused(as_role("app"), "UPDATE outbox_entry SET payload = ''")

    run(mariadb, migrations.roles(mariadb.server, **names))

    assert grants(mariadb, names) == before
    assert refused(as_role("app"), "UPDATE outbox_queue SET state = 'retry'")


def test_one_role_with_two_parts_may_do_what_both_may(mariadb: Database, names: dict[str, str], as_role: As) -> None:
    run(mariadb, migrations.roles(mariadb.server, **names | {"maintenance": names["dashboard"]}))

    both = as_role("dashboard")

    assert not refused(both, "DELETE FROM outbox_tombstone")
    assert refused(both, "UPDATE outbox_queue SET suspended_reason = NULL")


@pytest.mark.owner  # the migrations make the tables
def test_each_role_may_check_tables_that_migrations_made(mariadb: Database, names: dict[str, str], as_role: As) -> None:
    TABLES.metadata.drop_all(mariadb.observer)
    migrations.upgrade(mariadb.owners_url)
    run(mariadb, migrations.roles(mariadb.server, **names))

    for kind in KINDS:
        migrations.check(as_role(kind).engine)
        assert migrations.current(as_role(kind).engine) == migrations.head()


def test_tables_that_a_user_may_not_read_are_not_said_to_be_missing(mariadb: Database, as_role: As) -> None:
    """The server does not show them to the user. An error would ask for tables that exist."""
    stranger = as_role("app")
    run(mariadb, f"SET DEFAULT ROLE NONE {for_user(mariadb)} {stranger.owners_url.username};\n")
    run(mariadb, f"GRANT SELECT ON outbox_queue TO {stranger.owners_url.username};\n")

    with pytest.raises(
        SchemaError, match="this user may not read table outbox_entry, table outbox_settlement, "
    ) as raised:
        migrations.check(stranger.engine)

    assert "outbox_queue" not in str(raised.value)
    assert "the rights of `outbox db roles --dialect mariadb`" in str(raised.value)
    assert "autogenerate" not in str(raised.value)


def test_roles_of_another_database_are_refused_by_name() -> None:
    with pytest.raises(InvalidValue, match="must be 'postgresql', 'mariadb' or 'mysql'"):
        migrations.roles("sqlite")
