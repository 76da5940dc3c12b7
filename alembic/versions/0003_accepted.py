"""An index of the open requests: a dispatcher looks among the accepted for those that wait for nothing, a gauge tells ages.

Frozen: it says what this revision made, whatever `outbox/schema.py` says today. What it means is said there.

Nothing is rewritten. On PostgreSQL the index takes a SHARE lock on the records while it is built: reading goes on, requests that
store an answer wait, about 0.2 s per million rows. No release before this one leaves requests open, so it is made empty.
"""

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    is_open = sa.text("state IN ('accepted', 'leased')")
    op.create_index(
        f"{prefix}record_open",
        f"{prefix}record",
        ["state", "created_at"],
        schema=schema,
        postgresql_where=is_open,
        sqlite_where=is_open,
    )


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    op.drop_index(f"{prefix}record_open", f"{prefix}record", schema=schema)
