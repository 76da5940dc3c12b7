"""`Outbox`: the API of the library as an object. The module functions of `outbox` are the methods of its default instance."""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.orm import Session, scoped_session

from outbox.configuration import Configuration, Settings
from outbox.entries.enqueue import PerPayload, child_key, enqueue, enqueue_many
from outbox.entries.status import EntryStatus, cancel_entry, read_status
from outbox.errors import InvalidValue, KeyMalformed, KeyMissing
from outbox.keys import Keyring, ParentKey
from outbox.requests.body_key import BodyKey, BodyRequest
from outbox.requests.claim_block import IdempotentBlock, checked_wait, run, run_async
from outbox.requests.fingerprint import fingerprint
from outbox.requests.idempotency import Claim
from outbox.requests.inbox import INBOX_RETENTION, InboxBlock, message_key
from outbox.requests.leases import LeasedBlock
from outbox.requests.records import RecordKey
from outbox.requests.responses import Response
from outbox.requests.short_transactions import Source
from outbox.requests.status import RequestStatus, read_request
from outbox.sessions.entry_rows import Entry
from outbox.sessions.session import AnySession, AsyncSessionLike, in_session, unscoped
from outbox.startup_checks import AsyncEngineLike, check
from outbox.times import SECOND, check_span

DAY = timedelta(hours=24)
Payload = TypeVar("Payload")


class Outbox:
    """One outbox: its key ring, the deployment's name, and the schema and prefix of its tables.

    Most apps use the default outbox, which `outbox.configure` sets up. Tests, and apps with two databases, create their own.

    keyring: the secrets.
    settings: see `outbox.configuration.Settings`.
    Raises `ConfigurationError` and `InvalidValue` for settings that cannot work.
    """

    def __init__(self, keyring: Keyring, **settings: Unpack[Settings]) -> None:
        self._configuration = Configuration(keyring, **settings)

    @property
    def configuration(self) -> Configuration:
        """The settings. For the default instance: those of `outbox.configure`, or those of the environment."""
        return self._configuration

    @overload
    def check(self, engine: Engine) -> None: ...
    @overload
    def check(self, engine: AsyncEngineLike) -> Awaitable[None]: ...
    def check(self, engine: Any) -> Any:
        """Check the database and the settings when the app starts. With an AsyncEngine, await it.

        The check runs in one transaction that only reads.
        Raises `ConfigurationError` if the secret is missing, if the database is not supported, if it belongs
        to another env, or if a secret differs from the one that the dispatchers recorded for its kid. Raises `SchemaError` if
        tables are missing or outdated. Errors of the database itself, such as a refused connection, are raised unchanged.
        """
        return check(self.configuration, engine)

    def enqueue(
        self,
        session: AnySession,
        operation: str,
        payload: Any,
        *,
        parent: str | ParentKey | None = None,
        discriminator: str = "",
        destination: str | None = None,
        options: Mapping[str, Any] | None = None,
        due: datetime | timedelta | None = None,
        ordering_key: str | None = None,
        if_exists: Literal["raise", "ignore"] = "raise",
    ) -> Entry:
        """Enqueue one effect in the caller's transaction. No I/O and no `await`, with a Session and with an AsyncSession.

        The entry commits or rolls back together with the transaction, and with the savepoint in which it is enqueued. The
        session writes the entry at its next flush that has rows to write, before its next savepoint, or at the latest before
        its commit. `enqueue` never commits. If the session has no transaction, it begins one, as `session.add` does.

        operation: the effect's registered name. Its first segment selects the adapter.
        payload: JSON, at most `max_payload_bytes` bytes (256 KiB). The dispatcher sends exactly these bytes.
        parent: the key of what caused the effect. You may omit it inside an `outbox.idempotent` block. A plain str has no
            scope, so the `invoice:42` of two tenants would be the same parent.
        discriminator: distinguishes two effects of one operation under one parent, for example by a line's id. Never a
            counter.
        destination: the part of the service that can be slow or down by itself. By default the first segment of the
            operation, or `<segment>:<account>` if the options name an account.
        options: stored for the adapter as they are: `account`, `api_version`, and names of `configure(options=...)`.
        due: an aware datetime, or a timedelta from the database's clock. The entry is not sent before it. A past time means now.
        ordering_key: entries with one ordering key are sent one at a time, in commit order, for all operations. When
            the entry is written, the session waits until other transactions that enqueued with this key have ended. A failed or
            uncertain entry blocks the later ones until an operator releases them, unless its adapter declares otherwise.
            Include the tenant in it.
        if_exists: "raise", or "ignore" to keep the first of two enqueues of the same parent, operation and discriminator. The
            first entry keeps its key, also after a rotation. The `child_key` of the returned entry is then the key of the
            first entry as soon as the session has written this one; before that it may differ.

        Raises before anything is written: `InvalidValue`, `NotSerializable`, `ParentRequired`, `AlreadyAnswered` (inside a
        replay), `DuplicateEntry` if the first entry is pending in this session, and `NoTransaction` after the commit, or
        outside a transaction with `autobegin=False`. Raises when the entry is written: `NoTransaction` for an autocommit
        connection, and `DuplicateEntry` if the first entry is in the database; the session's other entries are then written.
        """
        return enqueue(
            self.configuration,
            session,
            operation,
            payload,
            parent=parent,
            discriminator=discriminator,
            destination=destination,
            options=options,
            due=due,
            ordering_key=ordering_key,
            if_exists=if_exists,
        )

    def enqueue_many(
        self,
        session: AnySession,
        operation: str,
        payloads: Iterable[Payload],
        *,
        parent: PerPayload[str | ParentKey | None, Payload] = None,
        discriminator: PerPayload[str, Payload] = "",
        destination: PerPayload[str | None, Payload] = None,
        options: PerPayload[Mapping[str, Any] | None, Payload] = None,
        due: PerPayload[datetime | timedelta | None, Payload] = None,
        ordering_key: PerPayload[str | None, Payload] = None,
        if_exists: Literal["raise", "ignore"] = "raise",
    ) -> list[Entry]:
        """Enqueue one effect for each payload, all or none, in the caller's transaction. Never awaited, as `enqueue`.

            outbox.enqueue_many(session, "mail.send", mails, parent="order:A-1", discriminator=lambda mail: mail["to"])

        Every keyword of `enqueue` but `if_exists` is one value for all payloads, or a function of the payload. Let at least
        one of `parent` and `discriminator` be a function, because each entry needs its own key.

        Returns the entries in the order of the payloads. Raises what `enqueue` raises; the text names the payload by its index,
        and nothing is kept. With if_exists="ignore" the entries of two equal keys are the first one's.
        """
        return enqueue_many(
            self.configuration,
            session,
            operation,
            payloads,
            parent=parent,
            discriminator=discriminator,
            destination=destination,
            options=options,
            due=due,
            ordering_key=ordering_key,
            if_exists=if_exists,
        )

    def child_key(self, parent: str | ParentKey, operation: str, discriminator: str = "") -> str:
        """Return the key that `enqueue` would derive for this effect now, in its native form. Pure.

        It uses the current secret of the key ring. An entry that was enqueued before a rotation, or under a claim with
        another kid, keeps the key that it was enqueued with.
        """
        return child_key(self.configuration, parent, operation, discriminator)

    def idempotent(
        self,
        session: AnySession,
        key: str | BodyKey,
        *,
        scope: str,
        content: Any,
        source: str = "http",
        wait: timedelta | None = None,
        retention: timedelta = DAY,
    ) -> IdempotentBlock:
        """Claim a request's key for this transaction: `with` on a Session, `async with` on an AsyncSession.

        In the block, check `claim.replayed` first and return `claim.response` if it is true. Otherwise do the work and call
        `claim.respond(...)`. The record, the rows and the entries commit together, by the caller's commit after the block, or
        not at all. After an exception in the block nothing is stored, and the key is free.

        key: the key that the client repeats; or a natural key such as `invoice:42`, with source "app"; or
            `outbox.BodyKey(window)` for callers that cannot send a key.
        scope: the authenticated caller. Never take it from the request's body.
        content: what must be equal in a retry: the body's `bytes`, JSON (compared in its canonical form), or an
            `outbox.Fingerprint`.
        wait: how long to wait while another transaction has claimed the key, before `KeyInFlight` is raised. None raises it
            immediately.
        retention: how long a retry is answered with the stored response.

        Raises `KeyMissing`, `KeyMalformed`, `KeyInFlight` (with `retry_after`), `RequestMismatch`, `KeyExpired`.
        """
        budget = checked_wait(wait)
        return IdempotentBlock(session, self._request(key, scope, source, content, retention), budget)

    def leased(
        self,
        engine: Source,
        key: str | BodyKey,
        *,
        scope: str,
        content: Any,
        source: str = "http",
        lease: timedelta = timedelta(minutes=1),
        renew_for: timedelta | None = None,
        wait: timedelta | None = None,
        retention: timedelta = DAY,
    ) -> LeasedBlock:
        """Claim a request's key under a lease, for a handler that calls outside services itself or runs for long.

        Use `with` on an Engine or a sessionmaker, `async with` on an AsyncEngine or an async_sessionmaker. The claim is
        committed at once, in a short transaction of its own. In the block no transaction is open. Check `claim.replayed`
        first. Otherwise do the work, call services with `claim.child_key(operation)`, and answer: with `claim.respond(...)`,
        or, if you write rows or enqueue entries, in `claim.fence(session)`.

        lease: how long this attempt owns the key. Make it longer than any single call. `claim.renew()` renews it.
        renew_for: renew the lease in the background, for at most this time.
        wait: as for `idempotent`. `KeyInFlight.retry_after` is the rest of the lease.
        retention: how long a retry may take an unfinished request over, and how long it is answered with the stored response.
            Make it no longer than the services that are called here remember a key.

        After an exception nothing is stored and the lease ends, so the next attempt takes the request over at once. After a
        killed process or a cancelled task, the next attempt takes over when the lease has expired. All attempts have the same
        child keys. A different request under this key is refused with `RequestMismatch`.

        Raises what `idempotent` raises, and `LeaseLost` if an attempt stores something after another attempt took over.
        """
        budget = checked_wait(wait)
        check_span("lease", lease, least=SECOND)
        if renew_for is not None:
            check_span("renew_for", renew_for, otherwise=", or None for no renewals in the background")
        return LeasedBlock(engine, self._request(key, scope, source, content, retention), lease, renew_for, budget)

    @overload
    def run_idempotent(
        self,
        session: Session | scoped_session[Any],
        key: str | BodyKey,
        fn: Callable[[Claim], object],
        *,
        scope: str,
        content: Any,
        source: str = "http",
        wait: timedelta | None = None,
        retention: timedelta = DAY,
    ) -> Response: ...
    @overload
    def run_idempotent(
        self,
        session: AsyncSessionLike,
        key: str | BodyKey,
        fn: Callable[[Claim], Awaitable[object]],
        *,
        scope: str,
        content: Any,
        source: str = "http",
        wait: timedelta | None = None,
        retention: timedelta = DAY,
    ) -> Awaitable[Response]: ...
    def run_idempotent(self, session: Any, key: str | BodyKey, fn: Callable[[Claim], Any], **settings: Any) -> Any:
        """Call `fn(claim)` for a new request, and return the stored response for a replay, without calling `fn`.

        `fn` answers with `claim.respond(...)` or `claim.reject(...)`. With an AsyncSession `fn` is a coroutine function, and
        you await the call. Returns the response, new or replayed.
        Raises what `idempotent` raises. Raises `ClaimError`, and stores nothing, for a coroutine function with a Session or a
        plain function with an AsyncSession.
        """
        block = self.idempotent(session, key, **settings)
        return run_async(block, fn) if hasattr(unscoped(session), "run_sync") else run(block, fn)

    def inbox(
        self,
        session: AnySession,
        *,
        consumer: str,
        message_id: str,
        scope: str,
        wait: timedelta | None = None,
        retention: timedelta = INBOX_RETENTION,
    ) -> InboxBlock:
        """Claim a consumed message in this transaction: `with` on a Session, `async with` on an AsyncSession.

        In the block, check `message.duplicate` first and do nothing if it is true. Otherwise do the work. What the block
        writes and enqueues commits or rolls back together with the record that the message was handled. Commit after the
        block, and acknowledge the message after the commit. After an exception in the block nothing is stored, so the message
        is handled again when the broker delivers it again.

        consumer: the name of the program that handles the message. Each consumer handles each message once.
        scope: who gave the message its id, for example the producer's name. Not the queue, because one event may come through
            two. `outbox.inboxes` reads scope and id from a client library's message.
        wait: how long to wait while another transaction handles the message, before `KeyInFlight` is raised. None raises it
            immediately. Leave the message unacknowledged then.
        retention: how long the message is known, at least. Make it as long as the broker may keep the message, also in its
            dead-letter queue.

        Raises `KeyInFlight` (with `retry_after`), `InvalidValue`, `ClaimOpen`, and `AlreadyAnswered` for work on a duplicate.
        Raises `ClaimLost` if the handler ends the transaction: then acknowledge none of the messages that were handled in it.
        """
        budget = checked_wait(wait)
        key = message_key(
            self.configuration, consumer=consumer, message_id=message_id, scope=scope, retention=retention
        )
        return InboxBlock(session, key, budget)

    @overload
    def status(self, session: Session | scoped_session[Any], parent: str | ParentKey) -> list[EntryStatus]: ...
    @overload
    def status(self, session: AsyncSessionLike, parent: str | ParentKey) -> Awaitable[list[EntryStatus]]: ...
    def status(self, session: Any, parent: str | ParentKey) -> Any:
        """Return every entry under `parent`, oldest transaction first. Flushes the session. With an AsyncSession, await it."""
        configuration = self.configuration
        return in_session(session, lambda inner: read_status(configuration, inner, parent))

    @overload
    def cancel(self, session: Session | scoped_session[Any], entry_id: UUID) -> bool: ...
    @overload
    def cancel(self, session: AsyncSessionLike, entry_id: UUID) -> Awaitable[bool]: ...
    def cancel(self, session: Any, entry_id: UUID) -> Any:
        """Cancel an entry in the caller's transaction, if it was certainly never sent. With an AsyncSession, await it.

        Returns False, and changes nothing, if the entry is being sent, may have been sent, has ended or is unknown. No
        callback runs, because the app itself decides in its own transaction. Raises `InvalidValue` if `id` is not a UUID.
        """
        configuration = self.configuration
        return in_session(session, lambda inner: cancel_entry(configuration, inner, entry_id))

    @overload
    def request_status(
        self, session: Session | scoped_session[Any], id: UUID, *, scope: str, sources: Collection[str] = ("http",)
    ) -> RequestStatus | None: ...
    @overload
    def request_status(
        self, session: AsyncSessionLike, id: UUID, *, scope: str, sources: Collection[str] = ("http",)
    ) -> Awaitable[RequestStatus | None]: ...
    def request_status(self, session: Any, id: UUID, *, scope: str, sources: Collection[str] = ("http",)) -> Any:
        """Return the request whose claim had this `id`, with all its entries. Payloads are not included. Flushes the session.

        Returns None if the request is unknown, or belongs to another scope or source. With an AsyncSession, await it.

        sources: the sources of the claims that may be shown; by default "http" alone. The ids of jobs ("app") and messages
            (inboxes) can be guessed, so any caller could read them.

        Raises `InvalidValue` if the id is not a UUID, or if the scope or the sources are malformed.
        """
        configuration = self.configuration
        return in_session(session, lambda inner: read_request(configuration, inner, id, scope, sources))

    def _request(
        self, key: Any, scope: str, source: str, content: Any, retention: timedelta
    ) -> RecordKey | BodyRequest:
        if isinstance(key, BodyKey):
            return BodyRequest.of(self.configuration, key, scope, source, fingerprint(content))
        return self._record_key(key, scope, source, content, retention)

    def _record_key(self, key: Any, scope: str, source: str, content: Any, retention: timedelta) -> RecordKey:
        if key is None or key == "":
            raise KeyMissing("the request has no idempotency key: send one, e.g. a UUID, and repeat it with each retry")
        check_span("retention", retention)
        try:
            parent = ParentKey(key, scope=scope, source=source)
        except InvalidValue as error:
            if error.field == "parent":
                raise KeyMalformed(f"the idempotency key is malformed: {error}") from error
            raise
        return RecordKey.of(self.configuration, parent, fingerprint(content), retention)
