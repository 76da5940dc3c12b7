"""The columns that each search parameter compares, on a page, in the JSON API and on the command line: one table for all.

A reader without the right to one of these columns may not use the parameter: a right guess and a wrong one would be answered
differently. `text`, which searches many columns, leaves out those that its reader may not read.
"""

from collections.abc import Collection, Mapping
from typing import Final

from outbox.sql.schema.rights import READ_WITH, Right

COMPARED: Final[Mapping[str, tuple[str, ...]]] = {
    # which entries
    "id": ("entry.id", "record.id", "proposal.id"),
    "state": ("queue.state", "settlement.state", "record.state"),
    "operation": ("entry.operation",),
    "destination": ("entry.destination", "queue.destination"),
    "parent": ("entry.parent",),
    "parent_prefix": ("entry.parent",),
    "payload": ("entry.payload",),
    "scope": ("entry.scope", "record.scope"),
    "source": ("entry.source", "record.source"),
    "env": ("entry.env", "record.env"),
    "ordering_key": ("entry.ordering_key", "queue.ordering_key"),
    "suspended": ("queue.suspended_reason",),
    "reason_contains": (
        "settlement.reason",
        "queue.suspended_reason",
    ),  # and of the outcome the reason, which lists show
    "since": ("queue.due_at", "settlement.settled_at", "audit.at"),
    "enqueued_since": ("entry.created_at",),
    "enqueued_before": ("entry.created_at",),
    "version": ("queue.attempts",),
    "counted_at": ("event.at",),
    "entries": ("entry.id",),
    # which requests, groups, destinations and decisions
    "key": ("record.parent", "queue.ordering_key"),
    "status": ("record.status",),
    "every": ("blocked_group.ordering_key",),
    "blocked_by": ("blocked_group.entry_id",),
    "name": ("destination.name",),
    "actor": ("audit.actor",),
    "action": ("audit.action",),
    "target": ("audit.target",),
    "about": ("audit.target",),
    # what a list begins after is what it is ordered by
    "after": (
        *("queue.due_at", "queue.in_doubt_since", "settlement.settled_at", "entry.id"),
        *("record.created_at", "record.keep_until", "mismatch.last_at", "record.id"),
        *("queue.ordering_key", "audit.at", "audit.id"),
    ),
    "text": (
        *("entry.id", "entry.parent", "entry.discriminator", "entry.ordering_key", "queue.ordering_key", "record.id"),
        *("record.parent", "entry.tag", "queue.outcome", "settlement.result"),
    ),
    # what is recorded, or says how much is read
    **dict.fromkeys(("decision", "reason", "result", "done", "skipped", "limit", "rows", "withdraw", "propose"), ()),
}
LEAVE_OUT: Final = frozenset({"text"})
"""The parameters that compare with what the reader may read, and leave the rest out."""


def missing_rights(given: Collection[str], rights: Collection[Right]) -> Mapping[str, Right]:
    """The parameters that this reader may not use, each with a right that it lacks. Raises `KeyError` for one without a line."""
    missing = {}
    for name in given:
        needed = {READ_WITH.get(table, {}).get(column) for table, _, column in map(_parted, COMPARED[name])}
        lacking = sorted(right for right in needed if right is not None and right not in rights)
        if lacking and name not in LEAVE_OUT:
            missing[name] = lacking[0]
    return missing


def _parted(column: str) -> tuple[str, str, str]:
    return column.partition(".")
