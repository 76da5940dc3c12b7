"""The rights of the database's roles: who may do what with the outbox's tables."""

from collections.abc import Iterator, Mapping, Sequence

from sqlalchemy import MetaData

from outbox.functions import database_functions
from outbox.schema import define_tables
from outbox.table_names import quoted

APP = {
    "entry": "SELECT, INSERT",
    "queue": "SELECT, INSERT",
    "settlement": "SELECT",
    "record": "SELECT, INSERT, UPDATE, DELETE",  # an expired key is freed by the request that uses it again
    "tombstone": "SELECT",
}

# FOR UPDATE, by which upkeeps at once keep out of each other's way, asks for the right to update a column, if only one.
UPKEEP = {
    "entry": "SELECT, UPDATE (id), DELETE",
    "queue": "SELECT",
    "settlement": "SELECT, UPDATE (id), DELETE",
    "event": "SELECT, DELETE",
    "halted": "SELECT",  # an entry that halts its lane is kept
    "record": "SELECT, UPDATE (id), DELETE",
    "tombstone": "SELECT, INSERT, UPDATE, DELETE",
}

# What it enqueues in callbacks is written as the app writes it, and its timetable does what upkeep does.
DISPATCHER = {
    "queue": "SELECT, INSERT, UPDATE, DELETE",
    "entry": "SELECT, INSERT, UPDATE (id), DELETE",
    "settlement": "SELECT, INSERT, UPDATE (id), DELETE",
    "event": "SELECT, INSERT, DELETE",
    "destination": "SELECT, INSERT, UPDATE, DELETE",
    "halted": "SELECT, INSERT, UPDATE, DELETE",
    "meta": "SELECT, INSERT, UPDATE",
    "record": "SELECT, INSERT, UPDATE, DELETE",
    "tombstone": "SELECT, INSERT, UPDATE, DELETE",
}


def roles(
    *,
    schema: str | None = None,
    prefix: str = "outbox_",
    app: str = "outbox_app",
    dispatcher: str = "outbox_dispatcher",
    upkeep: str = "outbox_upkeep",
    dashboard: str = "outbox_dashboard",
) -> str:
    """The SQL that gives each role its rights on PostgreSQL, for someone to read and run; running it again changes nothing.

    A role that does not exist is created without the right to log in: `GRANT outbox_app TO shop` makes a login one of them.
    Each loses every other right on the outbox's tables. The app may add entries, and cancel one by the function for it,
    but not change or delete one. To be run by the tables' owner, who must be none of the four: the SQL itself refuses that.
    """
    names = [table.name for table in define_tables(MetaData(), prefix=prefix).metadata.tables.values()]
    reading = {name.removeprefix(prefix): "SELECT" for name in names}
    everyone = list(dict.fromkeys((app, dispatcher, upkeep, dashboard)))
    tables = ", ".join(quoted(name, schema) for name in names)
    listed = ", ".join(map(quoted, everyone))
    position, event_id = (quoted(f"{prefix}{name}", schema) for name in ("position", "event_id_seq"))
    cancel = database_functions(schema, prefix)["cancel"].signature
    senders = f"{quoted(app)}, {quoted(dispatcher)}"
    statements = [
        "BEGIN",
        _create(everyone, owned=quoted(f"{prefix}entry", schema)),
        *([] if schema is None else [f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {listed}"]),
        f"REVOKE ALL ON TABLE {tables} FROM PUBLIC, {listed}",
        f"REVOKE ALL ON SEQUENCE {position}, {event_id} FROM PUBLIC, {listed}",
        f"REVOKE ALL ON FUNCTION {cancel} FROM PUBLIC, {listed}",
        *_grants(APP, app, schema, prefix),
        *_grants(DISPATCHER, dispatcher, schema, prefix),
        *_grants(UPKEEP, upkeep, schema, prefix),
        *_grants(reading, dashboard, schema, prefix),
        f"GRANT USAGE ON SEQUENCE {position} TO {senders}",
        f"GRANT USAGE ON SEQUENCE {event_id} TO {quoted(dispatcher)}",
        f"GRANT EXECUTE ON FUNCTION {cancel} TO {senders}",
        _let_read(quoted(f"{prefix}version", schema), listed),
        _let_keep_bodies(schema, prefix, listed, keepers=f"{quoted(dispatcher)}, {quoted(upkeep)}"),
        "COMMIT",
    ]
    return "".join(f"{statement};\n" for statement in statements)


def _create(roles: Sequence[str], *, owned: str) -> str:
    """Create the roles that do not exist, and refuse one that owns the tables: no right can be withheld from an owner."""
    lines = [
        f"    IF to_regrole({_literal(quoted(role))}) IS NULL THEN CREATE ROLE {quoted(role)} NOLOGIN; END IF;"
        for role in roles
    ]
    names = ", ".join(map(_literal, roles))
    lines += [
        f"    IF (SELECT pg_get_userbyid(relowner) IN ({names}) FROM pg_class WHERE oid = {_literal(owned)}::regclass) THEN",
        "        RAISE EXCEPTION 'one of these roles owns the outbox''s tables, and an owner may do anything with them:'",
        "            ' let a role of its own run the migrations';",
        "    END IF;",
    ]
    return _block(*lines)


def _let_read(version_table: str, roles: str) -> str:
    """The version table, by which `check` knows the revision; there is none where the app's own metadata made the tables."""
    return _block(
        f"    IF to_regclass({_literal(version_table)}) IS NOT NULL THEN",
        f"        REVOKE ALL ON TABLE {version_table} FROM PUBLIC, {roles};",
        f"        GRANT SELECT ON TABLE {version_table} TO {roles};",
        "    END IF;",
    )


def _let_keep_bodies(schema: str | None, prefix: str, roles: str, *, keepers: str) -> str:
    """The bodies' table, where `outbox db partition` made one. All read it; nobody writes to it but by the trigger.

    Making a partition ahead is a function for those who keep the tables. Dropping one is left to the owner: PostgreSQL has no
    right for it that could be granted.
    """
    body, add = (quoted(f"{prefix}{name}", schema) for name in ("body", "add_body_days"))
    return _block(
        f"    IF to_regclass({_literal(body)}) IS NOT NULL THEN",
        f"        REVOKE ALL ON TABLE {body} FROM PUBLIC, {roles};",
        f"        GRANT SELECT ON TABLE {body} TO {roles};",
        f"        REVOKE ALL ON FUNCTION {add}() FROM PUBLIC, {roles};",
        f"        GRANT EXECUTE ON FUNCTION {add}() TO {keepers};",
        "    END IF;",
    )


def _grants(rights: Mapping[str, str], role: str, schema: str | None, prefix: str) -> Iterator[str]:
    for table, right in rights.items():
        yield f"GRANT {right} ON TABLE {quoted(prefix + table, schema)} TO {quoted(role)}"


def _block(*lines: str) -> str:
    return "\n".join(["DO $outbox$ BEGIN", *lines, "END $outbox$"])


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
