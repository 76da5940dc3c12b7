"""Keys for requests that bring none: the body's own, for a while.

A retry of a caller that cannot send a key is recognised by its body, within a window that the app chooses. The price: two
identical orders within the window count as one. Where the request has an identity of its own, that is the better key:
`idempotent(session, "invoice:42", source="app", scope="", ...)`.
"""

import base64
import hmac
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic

from sqlalchemy import Connection, select

from outbox.configuration import Configuration
from outbox.keys import ParentKey, pae
from outbox.observer import ClaimObservation
from outbox.requests.records import LockWait, RecordKey, find_despite_snapshot, key_in_flight
from outbox.sql.dialect import clock, database_now, require_prepared, require_transaction, try_lock, wait_for_lock
from outbox.times import EPOCH, SECOND, check_span

PUBLIC_SECRET = bytes(32)
"""No secret is in these keys: a rotation must not change them within a window. The record's fingerprint has none either."""


@dataclass(frozen=True, slots=True)
class BodyKey:
    """Replaces the key that a caller cannot send: `outbox.idempotent(session, outbox.BodyKey(window), ...)`.

    window: how long an equal request of the same scope counts as a retry of the first, by the database's clock. It replaces
        `keep`. Make it a little longer than the caller's retries last: if the caller really wants a second, equal order
        within the window, that order is not executed.
    """

    window: timedelta

    def __post_init__(self) -> None:
        check_span("window", self.window, least=SECOND)


def body_key(fingerprint: bytes, window: timedelta, at: datetime) -> tuple[str, str]:
    """The keys under which a request that comes `at` may stand: of the span of time before, and of the one that `at` is in.

    Time is cut into spans of the window's length. What came up to one window ago is in one of these two. Pure.
    """
    span = (at - EPOCH) // window
    return _key(fingerprint, window, span - 1), _key(fingerprint, window, span)


def _key(fingerprint: bytes, window: timedelta, span: int) -> str:
    message = pae(b"obx/body-key/v1-public", fingerprint, b"%d" % (window // timedelta(microseconds=1)), b"%d" % span)
    return "body-" + base64.urlsafe_b64encode(hmac.digest(PUBLIC_SECRET, message, "sha256")[:24]).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyRequest:
    """A request known by its body. Only the database knows which of its two keys applies."""

    configuration: Configuration
    scope: str
    source: str
    fingerprint: bytes
    window: timedelta

    @classmethod
    def of(
        cls, configuration: Configuration, key: BodyKey, scope: str, source: str, fingerprint: bytes
    ) -> "BodyRequest":
        # A source of its own: no client can send a key that meets one of these.
        request = cls(
            configuration=configuration,
            scope=scope,
            source=f"{source}.body",
            fingerprint=fingerprint,
            window=key.window,
        )
        request.keys(EPOCH)  # raises for a scope or source outside its limits
        return request

    @property
    def name(self) -> str:
        return self.keys(EPOCH)[1].name

    def keys(self, at: datetime) -> tuple[RecordKey, RecordKey]:
        before, current = body_key(self.fingerprint, self.window, at)
        return self._record_key(before), self._record_key(current)

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
    """The key of `request`: for a body, that of the span before while a request is in it, else the current one.

    The clock that decides is read under the current key's lock: before it there may be any wait, at whose end the span has passed
    and an equal request is in the next one. It then chooses again. The locks of all keys that it checked are kept to the
    transaction's end, for a request that has begun has no record yet. Spans are locked in their order, so that no deadlock
    occurs. Raises `KeyInFlight` if another request is in flight.
    """
    if isinstance(request, RecordKey):
        return request
    require_transaction(connection, request.configuration.schema)
    require_prepared(connection)
    waiting = _Waiting(connection, wait, observation, lock_wait)
    current: RecordKey | None = None
    while True:
        before, now = request.keys(database_now(connection))
        if now == current:
            return now
        current = now
        for key in (before, current):
            if waiting.lock_unless_current(key):
                return key


class _Waiting:
    """Takes locks, and waits for all of them together no longer than `budget`."""

    def __init__(
        self, connection: Connection, budget: timedelta, observation: ClaimObservation | None, lock_wait: LockWait
    ) -> None:
        self._connection = connection
        self._until = monotonic() + budget.total_seconds()
        self._waits = budget > timedelta(0)
        self._observation = observation
        self._lock_wait = lock_wait

    def lock_unless_current(self, key: RecordKey) -> bool:
        """Take the key's lock; returns whether the key has a current request. If it has, the lock may be another
        transaction's."""
        locked, keeps_snapshot = try_lock(self._connection, key.id)
        if _is_current(self._connection, key):
            return True
        if not locked:
            if not self._wait_for(key):
                raise key_in_flight(key.name)
            if _is_current(self._connection, key):
                return True
        if keeps_snapshot:
            find_despite_snapshot(self._connection, key)  # what was answered since cannot be replayed here
        return False

    def _wait_for(self, key: RecordKey) -> bool:
        rest = timedelta(seconds=self._until - monotonic())
        if not self._waits or rest <= timedelta(0):
            return False
        with nullcontext() if self._observation is None else self._observation.waiting():
            return self._lock_wait(self._connection, key.id, rest)


def _is_current(connection: Connection, key: RecordKey) -> bool:
    """Whether a request was made under `key` and its window has not passed."""
    record = key.configuration.tables.record
    found = select(record.c.id).where(record.c.id == key.id, record.c.replay_until > clock())
    return connection.execute(found).first() is not None
