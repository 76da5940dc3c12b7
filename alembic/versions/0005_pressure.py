"""What dispatchers share of a destination's breaker, rate and pause; and since when an entry waits that was handed back.

Frozen: it says what this revision made, whatever `outbox/schema.py` says today. What it means is said there.

Five columns that may be NULL: nothing is rewritten. On PostgreSQL each takes an ACCESS EXCLUSIVE lock for a moment.
"""

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

AT = sa.DateTime(timezone=True).with_variant(sa.BigInteger(), "sqlite")
DESTINATION = {
    "breaker_token": sa.Uuid(),
    "rate_at": AT,
    "decided_by": sa.String(255),
    "decided_at": AT,
}


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    for name, kind in DESTINATION.items():
        op.add_column(f"{prefix}destination", sa.Column(name, kind), schema=schema)
    op.add_column(f"{prefix}queue", sa.Column("waiting_since", AT), schema=schema)


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    op.drop_column(f"{prefix}queue", "waiting_since", schema=schema)
    for name in reversed(DESTINATION):
        op.drop_column(f"{prefix}destination", name, schema=schema)
