"""The idempotency record in the database: find it, lock its key, insert it with its answer."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Literal, NamedTuple
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Connection,
    Double,
    Executable,
    LargeBinary,
    Uuid,
    and_,
    bindparam,
    delete,
    exists,
    false,
    literal_column,
    not_,
    null,
    or_,
    select,
    text,
    true,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ColumnElement

from outbox.configuration import Configuration
from outbox.databases import (
    SERIALIZATION_FAILURE,
    clock,
    clock_plus,
    execute,
    insert_unless_present,
    lock_number,
    require_prepared,
    require_transaction,
    sqlstate,
    stored_body,
    wait_for_lock,
)
from outbox.entries import Companion
from outbox.errors import InvalidValue, KeyExpired, KeyInFlight, NotSerializable, RequestMismatch
from outbox.fingerprint import FINGERPRINT_VERSION
from outbox.functions import function_name
from outbox.keys import ParentKey
from outbox.observing import ClaimWatch
from outbox.payload import encode_json
from outbox.schema import Tables
from outbox.table_names import quoted

HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
HEADER_VALUE = re.compile(r"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?")  # RFC 9110, section 5.5
WITHOUT_CONTENT = frozenset({204, 304})  # RFC 9110, section 6.4.1: servers break off what has a body all the same

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

    @property
    def name(self) -> str:
        return self.parent.key

    @property
    def source(self) -> str:
        return self.parent.source


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
        if data and status in WITHOUT_CONTENT:
            raise InvalidValue("status", status, "goes without a body: leave that out, or answer with 200")
        if content_type and not any(name.lower() == "content-type" for name in kept):
            kept["Content-Type"] = content_type
        return cls(status, data, kept)

    @property
    def state(self) -> Literal["succeeded", "failed"]:
        """What a record with this answer is called."""
        return "succeeded" if self.status < 400 else "failed"

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
    if not HEADER_NAME.fullmatch(name):
        raise InvalidValue("header", name, "must be a header's name: letters, digits and hyphens")
    if not HEADER_VALUE.fullmatch(value):
        raise InvalidValue(
            "header", name, "holds a character that no header can, or a blank at an end: percent-encode it"
        )


# --- claim


def claim_key(
    connection: Connection,
    key: RecordKey,
    in_flight: Literal["conflict", "wait"],
    wait: timedelta,
    watch: ClaimWatch | None = None,
) -> Response | None:
    """Take the key for this transaction, or return the answer that it has. Raises what refuses the request.

    One statement finds the record and tries the lock, and takes no lock for an answer to replay, so that two replays at once
    are both answered. Under the lock it has looked again: the lock's holder may just have committed. After a wait for the lock
    another statement does.
    """
    require_transaction(connection)
    require_prepared(connection)
    found = _look_and_lock(connection, key)
    answer = _answer(key, found)
    if answer is not None:
        return answer
    if not found.locked and in_flight == "wait":
        with nullcontext() if watch is None else watch.waiting():
            if wait_for_lock(connection, key.id, wait):
                found = _look(connection, key)._replace(keeps_snapshot=found.keeps_snapshot)
    if not found.locked:
        raise key_in_flight(key.name)
    if found.keeps_snapshot:
        return find_despite_snapshot(connection, key)
    return _answer_under_lock(connection, key, found)


def find_despite_snapshot(connection: Connection, key: RecordKey) -> Response | None:
    """The same under the lock, in a transaction that sees no later commit than its first statement did.

    A record that was committed since is met by an insert only, here one that is taken back. Without it the request would be
    worked through, to fail at its end. Savepoints, so that the caller's transaction lives on.
    """
    try:
        with connection.begin_nested():
            answer = _answer_under_lock(connection, key, _look(connection, key))
        if answer is None:
            with connection.begin_nested() as trial:
                insert_record(connection, key, Response(204))
                trial.rollback()
    except DBAPIError as error:
        if sqlstate(error.orig) != SERIALIZATION_FAILURE:
            raise
        raise KeyInFlight(
            f"a request with key {key.parent.key!r} was answered after this transaction's snapshot: roll it back and ask again",
            RETRY_AFTER,
        ) from error
    return answer


def key_in_flight(name: str, rest: timedelta = RETRY_AFTER) -> KeyInFlight:
    seconds = max(1, math.ceil(rest.total_seconds()))
    return KeyInFlight(
        f"a request with key {name!r} is being processed now: ask again in {seconds} s", timedelta(seconds=seconds)
    )


def insert_record(connection: Connection, key: RecordKey, response: Response, completion: str | None = None) -> None:
    """Store the answer; it becomes visible with the caller's commit.

    completion: who builds the final answer of a request that is only accepted: `response` stands in for it until then.
    """
    statement = _insertion(key.configuration.tables, connection.dialect.name, completion is not None)
    require_written(key, execute(connection, statement, _values(key, response, completion)).rowcount)


def record_companion(connection: Connection, key: RecordKey, response: Response) -> Companion | None:
    """The same, to go with the request's entries in one statement; None where the database has none for both."""
    if connection.dialect.name != "postgresql":
        return None
    return Companion(key.configuration, _insertion_sql(key.configuration.tables), _values(key, response, None))


def require_written(key: RecordKey, rows: int) -> None:
    """Only if something else than this library writes records, it was there: the lock keeps ours apart."""
    if not rows:
        raise key_in_flight(key.name)


def _values(key: RecordKey, response: Response, completion: str | None) -> dict[str, Any]:
    parent, configuration = key.parent, key.configuration
    return {
        "new_id": key.id,
        "new_env": configuration.env,
        "new_scope": parent.scope,
        "new_source": parent.source,
        "new_parent": parent.key,
        "new_kid": key.kid,
        "new_state": response.state if completion is None else "accepted",
        "new_fingerprint": key.fingerprint,
        "new_fingerprint_version": FINGERPRINT_VERSION,
        "new_status": response.status,
        "new_body": response.body,
        "new_headers": json.dumps(dict(response.headers)),
        "new_completion": completion,
        "keep": key.keep.total_seconds(),
        "audit": max(key.keep, configuration.audit).total_seconds(),
    }


_GIVEN = (
    *("id", "env", "scope", "source", "parent", "kid", "state", "fingerprint", "fingerprint_version"),
    *("status", "body", "headers", "completion"),
)


@cache
def _insertion_sql(tables: Tables) -> str:
    """The same for an answered request as PostgreSQL's text, which may stand inside another statement."""
    record = tables.record
    values = ", ".join(f":new_{name}" for name in _GIVEN)
    return (
        f"INSERT INTO {quoted(record.name, record.schema)}"
        f" ({', '.join(_GIVEN)}, created_at, answered_at, replay_until, keep_until)"
        f" VALUES ({values}, clock_timestamp(), clock_timestamp(),"
        " clock_timestamp() + make_interval(secs => :keep), clock_timestamp() + make_interval(secs => :audit))"
        " ON CONFLICT (id) DO NOTHING"
    )


@cache
def _insertion(tables: Tables, dialect: str, accepted: bool) -> Executable:
    record = tables.record
    statement: Executable = insert_unless_present(dialect, record).values(
        {name: bindparam(f"new_{name}", type_=record.c[name].type) for name in _GIVEN}
        | {
            "created_at": clock(),
            "answered_at": null() if accepted else clock(),
            "replay_until": clock_plus(bindparam("keep", type_=Double)),
            "keep_until": clock_plus(bindparam("audit", type_=Double)),
        }
    )
    return statement


def _answer_under_lock(connection: Connection, key: RecordKey, found: "_Found") -> Response | None:
    """The answer to replay, or None if the key is free, as it is for whoever holds the key's lock."""
    answer = _answer(key, found)
    if answer is None and found.status is not None:
        _free_expired(connection, key)
    return answer


def _answer(key: RecordKey, found: "_Found") -> Response | None:
    """The answer to replay, or None if there is none, or none any more. Raises for a mismatch or an expired key."""
    if found.buried:
        raise key_expired(key)
    if found.lease_until is not None:
        require_same_request(key, found.fingerprint, found.fingerprint_version)
        raise _under_lease(key, found.lease_until - found.now, expired=found.expired)
    if found.status is None or found.expired:
        return None
    require_same_request(key, found.fingerprint, found.fingerprint_version)
    if found.body is None:
        raise key_expired(key)
    return Response(found.status, found.body, json.loads(found.headers))


def require_same_request(key: RecordKey, fingerprint: bytes, version: int) -> None:
    """Raise `RequestMismatch` if the fingerprint that is stored tells this request from the first one."""
    if version == FINGERPRINT_VERSION and fingerprint != key.fingerprint:
        raise RequestMismatch(
            f"key {key.parent.key!r} was used before with another request: use a new key for a new request"
        )


def _under_lease(key: RecordKey, rest: timedelta, *, expired: bool) -> KeyInFlight | KeyExpired:
    if rest > timedelta(0):
        return key_in_flight(key.name, rest)
    if expired:
        return key_expired(key)
    return KeyInFlight(
        f"the request with key {key.name!r} was begun under a lease that ran out before its answer: it is for outbox.leased"
        " to take over",
        RETRY_AFTER,
    )


class _Found(NamedTuple):
    status: int | None
    body: bytes | None
    headers: str
    fingerprint: bytes
    fingerprint_version: int
    expired: bool
    buried: bool
    lease_until: datetime | None
    now: datetime
    locked: bool
    keeps_snapshot: bool


def _look(connection: Connection, key: RecordKey) -> _Found:
    """One row always: the record's answer, whether it has expired, whether a tombstone stands for it."""
    statement = _looking(key.configuration.tables)
    return _Found._make(execute(connection, statement, {"wanted": key.id}).rows[0])


def _look_and_lock(connection: Connection, key: RecordKey) -> _Found:
    """The same, and try the key's lock, unless there is an answer to replay or to refuse with; under it, look again.

    On SQLite a transaction that may write is the only one, and looks once.
    """
    if connection.dialect.name != "postgresql":
        return _look(connection, key)
    configuration = key.configuration
    statement = _claiming(configuration.schema, configuration.prefix)
    return _Found._make(execute(connection, statement, {"wanted": key.id, "lock": lock_number(key.id)}).rows[0])


@cache
def _claiming(schema: str | None, prefix: str) -> Executable:
    function = function_name("claim_key", schema, prefix)
    statement = text(f"SELECT * FROM {function}(:wanted, :lock)")
    typed: Executable = statement.bindparams(
        bindparam("wanted", type_=Uuid), bindparam("lock", type_=BigInteger)
    ).columns(body=LargeBinary, fingerprint=LargeBinary)
    return typed


@cache
def _looking(tables: Tables) -> Executable:
    record, tombstone = tables.record, tables.tombstone
    wanted = select(bindparam("wanted", type_=record.c.id.type).label("id")).subquery()
    return select(
        record.c.status,
        stored_body(record),
        record.c.headers,
        record.c.fingerprint,
        record.c.fingerprint_version,
        not_(_stands(tables)),
        tombstone.c.forget_at > clock(),
        record.c.lease_until,
        clock(),
        true(),
        false(),
    ).select_from(
        wanted.outerjoin(record, record.c.id == wanted.c.id).outerjoin(tombstone, tombstone.c.id == wanted.c.id)
    )


def _stands(tables: Tables) -> ColumnElement[bool]:
    """Whether the record still speaks for its key: an open request's key stays its own."""
    return or_(tables.record.c.state == literal_column("'accepted'"), tables.record.c.replay_until > clock())


def _free_expired(connection: Connection, key: RecordKey) -> None:
    """Free a key whose retry window has passed, unless something that it caused is still remembered.

    Entries are kept for as long as any service may remember their keys, so an entry here stands for an open window.
    """
    record, entry = key.configuration.tables.record, key.configuration.tables.entry
    elsewhere = and_(entry.c.record_id == key.id, entry.c.record_id != entry.c.parent_id)
    caused = exists().where(entry.c.parent_id == key.id) | exists().where(elsewhere)
    if connection.execute(delete(record).where(record.c.id == key.id, ~caused)).rowcount:
        return
    found = _look(connection, key)  # upkeep may have deleted it just now
    if found.status is not None or found.buried:
        raise key_expired(key)


def key_expired(key: RecordKey) -> KeyExpired:
    return KeyExpired(
        f"key {key.parent.key!r} is older than its retry window, and what it caused is still remembered: use a new key"
    )
