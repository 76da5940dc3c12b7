"""Detects that the database was failed over, restored or copied, by its stored identity. Pure.

An identity is a few facts about the server, written into the database once a minute and remembered by each process that saw it
committed. A database that has lost commits, or is a copy, contradicts an identity: its server reports other facts, or its
stored identity is older than a remembered one. See docs/restore.md.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

IDENTITY_EVERY = timedelta(minutes=1)
"""The age at which an identity is renewed. Lost commits came after the last surviving one, so doubt begins at most this much
earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseIdentity:
    """A server's own facts at one moment of its clock; None for what it does not report.

    environment: the deployment's name, as the dispatcher is configured. place: which database and table of the server, or
    which file. lsn: how far its write-ahead log was. resumed_at: when an operator last resumed after a restore. number: of the
    identities that were written into the database, one after another; 0 for one that was not.
    """

    environment: str
    system_identifier: str | None
    timeline: str | None
    place: str | None
    lsn: str | None
    checked_at: datetime
    resumed_at: datetime | None = None
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityCheck:
    """The result of a check: the stored identity, and why all sending is suspended, if it is.

    continued: the promotion after which this check let sending continue, because the fleet declares that promotions lose nothing.
    """

    identity: DatabaseIdentity | None
    suspended: str | None = None
    continued: str | None = None


def suspicion(now: DatabaseIdentity, identity: DatabaseIdentity | None, known: DatabaseIdentity | None) -> str | None:
    """Why the database may have lost commits; None if nothing shows it. now: what the server reports. identity: what is stored in
    the database. known: what the asking process remembers, or its file. All of one environment: a process of another one has
    refused itself before.
    """
    if is_outdated(known, identity):
        known = None
    for earlier in (identity, known):
        if earlier is not None and (change := _change(earlier, now)) is not None:
            return change
    if known is not None and (identity is None or not _follows(identity, known)):
        found = "no identity" if identity is None else _shown(identity)
        return f"the database has {found}, although {_shown(known)} had been committed: an older state was restored"
    return None


def is_promotion(now: DatabaseIdentity, identity: DatabaseIdentity | None, known: DatabaseIdentity | None) -> bool:
    """Whether all that is suspicious is a timeline that follows the stored one: the same history, with every identity in it."""
    if identity is None or identity.timeline is None or now.timeline is None or now.timeline == identity.timeline:
        return False
    if now.lsn is not None and int(now.timeline, 16) < int(identity.timeline, 16):  # PostgreSQL counts them
        return False
    followed = [replace(each, timeline=now.timeline) if each else None for each in (identity, known)]
    return suspicion(now, *followed) is None


def is_outdated(known: DatabaseIdentity | None, identity: DatabaseIdentity | None) -> bool:
    """Whether an operator has resumed since `known` was remembered, and so decided about what came between."""
    return known is not None and identity is not None and _resumed(identity) > _resumed(known)


def bounds(now: DatabaseIdentity, identity: DatabaseIdentity, known: DatabaseIdentity | None) -> bool:
    """Whether the lost commits came after `identity`. Not if only `known` shows a loss and `identity` is younger: another process
    wrote it after the loss.
    """
    return known is None or identity.checked_at <= known.checked_at or suspicion(now, identity, None) is not None


def is_due(now: DatabaseIdentity, identity: DatabaseIdentity) -> bool:
    """Whether the identity must be renewed. Its time never decreases.

    The timeline of a MariaDB is unknown while it follows another server.
    """
    return now.timeline != identity.timeline or now.checked_at - identity.checked_at >= IDENTITY_EVERY


def _change(earlier: DatabaseIdentity, now: DatabaseIdentity) -> str | None:
    if earlier.system_identifier not in (None, now.system_identifier):
        return (
            f"the server has changed, system identifier {now.system_identifier} instead of {earlier.system_identifier}:"
            " the database was restored from a dump, copied or upgraded"
        )
    if None not in (earlier.timeline, now.timeline) and now.timeline != earlier.timeline:
        return (
            f"the server is on timeline {now.timeline} instead of {earlier.timeline}: a standby was promoted, or a backup was"
            " restored"
        )
    if earlier.place not in (None, now.place):
        return f"the tables have changed, {now.place} instead of {earlier.place}: they were restored or copied"
    if earlier.lsn is not None and now.lsn is not None and position(now.lsn) < position(earlier.lsn):
        return f"the write-ahead log went back to {now.lsn} from {earlier.lsn}: an older state was restored"
    return None


def position(lsn: str) -> int:
    """The number of bytes that an LSN represents. Source: PostgreSQL, "pg_lsn Type"."""
    high, low = lsn.split("/")
    return (int(high, 16) << 32) + int(low, 16)


def _resumed(identity: DatabaseIdentity) -> datetime:
    return identity.resumed_at or datetime.min.replace(tzinfo=UTC)


def _follows(identity: DatabaseIdentity, known: DatabaseIdentity) -> bool:
    """Whether `identity` is `known`, or may have been written after it."""
    return identity.number > known.number or (
        identity.number == known.number and identity.checked_at == known.checked_at
    )


def _shown(identity: DatabaseIdentity) -> str:
    return f"identity {identity.number} of {identity.checked_at:%Y-%m-%d %H:%M:%S UTC}"
