"""The SQL of the roles on MariaDB and MySQL, which have neither owners of tables nor row level security.

Each statement commits by itself, and a process at work keeps its rights while the SQL runs again: a right is granted before
others are taken away. Only a right on single columns is missing for an instant, because they revoke it with the table's.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from outbox.sql.schema.tables import key_lock, tables_of

Rights = Mapping[str, str]
"""What a role may do with each table, as GRANT takes it, by the table's name without the prefix."""

LOCKING = {"key_lock": "SELECT, INSERT, UPDATE (id), DELETE"}  # an upsert asks for UPDATE, though it finds no row
CANCELLING = {"queue": "SELECT, INSERT, UPDATE (due_at), DELETE", "settlement": "SELECT, INSERT"}
VISIBLE = "REFERENCES"
"""The right to see that a table exists, and its columns, as `check` asks. It reads no row and changes nothing."""

ON_TABLES = (
    *("SELECT", "INSERT", "UPDATE", "DELETE", "CREATE", "DROP", "INDEX", "ALTER", "CREATE VIEW"),
    *("SHOW VIEW", "TRIGGER", "GRANT OPTION"),
)
"""All other rights that both know on a table."""


class Grammar(NamedTuple):
    """What the two servers write differently.

    rights: all on a table, but `VISIBLE`. revoke: the beginning of a REVOKE that does not fail for a right that is not granted.
    execute: the statements that execute the text in a variable.
    """

    rights: tuple[str, ...]
    revoke: str
    execute: tuple[str, ...]


MARIADB = Grammar((*ON_TABLES, "DELETE HISTORY"), "REVOKE", ("EXECUTE IMMEDIATE @outbox_grant",))
MYSQL = Grammar(
    ON_TABLES,
    "REVOKE IF EXISTS",
    ("PREPARE outbox_grant FROM @outbox_grant", "EXECUTE outbox_grant", "DEALLOCATE PREPARE outbox_grant"),
)


class Granted(NamedTuple):
    """The rights of one role on one table: on all of it, and on columns."""

    whole: set[str]
    columns: dict[str, set[str]]


def printed_on_mariadb(
    roles: Iterable[tuple[str, Rights]], schema: str | None, prefix: str, grammar: Grammar = MARIADB
) -> str:
    """The SQL that gives each role its rights. A role may be there more than once, and then has the rights of all its parts.

    Its tables are those of `schema`, or of the database that the client uses.
    """
    tables = tables_of(None, prefix)
    names = [*(table.name for table in tables.metadata.tables.values()), key_lock(tables).name]
    merged: dict[str, dict[str, Granted]] = {}
    for role, rights in roles:
        for table, text in rights.items():
            granted = merged.setdefault(role, {}).setdefault(prefix + table, Granted(set(), {}))
            _add(granted, text)
            if table not in LOCKING:  # FOR UPDATE needs it on PostgreSQL only, and nothing changes an id
                granted.columns.get("UPDATE", set()).discard("id")
    statements = [f"CREATE ROLE IF NOT EXISTS {_quoted(role)}" for role in merged]
    for role, of_tables in merged.items():
        for name in names:
            statements += _of_table(
                _quoted(role), _quoted(name, schema), of_tables.get(name, Granted(set(), {})), grammar
            )
        statements += _let_read(f"{prefix}version", schema, role, grammar)
    return "".join(f"{statement};\n" for statement in statements)


def _add(granted: Granted, text: str) -> None:
    """text: such as `SELECT, UPDATE (due_at, outcome)`."""
    for part in text.replace(", ", ",").replace("),", ");").split(";"):
        rights, bracket, columns = part.partition(" (")
        *whole, last = rights.split(",")
        granted.whole.update(whole if bracket else [*whole, last])
        if bracket and last == "INSERT":
            columns = f"id,{columns}"  # INSERT ... RETURNING asks for it, of what it returns
        if bracket:
            granted.columns.setdefault(last, set()).update(columns.rstrip(")").split(","))


def _of_table(role: str, table: str, granted: Granted, grammar: Grammar) -> Iterator[str]:
    whole = [right for right in grammar.rights if right in granted.whole]
    others = [right for right in grammar.rights if right not in whole]
    yield f"GRANT {', '.join([VISIBLE, *whole])} ON TABLE {table} TO {role}"
    yield f"{grammar.revoke} {', '.join(others)} ON TABLE {table} FROM {role}"
    for right, columns in granted.columns.items():
        if columns and right not in granted.whole:
            yield f"GRANT {right} ({', '.join(map(_quoted, sorted(columns)))}) ON TABLE {table} TO {role}"


def _let_read(name: str, schema: str | None, role: str, grammar: Grammar) -> Iterator[str]:
    """The version table, by which `check` knows the revision; there is none where the app's own metadata made the tables."""
    database = "DATABASE()" if schema is None else _literal(schema)
    exists = (
        f"SELECT * FROM information_schema.tables WHERE table_schema = {database} AND table_name = {_literal(name)}"
    )
    grant = f"GRANT SELECT ON TABLE {_quoted(name, schema)} TO {_quoted(role)}"
    yield f"SET @outbox_grant = IF(EXISTS ({exists}), {_literal(grant)}, 'DO 0')"
    yield from grammar.execute


def _quoted(name: str, schema: str | None = None) -> str:
    return ".".join("`" + part.replace("`", "``") + "`" for part in (schema, name) if part is not None)


def _literal(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
