"""The idempotency record in the database: find it, lock its key, insert it with its answer."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias
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

from outbox.configuration import Configuration
from outbox.errors import ClaimError, KeyExpired, KeyInFlight, RequestMismatch
from outbox.keys import ParentKey, parent_id
from outbox.observer import ClaimObservation
from outbox.requests.fingerprint import FINGERPRINT_VERSION, KEYED_VERSION, keyed_fingerprint
from outbox.requests.responses import Response, answer_of, state_with, stored_answer
from outbox.sessions.entry_rows import PiggybackedInsert
from outbox.sessions.mismatches import count_mismatch
from outbox.sql.clock import clock, clock_plus
from outbox.sql.connections.requirements import LockBudget
from outbox.sql.connections.transactions import require_transaction
from outbox.sql.dialect import Dialect, Writes, dialect_of
from outbox.sql.errors.driver import SERIALIZATION_FAILURE, sqlstate
from outbox.sql.key_locks import lock_number, try_lock, wait_for_lock
from outbox.sql.postgresql.fast_execute import execute
from outbox.sql.schema.functions import function_name
from outbox.sql.schema.identifiers import quoted
from outbox.sql.schema.parent_index import is_under
from outbox.sql.schema.tables import MAX_STATEMENTS, Tables
from outbox.sql.statements import stored_body

LockWait: TypeAlias = Callable[[Connection, Tables, UUID, timedelta], bool]
"""Waits for the lock of an id, as `wait_for_lock` does."""

BUDGET = LockBudget(1000)
"""The locks of claims in one transaction. A consumer's batch may have hundreds of claims."""

RETRY_AFTER = timedelta(seconds=1)
"""The Retry-After of a 409. A request in one transaction is short, and a retry costs one read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKey:
    """The identity of a record, the fingerprint of its request, and how long it is kept."""

    configuration: Configuration
    id: UUID
    parent: ParentKey
    fingerprint: bytes
    retention: timedelta

    @classmethod
    def of(
        cls, configuration: Configuration, parent: ParentKey, fingerprint: bytes, retention: timedelta
    ) -> "RecordKey":
        id = parent_id(configuration.env, parent)
        return cls(configuration=configuration, id=id, parent=parent, fingerprint=fingerprint, retention=retention)

    @property
    def kid(self) -> str:
        return self.configuration.keyring.current

    @property
    def stored_fingerprint(self) -> tuple[bytes, int]:
        """The fingerprint as a new record stores it, and its version. With encryption it shows no equality of two requests."""
        if self.configuration.encrypting is None:
            return self.fingerprint, FINGERPRINT_VERSION
        return self._keyed(self.kid), KEYED_VERSION

    def differs_from(self, stored: bytes, version: int) -> bool:
        """Whether the request of a record was another one. False if that cannot be known."""
        if version == FINGERPRINT_VERSION:
            return stored != self.fingerprint
        if version != KEYED_VERSION:
            return False
        own = [self._keyed(kid) for kid in self.configuration.keyring.kids]
        return stored not in own and any(stored[:4] == each[:4] for each in own)

    def _keyed(self, kid: str) -> bytes:
        return keyed_fingerprint(self.configuration.keyring.secret(kid), kid, self.id.bytes, self.fingerprint)

    @property
    def name(self) -> str:
        return self.parent.key

    @property
    def source(self) -> str:
        return self.parent.source


# --- claim


def claim_key(
    connection: Connection,
    key: RecordKey,
    wait: timedelta,
    observation: ClaimObservation | None = None,
    lock_wait: LockWait = wait_for_lock,
) -> Response | None:
    """Take the key for this transaction, or return the stored answer. Raises an error if the request is refused.

    One statement reads the record and tries the lock. It takes no lock to replay an answer, so that concurrent replays are all
    answered. After it has the lock it reads the record again, because the last holder of the lock may have committed meanwhile.
    After a wait for the lock, another statement reads it.
    """
    require_transaction(connection, key.configuration.schema)
    dialect = dialect_of(connection)
    dialect.require_prepared(connection)
    if not BUDGET.take(connection, 0 if dialect.is_file else 1):
        raise ClaimError(
            f"this transaction has claimed {BUDGET.max_locks} keys, and keeps a lock of the database server for each: commit it,"
            " and claim the rest in the next one"
        )
    found = _read_and_lock(connection, key)
    answer = _answer(connection, key, found)
    if answer is not None:
        return answer
    if not found.locked and wait > timedelta(0):
        with nullcontext() if observation is None else observation.waiting():
            if lock_wait(connection, key.configuration.tables, key.id, wait):
                found = _read(connection, key)._replace(keeps_snapshot=found.keeps_snapshot)
    if not found.locked:
        raise key_in_flight(key.name)
    if found.keeps_snapshot:
        return find_despite_snapshot(connection, key)
    return _answer_under_lock(connection, key, found)


def find_despite_snapshot(connection: Connection, key: RecordKey) -> Response | None:
    """Read the answer under the lock, in a transaction that keeps the snapshot of its first statement.

    Only an insert detects a record that was committed after the snapshot, so this inserts the record and rolls that back.
    Without it, the handler would run, and fail at its end. Savepoints keep the caller's transaction usable.
    """
    try:
        with connection.begin_nested():
            answer = _answer_under_lock(connection, key, _read(connection, key))
        if answer is None:
            with connection.begin_nested() as trial:
                insert_record(connection, key, Response(204))
                trial.rollback()
    except DBAPIError as error:
        if sqlstate(error.orig) != SERIALIZATION_FAILURE:
            raise
        raise KeyInFlight(
            f"a request with key {key.parent.key!r} was answered after this transaction's snapshot, or the database preferred"
            " another transaction: roll the transaction back and run it again",
            RETRY_AFTER,
        ) from error
    return answer


def key_in_flight(name: str, rest: timedelta = RETRY_AFTER) -> KeyInFlight:
    seconds = max(1, math.ceil(rest.total_seconds()))
    return KeyInFlight(
        f"a request with key {name!r} is being processed now: retry in {seconds} s", timedelta(seconds=seconds)
    )


def insert_record(connection: Connection, key: RecordKey, response: Response, completion: str | None = None) -> None:
    """Store the answer; it becomes visible with the caller's commit.

    completion: the function that builds the final answer of an accepted request. `response` is used until then.
    """
    statement = _insertion(key.configuration.tables, dialect_of(connection), completion is not None)
    require_written(key, execute(connection, statement, _values(key, response, completion)).rowcount)


def record_insert(connection: Connection, key: RecordKey, response: Response) -> PiggybackedInsert | None:
    """`insert_record` as part of the statement that inserts the entries; None if the database has no such statement."""
    if dialect_of(connection).writes is not Writes.ARRAYS:
        return None
    return PiggybackedInsert(key.configuration, _insertion_sql(key.configuration.tables), _values(key, response, None))


def require_written(key: RecordKey, rows: int) -> None:
    """Raise if the record existed already. The lock prevents this, unless other software writes records."""
    if not rows:
        raise key_in_flight(key.name)


def _values(key: RecordKey, response: Response, completion: str | None) -> dict[str, Any]:
    parent, configuration = key.parent, key.configuration
    body, headers = stored_answer(configuration, key.id, response)
    fingerprint, version = key.stored_fingerprint
    return {
        "new_id": key.id,
        "new_env": configuration.env,
        "new_scope": parent.scope,
        "new_source": parent.source,
        "new_parent": parent.key,
        "new_kid": key.kid,
        "new_state": state_with(response) if completion is None else "accepted",
        "new_fingerprint": fingerprint,
        "new_fingerprint_version": version,
        "new_status": response.status,
        "new_body": body,
        "new_headers": headers,
        "new_completion": completion,
        "retention": key.retention.total_seconds(),
        "record_retention": max(key.retention, configuration.record_retention).total_seconds(),
    }


_GIVEN = (
    *("id", "env", "scope", "source", "parent", "kid", "state", "fingerprint", "fingerprint_version"),
    *("status", "body", "headers", "completion"),
)


@lru_cache(MAX_STATEMENTS)
def _insertion_sql(tables: Tables) -> str:
    """The insert of an answered request as PostgreSQL text, as a part of another statement."""
    record = tables.record
    values = ", ".join(f":new_{name}" for name in _GIVEN)
    return (
        f"INSERT INTO {quoted(record.name, record.schema)}"
        f" ({', '.join(_GIVEN)}, created_at, answered_at, replay_until, keep_until)"
        f" VALUES ({values}, clock_timestamp(), clock_timestamp(),"
        " clock_timestamp() + make_interval(secs => :retention), clock_timestamp() + make_interval(secs => :record_retention))"
        " ON CONFLICT (id) DO NOTHING"
    )


@lru_cache(MAX_STATEMENTS)
def _insertion(tables: Tables, dialect: Dialect, accepted: bool) -> Executable:
    record = tables.record
    statement: Executable = dialect.insert_unless_present(record).values(
        {name: bindparam(f"new_{name}", type_=record.c[name].type) for name in _GIVEN}
        | {
            "created_at": clock(),
            "answered_at": null() if accepted else clock(),
            "replay_until": clock_plus(bindparam("retention", type_=Double)),
            "keep_until": clock_plus(bindparam("record_retention", type_=Double)),
        }
    )
    return statement


def _answer_under_lock(connection: Connection, key: RecordKey, found: "_Found") -> Response | None:
    """The answer to replay; None if the key is free. The caller has the key's lock."""
    answer = _answer(connection, key, found)
    if answer is None and found.status is not None:
        _free_expired(connection, key)
    return answer


def _answer(connection: Connection, key: RecordKey, found: "_Found") -> Response | None:
    """The answer to replay; None if there is none, or it has expired. Raises for a mismatch or an expired key."""
    if found.tombstoned:
        raise key_expired(key)
    if found.lease_until is not None:
        require_same_request(connection, key, found.fingerprint, found.fingerprint_version)
        raise _under_lease(key, found.lease_until - found.now, expired=found.expired)
    if found.status is None or found.expired:
        return None
    require_same_request(connection, key, found.fingerprint, found.fingerprint_version)
    if found.body is None:
        raise key_expired(key)
    return answer_of(key.configuration, key.id, found.status, found.body, found.headers)


def require_same_request(connection: Connection, key: RecordKey, fingerprint: bytes, version: int) -> None:
    """Count this request, and raise `RequestMismatch`, if the stored fingerprint differs from its own."""
    if key.differs_from(bytes(fingerprint), version):
        count_mismatch(connection, key.configuration, key.id)
        raise RequestMismatch(
            f"key {key.parent.key!r} was used before with another request: use a new key for a new request"
        )


def _under_lease(key: RecordKey, rest: timedelta, *, expired: bool) -> KeyInFlight | KeyExpired:
    if rest > timedelta(0):
        return key_in_flight(key.name, rest)
    if expired:
        return key_expired(key)
    return KeyInFlight(
        f"the request with key {key.name!r} has no answer, and the lease under which it began has expired: only outbox.leased"
        " can take it over",
        RETRY_AFTER,
    )


class _Found(NamedTuple):
    status: int | None
    body: bytes | None
    headers: str
    fingerprint: bytes
    fingerprint_version: int
    expired: bool
    tombstoned: bool
    lease_until: datetime | None
    now: datetime
    locked: bool
    keeps_snapshot: bool


def _read(connection: Connection, key: RecordKey) -> _Found:
    """Always one row: the record's answer, whether it has expired, and whether a tombstone replaces it."""
    statement = _reading(key.configuration.tables)
    return _Found._make(execute(connection, statement, {"wanted": key.id}).rows[0])


def _read_and_lock(connection: Connection, key: RecordKey) -> _Found:
    """Read the record. If it does not decide the request, try the key's lock, and read the record again under the lock.

    One statement on PostgreSQL.
    """
    if not dialect_of(connection).has_functions:
        return _read_then_lock(connection, key)
    configuration = key.configuration
    statement = _claiming(configuration.schema, configuration.prefix)
    return _Found._make(execute(connection, statement, {"wanted": key.id, "lock": lock_number(key.id)}).rows[0])


def _read_then_lock(connection: Connection, key: RecordKey) -> _Found:
    """Read the record, lock its key, and read again. SQLite has only one writing transaction, so there one read is enough."""
    found = _read(connection, key)
    is_decided = found.tombstoned or (found.status is not None and not found.expired)
    if dialect_of(connection).is_file or is_decided:
        return found
    lock = try_lock(connection, key.configuration.tables, key.id)
    if not lock.taken:
        return found._replace(locked=False, keeps_snapshot=lock.keeps_snapshot)
    return _read(connection, key)._replace(keeps_snapshot=lock.keeps_snapshot)


@lru_cache(MAX_STATEMENTS)
def _claiming(schema: str | None, prefix: str) -> Executable:
    function = function_name("claim_key", schema, prefix)
    statement = text(f"SELECT * FROM {function}(:wanted, :lock)")
    typed: Executable = statement.bindparams(
        bindparam("wanted", type_=Uuid), bindparam("lock", type_=BigInteger)
    ).columns(body=LargeBinary, fingerprint=LargeBinary)
    return typed


@lru_cache(MAX_STATEMENTS)
def _reading(tables: Tables) -> Executable:
    record, tombstone = tables.record, tables.tombstone
    wanted = select(bindparam("wanted", type_=record.c.id.type).label("id")).subquery()
    return select(
        record.c.status,
        stored_body(record),
        record.c.headers,
        record.c.fingerprint,
        record.c.fingerprint_version,
        # whether it has expired: an open request keeps its key
        not_(or_(record.c.state == literal_column("'accepted'"), record.c.replay_until > clock())),
        tombstone.c.forget_at > clock(),
        record.c.lease_until,
        clock(),
        true(),
        false(),
    ).select_from(
        wanted.outerjoin(record, record.c.id == wanted.c.id).outerjoin(tombstone, tombstone.c.id == wanted.c.id)
    )


def _free_expired(connection: Connection, key: RecordKey) -> None:
    """Free a key whose retry window has passed, unless a service may still remember keys of its entries.

    Entries are kept for as long as any service may remember their keys. So if there is an entry, a window is open.
    """
    record, entry = key.configuration.tables.record, key.configuration.tables.entry
    elsewhere = and_(entry.c.record_id == key.id, entry.c.record_id != entry.c.parent_id)
    caused = exists().where(is_under(entry, key.id)) | exists().where(elsewhere)
    if connection.execute(delete(record).where(record.c.id == key.id, ~caused)).rowcount:
        return
    found = _read(connection, key)  # maintenance may have deleted the record meanwhile
    if found.status is not None or found.tombstoned:
        raise key_expired(key)


def key_expired(key: RecordKey) -> KeyExpired:
    return KeyExpired(
        f"key {key.parent.key!r} is older than its retry window, and its effects are still remembered: use a new key"
    )
