"""Looks at a service, as a kind of event.

Frozen: it says what this revision made, whatever `outbox/schema.py` says today. What it means is said there.

On PostgreSQL the events are locked while all of them are read, about 0.3 s per million rows: what settles with a word to the
entry's history waits. Nothing is rewritten; only SQLite has to rebuild the table, about 7 s per million rows.

Downgrading makes the looks on record attempts.
"""

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    _allow(op, schema, prefix, "kind IN ('attempt', 'decision', 'look')")


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    event = sa.table(f"{prefix}event", sa.column("kind"), schema=schema)
    op.execute(sa.update(event).where(event.c.kind == "look").values(kind="attempt"))
    _allow(op, schema, prefix, "kind IN ('attempt', 'decision')")


def _allow(op: Operations, schema: str | None, prefix: str, condition: str) -> None:
    dialect = op.get_context().dialect
    if dialect.name == "sqlite":
        _rebuild(op, schema, prefix, condition)
        return
    table = dialect.identifier_preparer.format_table(sa.Table(f"{prefix}event", sa.MetaData(), schema=schema))
    constraint = dialect.identifier_preparer.quote(f"{prefix}event_kind")
    op.execute(f"ALTER TABLE {table} DROP CONSTRAINT {constraint}, ADD CONSTRAINT {constraint} CHECK ({condition})")


def _rebuild(op: Operations, schema: str | None, prefix: str, condition: str) -> None:
    """SQLite cannot change a check."""
    name, old = f"{prefix}event", f"{prefix}event_old"
    op.drop_index(f"{prefix}event_entry", name, schema=schema)
    op.rename_table(name, old, schema=schema)
    op.create_table(
        name,
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("entry_id", sa.Uuid(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("delivery", sa.Integer()),
        sa.Column("actor", sa.String(255)),
        sa.Column("reason", sa.Text()),
        sa.CheckConstraint(condition, name=f"{prefix}event_kind"),
        schema=schema,
    )
    names = ("id", "entry_id", "at", "kind", "delivery", "actor", "reason")
    kept = sa.table(old, *map(sa.column, names), schema=schema)
    made = sa.table(name, *map(sa.column, names), schema=schema)
    op.execute(sa.insert(made).from_select(names, sa.select(kept)))
    op.drop_table(old, schema=schema)
    op.create_index(f"{prefix}event_entry", name, ["entry_id"], schema=schema)
