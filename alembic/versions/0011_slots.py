"""What dispatchers have taken of the slots that they share.

Frozen: it says what this revision made, whatever `outbox/schema.py` says today. What it means is said there.

Two columns that may be NULL: nothing is rewritten. On PostgreSQL each takes an ACCESS EXCLUSIVE lock for a moment.
"""

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    op.add_column(f"{prefix}destination", sa.Column("slots_max", sa.Integer()), schema=schema)
    op.add_column(f"{prefix}destination", sa.Column("slots_taken", sa.Text()), schema=schema)


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    for name in ("slots_taken", "slots_max"):
        op.drop_column(f"{prefix}destination", name, schema=schema)
