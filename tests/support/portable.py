"""The audit of the portable mode: every statement that is sent in it, and what none of them may need."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

REFUSED = re.compile(
    r"SKIP\s+LOCKED|pg_\w*advisory|\bLISTEN\b|\bNOTIFY\b|pg_notify|plpgsql|\bDO\s+\$|\bCREATE\s+(?:OR\s+REPLACE\s+)?FUNCTION"
    r"|\bTRIGGER\b|pg_walfile|pg_current_wal|pg_control_system|\bnextval\b|\bPARTITION\s+(?:OF|BY\s+(?:RANGE|LIST|HASH))\b"
    r"|\bpg_get_serial_sequence|\bmake_interval",
    re.IGNORECASE,
)
CHANGING = re.compile(r"\bINSERT\s+INTO\b|\bUPDATE\s+\S+\s+(?:AS\s+\w+\s+)?SET\b|\bDELETE\s+FROM\b", re.IGNORECASE)


def refused_in(statement: str) -> list[str]:
    """What the statement needs and an engine of this mode lacks; more than one changing part too."""
    changing = CHANGING.findall(statement)
    return REFUSED.findall(statement) + (changing if len(changing) > 1 else [])


class Sent:
    """Records the statements of all engines in this mode."""

    @contextmanager
    def recorded(self) -> Iterator[list[str]]:
        sent: list[str] = []

        def before(connection: sa.Connection, cursor: Any, statement: str, *rest: Any) -> None:
            if connection.dialect.name == "portable":
                sent.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", before)
        try:
            yield sent
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", before)


SENT = Sent()
