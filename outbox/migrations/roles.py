"""The rights of the database's roles: who may do what with the outbox's tables.

A right on a table is not precise enough, so three more things limit the roles. A trigger refuses every new row of the queue
except a new entry, as `enqueue` writes it. Policies on the records let the app change a request that is open, and delete one
that has expired. The triggers of `role_guards` keep waiting entries, ids and the audit log.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from sqlalchemy import Table

from outbox.errors import InvalidValue
from outbox.migrations.role_guards import guard_audit, guard_entries, guard_ids, in_full
from outbox.migrations.roles_mariadb import CANCELLING, LOCKING, MARIADB, MYSQL, Grammar, printed_on_mariadb
from outbox.sql.schema.functions import database_functions
from outbox.sql.schema.identifiers import literal, quoted
from outbox.sql.schema.parent_index import is_under_sql
from outbox.sql.schema.rights import READ_WITH
from outbox.sql.schema.tables import tables_of
from outbox.times import NEVER

# What a claim under a lease renews, ends and answers.
OPEN_CLAIM = "lease_token, lease_until, state, status, body, headers, answered_at, replay_until, keep_until"

DECIDED = "at, actor, action, kind, target, reason, count"
"""What is written of a decision in the audit log; the database gives its id, and `guard_audit` its login."""

DECIDED_OF_SCHEDULE = "enqueued_to, next_at, paused, paused_reason, decided_by, decided_at, triggered_at, triggered_by"
"""What an operator changes of a schedule. An instant that a resume skips is dealt with."""

APP = {
    "entry": "SELECT, INSERT",
    "queue": "SELECT, INSERT",  # `_guard_queue`
    "settlement": "SELECT",
    "record": f"SELECT, INSERT, UPDATE ({OPEN_CLAIM}), DELETE",  # `_guard_records`
    "mismatch": "SELECT, INSERT, UPDATE (requests, last_at)",
    "tombstone": "SELECT",
    "meta": "SELECT",  # whose database it is, asked by `outbox.check`
    "kid": "SELECT",
}

# Concurrent maintenance runs divide the rows by FOR UPDATE, which needs the right to update at least one column: the id, which
# `guard_ids` keeps unchanged.
MAINTENANCE = {
    "entry": "SELECT, UPDATE (id), DELETE",
    "queue": "SELECT",
    "settlement": "SELECT, UPDATE (id), DELETE",
    "event": "SELECT, DELETE",
    "audit": "SELECT, UPDATE (id), DELETE",
    "proposal": "SELECT, UPDATE (id), DELETE",
    "blocked_group": "SELECT",  # an entry that blocks its group is kept
    "record": "SELECT, UPDATE (id), DELETE",
    "tombstone": "SELECT, INSERT, UPDATE, DELETE",
    "dispatcher": "SELECT, DELETE",
    "send_count": "SELECT, DELETE",
}

# What it enqueues in callbacks is written as the app writes it, and its schedule does what maintenance does.
DISPATCHER = {
    "queue": "SELECT, INSERT, UPDATE, DELETE",
    "entry": "SELECT, INSERT, UPDATE (id), DELETE",
    "settlement": "SELECT, INSERT, UPDATE (id), DELETE",
    "event": "SELECT, INSERT, DELETE",
    "audit": f"SELECT, INSERT ({DECIDED}), UPDATE (id, count), DELETE",
    "proposal": "SELECT, INSERT, UPDATE, DELETE",
    "destination": "SELECT, INSERT, UPDATE, DELETE",
    "blocked_group": "SELECT, INSERT, UPDATE, DELETE",
    "callback": "SELECT, INSERT, UPDATE, DELETE",
    "schedule": "SELECT, INSERT, UPDATE, DELETE",
    "dispatcher": "SELECT, INSERT, UPDATE, DELETE",
    "send_count": "SELECT, INSERT, UPDATE, DELETE",
    "meta": "SELECT, INSERT, UPDATE",
    "kid": "SELECT, INSERT, DELETE",
    "record": "SELECT, INSERT, UPDATE, DELETE",
    "mismatch": "SELECT, INSERT, UPDATE (requests, last_at)",
    "tombstone": "SELECT, INSERT, UPDATE, DELETE",
}

# It decides, and a dispatcher carries that out: it cannot write a lease, so it can claim nothing, and no row leaves the queue by
# it but through `cancel`, with a settlement. It enqueues only what an ended entry had, to ask for it again (`_guard_queue`).
OPERATOR = {
    "entry": "SELECT, INSERT",
    "queue": "SELECT, INSERT, UPDATE (due_at, outcome, known, suspended_reason)",
    "settlement": "SELECT",
    "event": "SELECT, INSERT",
    "audit": f"SELECT, INSERT ({DECIDED}), UPDATE (count)",  # `guard_audit`
    "proposal": "SELECT, INSERT, UPDATE (state, decided_by, decided_at)",
    "destination": "SELECT, INSERT, UPDATE",
    "blocked_group": "SELECT, DELETE",
    "callback": "SELECT",
    "schedule": f"SELECT, UPDATE ({DECIDED_OF_SCHEDULE}), DELETE",
    "dispatcher": "SELECT",
    "send_count": "SELECT",
    "meta": "SELECT",
    "kid": "SELECT",
    "record": "SELECT",
    "mismatch": "SELECT",
    "tombstone": "SELECT",
}

OF_THE_ENTRY = {"ordering_key", "position", "fair", "scope"}
"""The optional columns that a new row of the queue may have from its entry. Every other column that may be NULL is NULL."""

NOT_PORTABLE = (
    "has no such roles: CockroachDB has no rights on columns, and neither it nor YugabyteDB has triggers with transition tables."
    " Let a role of its own run the migrations, and grant SELECT, INSERT, UPDATE and DELETE on all tables of the outbox to the"
    " logins of the app, the dispatcher and the operators (docs/distributed.md has the SQL)"
)
"""Sources: cockroachlabs.com/docs, "PostgreSQL compatibility", unsupported features; cockroachdb/cockroach#135655;
docs.yugabyte.com, YSQL, "CREATE TRIGGER", whose grammar lacks REFERENCING."""


def roles(
    dialect: str = "postgresql",
    *,
    schema: str | None = None,
    prefix: str = "outbox_",
    app: str = "outbox_app",
    dispatcher: str = "outbox_dispatcher",
    maintenance: str = "outbox_maintenance",
    dashboard: str = "outbox_dashboard",
    operator: str = "outbox_operator",
) -> str:
    """The SQL that gives each role its rights, for someone to read and run; running it again changes nothing.

    dialect: `postgresql`, `mariadb` or `mysql`. A role that does not exist is created without the right to log in: `GRANT
    outbox_app TO shop` makes a login one of them, and on MariaDB `SET DEFAULT ROLE outbox_app FOR shop` uses it, on MySQL
    `SET DEFAULT ROLE outbox_app TO shop`. Each loses every other right on the outbox's tables. The app may add entries, and
    cancel one, but not change or delete one; of requests, it changes its open ones. The dashboard reads no payload, answer or
    key. The operator reads them, and records decisions, but claims nothing. On PostgreSQL a function cancels, nothing but a new
    entry enters the queue, and the operator enqueues only what it asks for again; the tables' owner runs the SQL and must be
    none of the five, or the SQL itself refuses. On MariaDB and MySQL rights alone say what a role may do (docs/databases.md).
    `portable` is refused, with what to grant instead.
    """
    names = (app, dispatcher, maintenance, dashboard, operator)
    printers: dict[str, Callable[..., str]] = {
        "postgresql": _on_postgresql,
        "mariadb": partial(_on_mariadb, MARIADB),
        "mysql": partial(_on_mariadb, MYSQL),
    }
    if dialect not in printers:
        other = "must be 'postgresql', 'mariadb' or 'mysql': no other database has these roles"
        raise InvalidValue("dialect", dialect, {"portable": NOT_PORTABLE}.get(dialect, other))
    return printers[dialect](schema, prefix, *names)


def _on_mariadb(
    grammar: Grammar,
    schema: str | None,
    prefix: str,
    app: str,
    dispatcher: str,
    maintenance: str,
    dashboard: str,
    operator: str,
) -> str:
    defined = tables_of(None, prefix).metadata.tables.values()
    reading = {table.name.removeprefix(prefix): _reading(table, prefix) for table in defined}
    rights = (APP | CANCELLING | LOCKING, DISPATCHER | LOCKING, MAINTENANCE, reading, OPERATOR | LOCKING)
    of_roles = [*zip((app, dispatcher, maintenance, dashboard, operator), rights, strict=True), (operator, CANCELLING)]
    return printed_on_mariadb(of_roles, schema, prefix, grammar)


def _on_postgresql(
    schema: str | None, prefix: str, app: str, dispatcher: str, maintenance: str, dashboard: str, operator: str
) -> str:
    defined = tables_of(None, prefix).metadata.tables.values()
    names = [table.name for table in defined]
    reading = {table.name.removeprefix(prefix): _reading(table, prefix) for table in defined}
    everyone = list(dict.fromkeys((app, dispatcher, maintenance, dashboard, operator)))
    tables = ", ".join(quoted(name, schema) for name in names)
    listed = ", ".join(map(quoted, everyone))
    position = quoted(f"{prefix}position", schema)
    counted = ", ".join(quoted(f"{prefix}{table}_id_seq", schema) for table in ("event", "audit"))
    deciders = f"{quoted(dispatcher)}, {quoted(operator)}"
    cancel = database_functions(schema, prefix)["cancel"].signature
    senders = f"{quoted(app)}, {quoted(dispatcher)}"
    statements = [
        "BEGIN",
        _create(everyone, owned=quoted(f"{prefix}entry", schema)),
        *([] if schema is None else [f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {listed}"]),
        f"REVOKE ALL ON TABLE {tables} FROM PUBLIC, {listed}",
        f"REVOKE ALL ON SEQUENCE {position}, {counted} FROM PUBLIC, {listed}",
        f"REVOKE ALL ON FUNCTION {cancel} FROM PUBLIC, {listed}",
        *_grants(APP, app, schema, prefix),
        *_grants(DISPATCHER, dispatcher, schema, prefix),
        *_grants(MAINTENANCE, maintenance, schema, prefix),
        *_grants(reading, dashboard, schema, prefix),
        *_grants(OPERATOR, operator, schema, prefix),
        f"GRANT USAGE ON SEQUENCE {position} TO {senders}, {quoted(operator)}",
        f"GRANT USAGE ON SEQUENCE {counted} TO {deciders}",
        f"GRANT EXECUTE ON FUNCTION {cancel} TO {senders}, {quoted(operator)}",
        _let_read(quoted(f"{prefix}version", schema), listed),
        _let_keep_bodies(
            schema,
            prefix,
            listed,
            readers=", ".join(map(quoted, dict.fromkeys((app, dispatcher, maintenance, operator)))),
            keepers=f"{quoted(dispatcher)}, {quoted(maintenance)}",
        ),
        *_guard_queue(schema, prefix, enqueuers=(app, dispatcher)),
        *_guard_records(schema, prefix, app=app, keepers=(dispatcher, maintenance)),
        *guard_entries(schema, prefix, dispatcher=dispatcher),
        *guard_ids(schema, prefix),
        *guard_audit(schema, prefix),
        "COMMIT",
    ]
    return "".join(f"{statement};\n" for statement in statements)


def _create(roles: Sequence[str], *, owned: str) -> str:
    """Create the roles that do not exist, and refuse one that owns the tables: no right can be withheld from an owner."""
    lines = [
        f"    IF to_regrole({literal(quoted(role))}) IS NULL THEN CREATE ROLE {quoted(role)} NOLOGIN; END IF;"
        for role in roles
    ]
    names = ", ".join(map(literal, roles))
    lines += [
        f"    IF (SELECT pg_get_userbyid(relowner) IN ({names}) FROM pg_class WHERE oid = {literal(owned)}::regclass) THEN",
        "        RAISE EXCEPTION 'one of these roles owns the outbox''s tables, and an owner may do anything with them:'",
        "            ' let a role of its own run the migrations';",
        "    END IF;",
    ]
    return _block(*lines)


def _let_read(version_table: str, roles: str) -> str:
    """The version table, by which `check` knows the revision; there is none where the app's own metadata made the tables."""
    return _block(
        f"    IF to_regclass({literal(version_table)}) IS NOT NULL THEN",
        f"        REVOKE ALL ON TABLE {version_table} FROM PUBLIC, {roles};",
        f"        GRANT SELECT ON TABLE {version_table} TO {roles};",
        "    END IF;",
    )


def _let_keep_bodies(schema: str | None, prefix: str, roles: str, *, readers: str, keepers: str) -> str:
    """The bodies' table, where `outbox db partition` made one. Only the trigger writes to it.

    Making a partition ahead is a function for those who keep the tables. Dropping one is left to the owner: PostgreSQL has no
    right for it that could be granted.
    """
    body, add = (quoted(f"{prefix}{name}", schema) for name in ("body", "add_body_days"))
    return _block(
        f"    IF to_regclass({literal(body)}) IS NOT NULL THEN",
        f"        REVOKE ALL ON TABLE {body} FROM PUBLIC, {roles};",
        f"        GRANT SELECT ON TABLE {body} TO {readers};",
        f"        REVOKE ALL ON FUNCTION {add}() FROM PUBLIC, {roles};",
        f"        GRANT EXECUTE ON FUNCTION {add}() TO {keepers};",
        "    END IF;",
    )


def _guard_queue(schema: str | None, prefix: str, *, enqueuers: Sequence[str]) -> Iterator[str]:
    """A row enters the queue with its entry, by the same statement or savepoint (`xmin`), as new and for the same as the entry.

    So no id that has settled comes back, whatever snapshot its transaction has. It runs with the rights of who inserts; names and
    operators are written out, as a search path and temporary tables are the inserter's own. The entry is found by a subquery: a
    join reads the whole queue where the planner believes that it is empty. Only where a row is refused it asks whether the owner
    inserts it, who restores a backup. Who is not among the enqueuers, an operator, adds only entries that ask again for one that
    failed or was cancelled, with all that it had (`dispatchers.admin.decide.again`).
    """
    queue, guard = quoted(f"{prefix}queue", schema), quoted(f"{prefix}guard_queue", schema)
    equal, differs = "OPERATOR(pg_catalog.=)", "OPERATOR(pg_catalog.<>)"
    columns = tables_of(None, prefix).queue.columns
    untouched = ", ".join(
        f"a.{column.name}" for column in columns if column.nullable and column.name not in OF_THE_ENTRY
    )
    settlement = quoted(f"{prefix}settlement", schema)
    of_role = "pg_catalog.pg_has_role(current_user, {}, 'USAGE')"
    enqueues = " OR ".join(of_role.format(literal(role).replace("%", "%%")) for role in enqueuers)
    is_owner = of_role.format(f"(SELECT c.relowner FROM pg_catalog.pg_class AS c WHERE c.oid {equal} TG_RELID)")
    yield f"""DO $outbox$ BEGIN EXECUTE format($make$
CREATE OR REPLACE FUNCTION {guard}() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    IF EXISTS (
        SELECT FROM added AS a WHERE COALESCE((
            SELECT COALESCE(
                a.state {differs} 'pending' OR a.deliveries {differs} 0 OR a.attempts {differs} 0 OR a.key_epoch {differs} 0
                OR a.maybe_sent OR pg_catalog.num_nonnulls({untouched}) {differs} 0
                OR a.destination {differs} e.destination OR a.ordering_key {differs} e.ordering_key
                OR (a.ordering_key IS NULL) {differs} (e.ordering_key IS NULL)
                OR (a.ordering_key IS NULL) {differs} (a.position IS NULL)
                OR (a.due_at {differs} e.due_at AND (a.position IS NULL OR a.due_at {differs} '{NEVER.isoformat()}'))
                OR a.fair {differs} e.destination OR a.scope {differs} e.scope, false)
            FROM %1$s AS q, %2$s AS e
            WHERE q.id {equal} a.id AND e.id {equal} a.id AND e.xmin {equal} q.xmin AND e.created_at {equal} pg_catalog.now()
        ), true)
    ) AND NOT {is_owner} THEN
        RAISE insufficient_privilege USING
            MESSAGE = 'only a new entry enters the queue of the outbox, together with its entry and as outbox.enqueue writes it';
    END IF;
    IF NOT ({enqueues}) AND EXISTS (
        SELECT FROM added AS a WHERE NOT EXISTS (
            {_asks_again()}
        )
    ) AND NOT {is_owner} THEN
        RAISE insufficient_privilege USING
            MESSAGE = 'this role may only ask again for an entry that failed or was cancelled, as `outbox again` does';
    END IF;
    RETURN NULL;
END
$guard$$make$, {in_full(queue)}, {in_full(quoted(f"{prefix}entry", schema))}, {in_full(settlement)});
END $outbox$"""
    yield f"""CREATE OR REPLACE TRIGGER {quoted(f"{prefix}guard_queue")} AFTER INSERT ON {queue}
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION {guard}()"""


def _asks_again() -> str:
    """The entry of the row `a`, if it has all that an entry has which failed or was cancelled, and names that one."""
    equal, differs = "OPERATOR(pg_catalog.=)", "OPERATOR(pg_catalog.<>)"
    is_again = "e.discriminator OPERATOR(pg_catalog.~) '^again:[0-9a-f-]{36}$'"
    first = f"CASE WHEN {is_again} THEN CAST(pg_catalog.substr(e.discriminator, 7) AS pg_catalog.uuid) END"
    same = (
        "env",
        "scope",
        "source",
        "parent",
        "operation",
        "parent_id",
        "destination",
        "payload",
        "options",
        "headers",
    )
    copied = " AND ".join(f"e.{name} {equal} f.{name}" for name in same)
    optional = " AND ".join(
        f"COALESCE(e.{name} {equal} f.{name}, e.{name} IS NULL AND f.{name} IS NULL)"
        for name in ("record_id", "ordering_key")
    )
    return f"""SELECT FROM %2$s AS e, %2$s AS f, %3$s AS s
            WHERE e.id {equal} a.id AND f.id {equal} {first} AND s.id {equal} f.id AND s.state {differs} 'delivered'
                AND {copied} AND {optional}"""


def _guard_records(schema: str | None, prefix: str, *, app: str, keepers: Sequence[str]) -> Iterator[str]:
    """The app changes the record of an open request only, and deletes one that has expired and left no entry.

    Everyone else is as free as their rights let them be: they keep to the first policy alone. So is who may also act as a
    dispatcher or as maintenance.
    """
    record, entry = quoted(f"{prefix}record", schema), quoted(f"{prefix}entry", schema)
    is_keeper = " OR ".join(f"pg_has_role(current_user, {literal(role)}, 'USAGE')" for role in dict.fromkeys(keepers))
    caused = f"EXISTS (SELECT FROM {entry} AS e WHERE {is_under_sql('e', f'{record}.id')})"
    elsewhere = f"EXISTS (SELECT FROM {entry} AS e WHERE e.record_id = {record}.id AND e.record_id <> e.parent_id)"
    has_expired = f"answered_at IS NOT NULL AND replay_until <= clock_timestamp() AND NOT {caused} AND NOT {elsewhere}"
    policies = {
        "everyone": "FOR ALL TO PUBLIC USING (true) WITH CHECK (true)",
        "open": f"AS RESTRICTIVE FOR UPDATE TO {quoted(app)} USING (answered_at IS NULL OR {is_keeper}) WITH CHECK (true)",
        "expired": f"AS RESTRICTIVE FOR DELETE TO {quoted(app)} USING (({has_expired}) OR {is_keeper})",
    }
    for name, policy in policies.items():
        yield f"DROP POLICY IF EXISTS {quoted(prefix + name)} ON {record}"
        yield f"CREATE POLICY {quoted(prefix + name)} ON {record} {policy}"
    yield f"ALTER TABLE {record} ENABLE ROW LEVEL SECURITY"


def _reading(table: Table, prefix: str) -> str:
    withheld = READ_WITH.get(table.name.removeprefix(prefix))
    if withheld is None:
        return "SELECT"
    return f"SELECT ({', '.join(quoted(column.name) for column in table.columns if column.name not in withheld)})"


def _grants(rights: Mapping[str, str], role: str, schema: str | None, prefix: str) -> Iterator[str]:
    for table, right in rights.items():
        yield f"GRANT {right} ON TABLE {quoted(prefix + table, schema)} TO {quoted(role)}"


def _block(*lines: str) -> str:
    return "\n".join(["DO $outbox$ BEGIN", *lines, "END $outbox$"])
