"""The history of the reference store's database: its identity, the suspension, the resumption; and what a restore does."""

from copy import deepcopy
from dataclasses import fields, replace
from datetime import datetime

from dispatchers.admin.decide.resume import RESUMING
from dispatchers.database_identity import DatabaseIdentity, IdentityCheck, bounds, is_due, suspicion
from outbox.times import MICROSECOND
from simulation.reference_rows import Event, Meta, Refused, Row, Tables

KEPT_OUTSIDE = ("clock", "locked", "timeline")  # of the tables, what no backup holds


def is_suspended(tables: Tables) -> bool:
    """Whether commits may be missing: a suspension is stored, or the server is on another timeline than the stored identity."""
    identity = tables.meta.identity
    return tables.meta.suspended is not None or (identity is not None and identity.timeline != tables.timeline)


def check_identity(tables: Tables, env: str, known: DatabaseIdentity | None) -> IdentityCheck:
    """Compare the database with its identity and with a process's memory: suspend, or renew the identity when it is old."""
    meta, now = tables.meta, _server(tables, env)
    if meta.suspended is None:
        reason = suspicion(now, meta.identity, known)
        if reason is not None:
            is_bounded = meta.identity is None or bounds(now, meta.identity, known)
            tables.meta = Meta(identity=meta.identity if is_bounded else None, suspended=reason, number=meta.number)
        elif meta.identity is None or is_due(now, meta.identity):
            resumed_at = meta.identity.resumed_at if meta.identity else None
            _write_identity(tables, replace(now, resumed_at=resumed_at))
    return IdentityCheck(
        identity=meta.identity if tables.meta.suspended else tables.meta.identity, suspended=tables.meta.suspended
    )


def _server(tables: Tables, env: str) -> DatabaseIdentity:
    return DatabaseIdentity(
        environment=env,
        system_identifier="7",
        timeline=tables.timeline,
        place="1",
        lsn=None,
        checked_at=tables.clock(),
    )


def _write_identity(tables: Tables, identity: DatabaseIdentity) -> None:
    number = tables.meta.number + 1
    tables.meta = Meta(identity=replace(identity, number=number), number=number)


# --- resuming


def resume(tables: Tables, env: str, why: str, since: datetime | None = None) -> None:
    """Resume the dispatchers: what is unsettled may have been sent since then, or since the last identity.

    Raises `Refused` where the time is unknown.
    """
    identity = tables.meta.identity
    if since is None and identity is None:
        raise Refused
    tables.meta = replace(tables.meta, suspended=tables.meta.suspended or RESUMING)
    began = since or (identity.checked_at if identity else tables.clock())
    for id, row in sorted(tables.queue.items()):
        if _doubt(row, began):
            decision = f"may have been sent after {began:%Y-%m-%d %H:%M:%S UTC}: {why}"
            tables.events.append(Event(id, "decision", decision))
    now, before = _server(tables, env), identity.resumed_at if identity else None
    resumed_at = now.checked_at if before is None else max(now.checked_at, before + MICROSECOND)
    _write_identity(tables, replace(now, resumed_at=resumed_at))


def _doubt(row: Row, since: datetime) -> bool:
    """Count it as maybe sent since then, and take its lease from a sender whose failures are no longer believed."""
    is_leased = row.lease_token is not None
    if row.maybe_sent and row.in_doubt_since is not None and row.in_doubt_since <= since and not is_leased:
        return False
    instants = [instant for instant in (row.in_doubt_since, row.leased_at) if instant is not None and instant < since]
    row.in_doubt_since = instants[0] if instants else since
    if row.state != "uncertain" and not (row.state == "pending" and row.maybe_sent):
        row.state = "retry"
    row.due_at = row.lease_until or row.due_at
    row.attempts += is_leased
    row.maybe_sent = True
    row.lease_token = row.lease_until = row.leased_at = None
    return True


# --- backups


def backup(tables: Tables) -> dict[str, object]:
    """All that there is, as it is now."""
    return {
        field.name: deepcopy(getattr(tables, field.name)) for field in fields(Tables) if field.name not in KEPT_OUTSIDE
    }


def restore(tables: Tables, kept: dict[str, object], timeline: str) -> None:
    """As a backup is recovered, or a lagging standby promoted: an earlier state, and a new timeline."""
    for name, value in kept.items():
        setattr(tables, name, value)
    tables.timeline = timeline
    tables.locked.clear()
