"""A record under a lease: take, renew, end and answer it. Every later write compares the lease's token."""

from datetime import timedelta
from typing import Any, Literal, NamedTuple
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, Connection, FromClause, literal_column, select, update

from outbox.errors import LeaseLost
from outbox.requests.body_key import BodyRequest, choose_key
from outbox.requests.records import RecordKey, claim_key, key_expired, key_in_flight, require_same_request
from outbox.requests.responses import Response, columns_with
from outbox.sql.clock import clock, clock_plus
from outbox.sql.connections.transactions import require_transaction
from outbox.sql.dialect import dialect_of
from outbox.sql.key_locks import certify
from outbox.sql.statements import own_row


class Lease(NamedTuple):
    """The right to answer a request, while the record has this token. kid: of the secret from which its child keys derive."""

    key: RecordKey
    token: UUID
    kid: str
    length: timedelta


class Taken(NamedTuple):
    """The result of `take`: the lease, or the answer if the request has one."""

    outcome: Literal["miss", "hit", "taken_over"]
    key: RecordKey
    lease: Lease | None
    response: Response | None


def take(connection: Connection, request: RecordKey | BodyRequest, length: timedelta) -> Taken:
    """Lease the request's key in a short transaction, which the caller commits. An expired lease is taken over.

    The fingerprint, the kid and the retry window of the first attempt are kept, so all attempts have the same child keys.
    Raises `KeyInFlight` (.retry_after: the rest of the lease), `RequestMismatch`, `KeyExpired`, and `ConfigurationError` if the
    key ring lacks the kid of the first attempt.
    """
    require_transaction(connection, request.configuration.schema)
    dialect_of(connection).require_prepared(connection)
    key = choose_key(connection, request, timedelta(0))
    standing = _standing_lease(connection, key)
    if standing is not None:
        return Taken("taken_over", key, _take_over(connection, key, standing, length), None)
    answer = claim_key(connection, key, timedelta(0))
    if answer is not None:
        return Taken("hit", key, None, answer)
    return Taken("miss", key, _insert(connection, key, length), None)


def _insert(connection: Connection, key: RecordKey, length: timedelta) -> Lease:
    lease = Lease(key, uuid4(), key.kid, length)
    parent = key.parent
    fingerprint, version = key.stored_fingerprint
    written = connection.execute(
        dialect_of(connection)
        .insert_unless_present(key.configuration.tables.record)
        .values(
            id=key.id,
            env=key.configuration.env,
            scope=parent.scope,
            source=parent.source,
            parent=parent.key,
            kid=lease.kid,
            state="leased",
            fingerprint=fingerprint,
            fingerprint_version=version,
            lease_token=lease.token,
            lease_until=clock_plus(length),
            created_at=clock(),
            **_kept(key),
        )
    )
    if not written.rowcount:  # despite the lock: the snapshot may be older than the commit of another attempt
        raise key_in_flight(key.name)
    return lease


def _kept(key: RecordKey) -> dict[str, Any]:
    return {
        "replay_until": clock_plus(key.retention),
        "keep_until": clock_plus(max(key.retention, key.configuration.record_retention)),
    }


class _Standing(NamedTuple):
    token: UUID
    kid: str
    fingerprint: bytes
    fingerprint_version: int
    rest: timedelta
    expired: bool


def _standing_lease(connection: Connection, key: RecordKey) -> _Standing | None:
    record = key.configuration.tables.record
    row = connection.execute(
        select(
            record.c.lease_token,
            record.c.kid,
            record.c.fingerprint,
            record.c.fingerprint_version,
            record.c.lease_until,
            clock(),
            record.c.replay_until <= clock(),
        ).where(record.c.id == key.id, record.c.state == "leased")
    ).first()
    if row is None:
        return None
    token, kid, fingerprint, version, until, now, expired = row
    return _Standing(token, kid, fingerprint, version, until - now, expired)


def _take_over(connection: Connection, key: RecordKey, standing: _Standing, length: timedelta) -> Lease:
    require_same_request(connection, key, standing.fingerprint, standing.fingerprint_version)
    if standing.rest > timedelta(0):
        raise key_in_flight(key.name, standing.rest)
    if standing.expired:  # a service may have forgotten the keys of an earlier attempt
        raise key_expired(key)
    key.configuration.keyring.secret(standing.kid)
    lease = Lease(key, uuid4(), standing.kid, length)
    changes = {"lease_token": lease.token, "lease_until": clock_plus(length)}
    certified = certify(connection, key.configuration.tables, [f"record {key.id}"], waits=False)
    if not certified or not _write(connection, lease, standing.token, changes, only_expired=True):
        raise key_in_flight(key.name)  # its holder is about to answer, or another attempt was faster
    return lease


# --- called by the holder of the lease


def renew(connection: Connection, lease: Lease) -> None:
    """Let the lease begin again now. Raises `LeaseLost`. Does nothing while the holder's own fence locks the record."""
    if not _write(connection, lease, lease.token, {"lease_until": clock_plus(lease.length)}):
        require_lease(connection, lease)


def end(connection: Connection, lease: Lease) -> None:
    """Let the next attempt take over at once. Does nothing if the lease is lost, or the record answered or locked."""
    _write(connection, lease, lease.token, {"lease_until": clock()})


def require_lease(connection: Connection, lease: Lease, *, lock: bool = False) -> None:
    """Raise `LeaseLost` unless the record has this lease's token. lock: keep it so until the end of the transaction."""
    record = lease.key.configuration.tables.record
    current = select(record.c.id).where(*_bears(record, lease, lease.token))
    if lock:
        certify(connection, lease.key.configuration.tables, [f"record {lease.key.id}"])
    if connection.execute(current.with_for_update() if lock else current).first() is None:
        raise lease_lost(lease)


def answer(connection: Connection, lease: Lease, response: Response) -> None:
    """Store the answer and end the lease; both become visible with the caller's commit. Raises `LeaseLost`."""
    record = lease.key.configuration.tables.record
    written = connection.execute(
        update(record)
        .where(*_bears(record, lease, lease.token))
        .values(
            columns_with(lease.key.configuration, lease.key.id, response)
            | _kept(lease.key)
            | {"lease_token": None, "lease_until": None, "answered_at": clock()}
        )
    )
    if not written.rowcount:
        raise lease_lost(lease)


def lease_lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"the lease on key {lease.key.name!r} expired and another attempt took the request over: nothing of this attempt"
        " is stored. Both attempts used the same child keys at outside services. The client must send the request again"
    )


def _write(
    connection: Connection, lease: Lease, token: UUID, changes: dict[str, Any], *, only_expired: bool = False
) -> bool:
    """Update the record if it has `token`, without waiting for another lock. Returns whether it was updated.

    only_expired: only if the lease has expired. It may have been renewed since the record was read.
    """
    record = lease.key.configuration.tables.record
    free = record.alias()
    bears = _bears(free, lease, token)
    if only_expired:
        bears = (*bears, free.c.lease_until <= clock())
    unlocked = select(free.c.id).where(*bears).limit(literal_column("1")).with_for_update(skip_locked=True)
    change = update(record).where(record.c.id == own_row(unlocked), record.c.lease_token == token)

    def write() -> bool:
        return bool(connection.execute(change.values(changes)).rowcount)

    return dialect_of(connection).without_waiting(connection, write)


def _bears(record: FromClause, lease: Lease, token: UUID) -> tuple[ColumnElement[bool], ...]:
    return record.c.id == lease.key.id, record.c.lease_token == token
