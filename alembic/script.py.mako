"""${message}.

Frozen once released: write names and types out, import nothing of `outbox`. Say its lock and its time per million rows.
"""

import sqlalchemy as sa

from alembic.operations import Operations
${imports if imports else ""}
# Four digits, one more than the last: `outbox.migrations` compares them as text. The file is named for it: ${up_revision}_what.py
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    ${upgrades if upgrades else "pass"}


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    ${downgrades if downgrades else "pass"}
