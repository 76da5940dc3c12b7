"""Whose entry waits, where a destination's slots are shared out over scopes.

Frozen: it says what this revision made, whatever `outbox/schema.py` says today. What it means is said there.

Two columns that may be NULL, and an index of the rows where they are not, of which no release before this one makes any. Nothing
is rewritten. On PostgreSQL they take the queue for themselves, until the index is made, empty: about 0.2 s per million rows.
"""

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    for name in ("fair", "scope"):
        op.add_column(f"{prefix}queue", sa.Column(name, sa.String(255)), schema=schema)
    is_fair = sa.text("fair IS NOT NULL")
    op.create_index(
        f"{prefix}queue_fair",
        f"{prefix}queue",
        ["fair", "scope", "due_at"],
        schema=schema,
        postgresql_where=is_fair,
        sqlite_where=is_fair,
    )


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    op.drop_index(f"{prefix}queue_fair", f"{prefix}queue", schema=schema)
    for name in ("scope", "fair"):
        op.drop_column(f"{prefix}queue", name, schema=schema)
