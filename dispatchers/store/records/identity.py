"""The stored database identity: what the server reports, what is stored, and the suspension of sending."""

from dataclasses import fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, select, text, update
from sqlalchemy.exc import DBAPIError

from dispatchers.database_identity import (
    DatabaseIdentity,
    IdentityCheck,
    bounds,
    is_due,
    is_outdated,
    is_promotion,
    suspicion,
)
from dispatchers.store.connections.guards import guard
from outbox.sql.deployment import refuse_other_environment, require_environment
from outbox.sql.dialect import dialect_of
from outbox.sql.errors.driver import sqlstate
from outbox.sql.schema.tables import Tables
from outbox.times import MICROSECOND

REFUSALS = frozenset({"42501", "42883", "0A000"})
"""SQLSTATEs for a user who may not read the identity: insufficient_privilege, undefined_function, feature_not_supported."""


def check_identity(
    connection: Connection,
    tables: Tables,
    env: str,
    known: DatabaseIdentity | None,
    *,
    reads_server: bool = True,
    promotions_lose_nothing: bool = False,
) -> IdentityCheck:
    """Compare the database with its stored identity and with `known`. If they differ, suspend sending; otherwise renew it.

    reads_server: whether this user may read the server's identifier, timeline and log position.
    promotions_lose_nothing: if only a promotion has happened, record it as resumed instead of suspending.
    Raises `ConfigurationError`, with nothing written, if the database belongs to another env.
    """
    # Read the stored identity before the server's values. Otherwise another process could write a later identity between them.
    identity, suspended = read_identity(connection, tables)
    _require_environment(connection, tables, env, identity, known)
    now = read_server(connection, tables, env, reads_server=reads_server)
    if suspended is not None:
        return IdentityCheck(identity=identity, suspended=suspended)
    reason = suspicion(now, identity, known)
    if reason is not None and identity is not None and promotions_lose_nothing and is_promotion(now, identity, known):
        continued = continue_after(connection, tables, identity, now, reason)
        identity, suspended = read_identity(connection, tables)
        return IdentityCheck(identity=identity, suspended=suspended, continued=reason if continued else None)
    if reason is not None:
        return suspend(connection, tables, identity, reason, bounded=identity is None or bounds(now, identity, known))
    if identity is None or is_due(now, identity):
        renew(connection, tables, identity, now)
        identity, suspended = read_identity(connection, tables)
    return IdentityCheck(identity=identity, suspended=suspended)


def _require_environment(
    connection: Connection, tables: Tables, env: str, identity: DatabaseIdentity | None, known: DatabaseIdentity | None
) -> None:
    if known is not None and not is_outdated(known, identity):
        refuse_other_environment(connection, known.environment, env, witness="as this process remembers, ")
    if identity is not None:
        refuse_other_environment(connection, identity.environment, env)
    else:
        require_environment(connection, tables, env)


def is_suspended(connection: Connection, tables: Tables) -> bool:
    """Whether the database may have forgotten commits, also if no dispatcher has noticed yet (on PostgreSQL)."""
    condition = dialect_of(connection).suspension(tables.meta)
    if condition is not None:
        return bool(connection.execute(text(f"SELECT {condition}")).scalar_one())
    return read_identity(connection, tables)[1] is not None


def read_identity(connection: Connection, tables: Tables) -> tuple[DatabaseIdentity | None, str | None]:
    """The stored identity, and why sending is suspended, if it is."""
    row = connection.execute(select(tables.meta)).one_or_none()
    if row is None:
        return None, None
    return _identity_of(row), row.suspended_reason


def _identity_of(row: Row[Any]) -> DatabaseIdentity | None:
    if row.checked_at is None:
        return None  # sending is suspended, and the identity was deleted
    return DatabaseIdentity(**{field.name: row._mapping[field.name] for field in fields(DatabaseIdentity)})


# --- what the server reports


def read_server(connection: Connection, tables: Tables, env: str, *, reads_server: bool) -> DatabaseIdentity:
    """The server's present identity. Raises DBAPIError if this user may not read it: see `refuses`."""
    found = dialect_of(connection).server_identity(connection, tables.meta, reads_server=reads_server)
    return DatabaseIdentity(environment=env, **found._asdict())


def can_read_server(connection: Connection, tables: Tables) -> bool:
    """Whether this user may read the server's identity. Aborts the transaction if not."""
    try:
        read_server(connection, tables, "", reads_server=True)
    except DBAPIError as error:
        if not refuses(error):
            raise
        connection.rollback()
        return False
    return True


def refuses(error: DBAPIError) -> bool:
    """Whether the user may not read the identity, as with some managed servers."""
    return sqlstate(error.orig) in REFUSALS


# --- what is stored


def renew(connection: Connection, tables: Tables, identity: DatabaseIdentity | None, now: DatabaseIdentity) -> None:
    """Store the present identity, unless another process has stored one, or suspended sending, since `identity` was read."""
    guard(connection)
    meta = tables.meta
    if identity is None:
        connection.execute(
            dialect_of(connection).insert_unless_present(meta).values(id=1, **values_of(replace(now, number=1)))
        )
    else:
        unchanged = meta.c.suspended_reason.is_(None) & (meta.c.number == identity.number)
        following = replace(now, resumed_at=identity.resumed_at, number=identity.number + 1)
        connection.execute(update(meta).where(unchanged).values(values_of(following)))


def suspend(
    connection: Connection, tables: Tables, identity: DatabaseIdentity | None, reason: str, *, bounded: bool = True
) -> IdentityCheck:
    """Suspend sending, unless it is suspended, or an operator has resumed it since `identity` was read.

    bounded: whether all lost commits came after `identity`. If not, delete its time; an operator must then give a time.
    """
    guard(connection)
    meta = tables.meta
    if identity is None:
        connection.execute(dialect_of(connection).insert_unless_present(meta).values(id=1, suspended_reason=reason))
    else:
        unresumed = meta.c.suspended_reason.is_(None) & meta.c.resumed_at.is_not_distinct_from(identity.resumed_at)
        values = {"suspended_reason": reason} | ({} if bounded else {"checked_at": None})
        connection.execute(update(meta).where(unresumed).values(values))
    return IdentityCheck(identity=identity, suspended=reason)


def continue_after(
    connection: Connection, tables: Tables, identity: DatabaseIdentity, now: DatabaseIdentity, promotion: str
) -> bool:
    """Store the identity of the promoted server, as an operator's `resume --nothing-lost` does.

    Returns False if another process did so, or suspended sending, since `identity` was read.
    """
    guard(connection)
    meta = tables.meta
    unchanged = meta.c.suspended_reason.is_(None) & (meta.c.number == identity.number)
    following = replace(now, resumed_at=later_resume(now.checked_at, identity.resumed_at), number=identity.number + 1)
    on_record = {"resumed_by": "promotions_lose_nothing", "resumed_reason": promotion}
    written = connection.execute(update(meta).where(unchanged).values(values_of(following) | on_record))
    return written.rowcount == 1


def later_resume(at: datetime, before: datetime | None) -> datetime:
    """The time of a resume: `at`, but later than the resume before, because the clock may have been set back."""
    return at if before is None else max(at, before + MICROSECOND)


def values_of(identity: DatabaseIdentity) -> dict[str, Any]:
    return {field.name: getattr(identity, field.name) for field in fields(DatabaseIdentity)}
