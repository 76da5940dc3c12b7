"""Which right reads which column: of the database's roles, and of those who use the dashboard.

What a reader may not read is not shown to it, and not compared for it either: an answer that depends on a guess shows the value.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final

from sqlalchemy import Column

from outbox.sql.schema.tables import Tables


class Right(StrEnum):
    """keys: the child keys, with which one may claim to be the sender. content: what was sent and answered. decisions: what an
    operator has proposed. proofs: what proves who holds a lease or the secret; no page and no command shows it.
    """

    KEYS = "keys"
    CONTENT = "content"
    DECISIONS = "decisions"
    PROOFS = "proofs"


READ_WITH: Final[Mapping[str, Mapping[str, Right]]] = {
    "entry": {"payload": Right.CONTENT, "headers": Right.CONTENT, "tag": Right.KEYS},
    "queue": {"outcome": Right.CONTENT, "lease_token": Right.PROOFS},
    "settlement": {"result": Right.CONTENT},
    "proposal": {"decision": Right.DECISIONS},
    "record": {
        "fingerprint": Right.CONTENT,
        "body": Right.CONTENT,
        "headers": Right.CONTENT,
        "lease_token": Right.PROOFS,
    },
    "tombstone": {"fingerprint": Right.CONTENT},
    "kid": {"secret_check": Right.PROOFS},
}
"""The columns that need a right, by table. Every other column may be read by all who may read the table."""


def right_of(tables: Tables, column: Column[object]) -> Right | None:
    """The right that reads a column; None if it needs none."""
    for table, columns in READ_WITH.items():
        if column.table is getattr(tables, table):
            return columns.get(column.name)
    return None


def without_right(
    tables: Tables, columns: Collection[Column[object]], rights: Collection[Right]
) -> frozenset[Column[object]]:
    """The columns that none of these rights reads."""
    return frozenset(each for each in columns if not {right_of(tables, each)} <= {None, *rights})
