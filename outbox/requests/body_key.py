"""Keys for requests without a key: the key is derived from the body, and is valid for a window.

If a caller cannot send a key, its retry is recognised by the body, within a window that the app chooses. The price: two equal
orders within the window count as one. If the request has an identity of its own, use that as the key:
`idempotent(session, "invoice:42", source="app", scope="", ...)`.
"""

import base64
import hmac
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic
from typing import NamedTuple

from sqlalchemy import Connection, select

from outbox.configuration import Configuration
from outbox.errors import KeyExpired
from outbox.keys import ParentKey, pae
from outbox.observer import ClaimObservation
from outbox.requests.records import LockWait, RecordKey, find_despite_snapshot, key_in_flight
from outbox.sql.clock import clock, database_now
from outbox.sql.connections.transactions import require_transaction
from outbox.sql.dialect import dialect_of
from outbox.sql.key_locks import try_lock, wait_for_lock
from outbox.times import EPOCH, SECOND, check_span

PUBLIC_SECRET = bytes(32)
"""Without encryption these keys contain no secret, and so a rotation changes none of them. Nor does the record's fingerprint."""


@dataclass(frozen=True, slots=True)
class BodyKey:
    """Replaces the key that a caller cannot send: `outbox.idempotent(session, outbox.BodyKey(window), ...)`.

    window: how long an equal request of the same scope counts as a retry of the first, by the database's clock. It replaces
        `retention`. Make it a little longer than the caller's retries last: if the caller really wants a second, equal order
        within the window, that order is not executed.
    """

    window: timedelta

    def __post_init__(self) -> None:
        check_span("window", self.window, least=SECOND)


def body_key(fingerprint: bytes, window: timedelta, at: datetime) -> tuple[str, str]:
    """The two possible keys of a request at the time `at`: of the span before, and of the span with `at`.

    Time is divided into spans of the window's length. An equal request of the last window is in one of these two spans. Pure.
    """
    start = (b"obx/body-key/v1-public", fingerprint)
    return _keys(PUBLIC_SECRET, start, window, at)


def _keys(secret: bytes, start: tuple[bytes, ...], window: timedelta, at: datetime) -> tuple[str, str]:
    """start: the first parts of what is hashed; the window and the span follow."""
    present, length = (at - EPOCH) // window, b"%d" % (window // timedelta(microseconds=1))

    def key(span: int) -> str:
        digest = hmac.digest(secret, pae(*start, length, b"%d" % span), "sha256")
        return "body-" + base64.urlsafe_b64encode(digest[:24]).decode()

    return key(present - 1), key(present)


class Candidates(NamedTuple):
    """The keys that an equal request of the last window may have, in the order of their locks. new: of a new record."""

    keys: tuple[RecordKey, ...]
    new: RecordKey


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyRequest:
    """A request that is identified by its body. The database decides which of its two keys applies."""

    configuration: Configuration
    scope: str
    source: str
    fingerprint: bytes
    window: timedelta

    @classmethod
    def of(
        cls, configuration: Configuration, key: BodyKey, scope: str, source: str, fingerprint: bytes
    ) -> "BodyRequest":
        # A separate source, so that no key of a client can be equal to one of these.
        request = cls(
            configuration=configuration,
            scope=scope,
            source=f"{source}.body",
            fingerprint=fingerprint,
            window=key.window,
        )
        request.keys(EPOCH)  # raises for an invalid scope or source
        return request

    @property
    def name(self) -> str:
        return self.keys(EPOCH).new.name

    def keys(self, at: datetime) -> Candidates:
        """The keys at the time `at`, first those of the span before.

        With encryption a key is a MAC under the current secret, so that the database shows no equal requests of two callers, and
        no guess can be checked. An earlier request may have a key under another secret of the ring, or the one without a secret.
        """
        configuration = self.configuration
        keyring, span_keys = configuration.keyring, {"": body_key(self.fingerprint, self.window, at)}
        if configuration.encryption is not None and not keyring.is_public:
            place = (configuration.env.encode(), self.scope.encode(), self.source.encode())
            start = (b"obx/body-key/v1", *place, self.fingerprint)
            span_keys |= {kid: _keys(keyring.secret(kid), start, self.window, at) for kid in keyring.kids}
        new = keyring.current if configuration.encrypting is not None and keyring.current in span_keys else ""
        keys = tuple(self._record_key(each[span]) for span in (0, 1) for each in span_keys.values())
        return Candidates(keys, self._record_key(span_keys[new][1]))

    def _record_key(self, key: str) -> RecordKey:
        parent = ParentKey(key, scope=self.scope, source=self.source)
        return RecordKey.of(self.configuration, parent, self.fingerprint, self.window)


def choose_key(
    connection: Connection,
    request: RecordKey | BodyRequest,
    wait: timedelta,
    observation: ClaimObservation | None = None,
    lock_wait: LockWait = wait_for_lock,
) -> RecordKey:
    """The key of `request`. For a body: the first of its candidates that has a current request; otherwise the new one.

    The clock is read after the present key is locked. The wait for the lock may be long: if the span has ended meanwhile, an
    equal request may be in the next span, and the choice begins again. The locks of all checked keys are kept until the end of
    the transaction, because a request that has begun has no record yet. Spans are locked in their order, to avoid deadlocks.
    Raises `KeyInFlight` if another request is in flight.
    """
    if isinstance(request, RecordKey):
        return request
    require_transaction(connection, request.configuration.schema)
    dialect_of(connection).require_prepared(connection)
    waiting = _Waiting(connection, wait, observation, lock_wait)
    checked: Candidates | None = None
    while True:
        found = request.keys(database_now(connection))
        if found == checked:
            return found.new
        checked = found
        for key in found.keys:
            if waiting.lock_unless_current(key):
                return key


class _Waiting:
    """Takes locks. The waits for all of them together take at most `budget`."""

    def __init__(
        self, connection: Connection, budget: timedelta, observation: ClaimObservation | None, lock_wait: LockWait
    ) -> None:
        self._connection = connection
        self._until = monotonic() + budget.total_seconds()
        self._waits = budget > timedelta(0)
        self._observation = observation
        self._lock_wait = lock_wait

    def lock_unless_current(self, key: RecordKey) -> bool:
        """Take the key's lock; returns whether the key has a current request. If it has one, the lock may not be taken."""
        locked, keeps_snapshot = try_lock(self._connection, key.configuration.tables, key.id)
        if _is_current(self._connection, key):
            return True
        if not locked:
            if not self._wait_for(key):
                raise key_in_flight(key.name)
            if _is_current(self._connection, key):
                return True
        if keeps_snapshot:
            with suppress(KeyExpired):  # of the span before: the request then belongs to the present span
                find_despite_snapshot(self._connection, key)  # an answer after the snapshot cannot be replayed
        return False

    def _wait_for(self, key: RecordKey) -> bool:
        rest = timedelta(seconds=self._until - monotonic())
        if not self._waits or rest <= timedelta(0):
            return False
        with nullcontext() if self._observation is None else self._observation.waiting():
            return self._lock_wait(self._connection, key.configuration.tables, key.id, rest)


def _is_current(connection: Connection, key: RecordKey) -> bool:
    """Whether there was a request with `key`, and its window has not passed."""
    record = key.configuration.tables.record
    found = select(record.c.id).where(record.c.id == key.id, record.c.replay_until > clock())
    return connection.execute(found).first() is not None
