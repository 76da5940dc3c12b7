"""What the tests of `outbox verify` share: what it finds, and histories as the library writes them."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from dispatchers.admin.check.verify import verify
from outbox.keys import Keyring
from support.database import TABLES, Database

RING = Keyring({"k1": bytes(range(32))}, current="k1")

Harm = Callable[[sa.Connection, UUID], object]


def broken_rules(database: Database, harm: Callable[[sa.Connection], object] = lambda _: None) -> dict[str, list[str]]:
    """The rules that are broken, and by what. harm: changes something before, which is undone."""
    with database.engine.connect() as connection:
        harm(connection)
        found = verify(connection, TABLES, RING)
        connection.rollback()
    broken = [verdict for verdict in found.verdicts if verdict.violations]
    return {verdict.rule: [violation.text for violation in verdict.violations] for verdict in broken}


def setting(table: sa.Table, **values: Any) -> Harm:
    return lambda connection, id: connection.execute(table.update().where(table.c.id == id).values(values))


def taking(table: sa.Table) -> Harm:
    """Deletes the entry's rows of this table."""
    column = table.c.get("id" if table is not TABLES.event else "entry_id")
    assert column is not None
    return lambda connection, id: connection.execute(table.delete().where(column == id))


def require_only_harms_to_break(database: Database, id: UUID, harms: list[tuple[Harm, str, str]]) -> None:
    """No rule is broken, but each harm breaks one. harms: each with its rule, and how the violation begins."""
    assert broken_rules(database) == {}
    for harm, rule, text in harms:
        violations = broken_rules(database, lambda connection, harm=harm: harm(connection, id)).get(rule, [])
        assert any(f" {text}" in found for found in violations), (rule, violations)
