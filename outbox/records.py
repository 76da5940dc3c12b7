"""The idempotency record in the database: find it, lock its key, insert it with its answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, and_, delete, exists, literal, select

from outbox.configuration import Configuration
from outbox.databases import (
    clock,
    clock_plus,
    insert_unless_present,
    require_prepared,
    require_transaction,
    try_lock,
    wait_for_lock,
)
from outbox.errors import InvalidValue, KeyExpired, KeyInFlight, NotSerializable, RequestMismatch
from outbox.fingerprint import FINGERPRINT_VERSION
from outbox.keys import ParentKey
from outbox.payload import encode_json

RETRY_AFTER = timedelta(seconds=1)
"""What a 409 advises: a request in one transaction is short, and asking again costs one read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKey:
    """Whose record, of which request, kept for how long."""

    configuration: Configuration
    id: UUID
    parent: ParentKey
    fingerprint: bytes
    keep: timedelta

    @property
    def kid(self) -> str:
        return self.configuration.keyring.current


@dataclass(frozen=True, slots=True)
class Response:
    """A stored answer: the status, the body's bytes, the headers."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, status: int, body: Any, headers: Mapping[str, str] | None, *, bytes_max: int) -> "Response":
        if not isinstance(status, int) or isinstance(status, bool) or not 200 <= status <= 599:
            raise InvalidValue("status", status, "must be an int from 200 to 599")
        kept = dict(headers or {})
        for name, value in kept.items():
            _check_header(name, value)
        data, content_type = _body(body, bytes_max)
        if content_type and not any(name.lower() == "content-type" for name in kept):
            kept["Content-Type"] = content_type
        return cls(status, data, kept)

    def json(self) -> Any:
        """The body parsed as JSON."""
        return json.loads(self.body)


def _body(body: Any, bytes_max: int) -> tuple[bytes, str | None]:
    match body:
        case None:
            return b"", None
        case bytes():
            data, content_type = body, "application/octet-stream"
        case str():
            data, content_type = _utf8(body), "text/plain; charset=utf-8"
        case _:
            return encode_json("response body", body, bytes_max), "application/json"
    if len(data) > bytes_max:
        raise NotSerializable(f"the response body has {len(data)} bytes, at most {bytes_max} are kept")
    return data, content_type


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise NotSerializable("the response body holds a lone surrogate, which UTF-8 cannot carry") from None


def _check_header(name: object, value: object) -> None:
    if not isinstance(name, str) or not isinstance(value, str):
        raise InvalidValue(
            "header", name, f"name and value must be str, not {type(name).__name__}, {type(value).__name__}"
        )
    if name.lower() == "set-cookie":
        raise InvalidValue("header", name, "is never stored: a replay would hand one client's cookie to another")
    if any(char in name + value for char in "\r\n\0"):
        raise InvalidValue("header", name, "holds a line break or NUL")


# --- claim


def claim_key(
    connection: Connection, key: RecordKey, in_flight: Literal["conflict", "wait"], wait: timedelta
) -> Response | None:
    """Take the key for this transaction, or return the answer that it has. Raises what refuses the request.

    The record is looked for before the lock, so that two replays at once are both answered, and again under it, as a
    separate statement: its first holder may just have committed.
    """
    require_transaction(connection)
    require_prepared(connection)
    answer = _find(connection, key, locked=False)
    if answer is not None:
        return answer
    locked = try_lock(connection, key.id)
    if not locked and in_flight == "wait":
        locked = wait_for_lock(connection, key.id, wait)
    answer = _find(connection, key, locked=locked)
    if answer is None and not locked:
        raise key_in_flight(key)
    return answer


def key_in_flight(key: RecordKey) -> KeyInFlight:
    return KeyInFlight(
        f"a request with key {key.parent.key!r} is being processed now: ask again in {RETRY_AFTER.seconds} s",
        RETRY_AFTER,
    )


def insert_record(connection: Connection, key: RecordKey, response: Response) -> None:
    """Store the answer; it becomes visible with the caller's commit."""
    tables = key.configuration.tables
    parent = key.parent
    now = clock()
    written = connection.execute(
        insert_unless_present(connection, tables.record).values(
            id=key.id,
            env=key.configuration.env,
            scope=parent.scope,
            source=parent.source,
            parent=parent.key,
            kid=key.kid,
            state="succeeded" if response.status < 400 else "failed",
            fingerprint=key.fingerprint,
            fingerprint_version=FINGERPRINT_VERSION,
            status=response.status,
            body=response.body,
            headers=json.dumps(dict(response.headers)),
            created_at=now,
            answered_at=now,
            replay_until=clock_plus(key.keep),
            keep_until=clock_plus(max(key.keep, key.configuration.audit)),
        )
    )
    if not written.rowcount:  # only if something else than this library writes records: the lock keeps ours apart
        raise key_in_flight(key)


def _find(connection: Connection, key: RecordKey, *, locked: bool) -> Response | None:
    """The answer to replay, or None if the key is free. Raises for a mismatch or an expired key."""
    found = _select(connection, key)
    if found.buried:
        raise _expired(key)
    if found.status is None:
        return None
    if found.expired:
        if locked:
            _free_expired(connection, key)
        return None
    if found.fingerprint_version == FINGERPRINT_VERSION and found.fingerprint != key.fingerprint:
        raise RequestMismatch(
            f"key {key.parent.key!r} was used before with another request: use a new key for a new request"
        )
    return Response(found.status, found.body, json.loads(found.headers))


class _Found(NamedTuple):
    status: int | None
    body: bytes
    headers: str
    fingerprint: bytes
    fingerprint_version: int
    expired: bool
    buried: bool


def _select(connection: Connection, key: RecordKey) -> _Found:
    """One row always: the record's answer, whether it has expired, whether a tombstone stands for it."""
    record, tombstone = key.configuration.tables.record, key.configuration.tables.tombstone
    wanted = select(literal(key.id, record.c.id.type).label("id")).subquery()
    row = connection.execute(
        select(
            record.c.status,
            record.c.body,
            record.c.headers,
            record.c.fingerprint,
            record.c.fingerprint_version,
            record.c.replay_until <= clock(),
            (tombstone.c.forget_at > clock()),
        ).select_from(
            wanted.outerjoin(record, record.c.id == wanted.c.id).outerjoin(tombstone, tombstone.c.id == wanted.c.id)
        )
    ).one()
    return _Found._make(row)


def _free_expired(connection: Connection, key: RecordKey) -> None:
    """Free a key whose retry window has passed, unless something that it caused is still remembered.

    Entries are kept for as long as any service may remember their keys, so an entry here stands for an open window.
    """
    record, entry = key.configuration.tables.record, key.configuration.tables.entry
    elsewhere = and_(entry.c.record_id == key.id, entry.c.record_id != entry.c.parent_id)
    caused = exists().where(entry.c.parent_id == key.id) | exists().where(elsewhere)
    if not connection.execute(delete(record).where(record.c.id == key.id, ~caused)).rowcount:
        raise _expired(key)


def _expired(key: RecordKey) -> KeyExpired:
    return KeyExpired(
        f"key {key.parent.key!r} is older than its retry window, and what it caused is still remembered: use a new key"
    )
