"""`Outbox`: the library's face as an object. The module functions of `outbox` are the methods of its default instance."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, Unpack, overload
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.orm import Session, scoped_session

from outbox.claim_block import IdempotentBlock, check_in_flight, run, run_async
from outbox.configuration import Configuration, Settings, configuration_from_environment
from outbox.enqueue import child_key, enqueue
from outbox.entry_rows import Entry
from outbox.errors import InvalidValue, KeyMalformed, KeyMissing
from outbox.fingerprint import fingerprint
from outbox.idempotency import Claim
from outbox.inbox import INBOX_KEEP, InboxBlock, message_key
from outbox.keys import Keyring, ParentKey, parent_id
from outbox.leases import LeasedBlock
from outbox.requests.body_key import BodyKey, BodyRequest
from outbox.requests.records import RecordKey
from outbox.requests.responses import Response
from outbox.requests.short_transactions import Source
from outbox.requests.status import RequestStatus, read_request
from outbox.session import AnySession, AsyncSessionLike, in_session, unscoped
from outbox.startup_checks import AsyncEngineLike, check
from outbox.status import EntryStatus, cancel_entry, read_status
from outbox.times import SECOND, check_span

DAY = timedelta(hours=24)


class Outbox:
    """One outbox: its key ring, the deployment's name, and the schema and prefix of its tables.

    Most apps use the default one, which `outbox.configure` sets up. Tests, and apps with two databases, make their own.

    keyring: the secrets. settings: see `outbox.configuration.Settings`.
    Raises `ConfigurationError` and `InvalidValue` for settings that cannot work.
    """

    def __init__(self, keyring: Keyring, **settings: Unpack[Settings]) -> None:
        self._configuration: Configuration | None = Configuration(keyring, **settings)

    @property
    def configuration(self) -> Configuration:
        """The settings; of the default instance, those of `outbox.configure`, else of the environment."""
        if self._configuration is None:
            self._configuration = configuration_from_environment()
        return self._configuration

    @overload
    def check(self, engine: Engine) -> None: ...
    @overload
    def check(self, engine: AsyncEngineLike) -> Awaitable[None]: ...
    def check(self, engine: Any) -> Awaitable[None] | None:
        """Check the database and the settings when the app starts, not at its first request. With an AsyncEngine, await it.

        In one transaction that only reads. Raises `ConfigurationError` for a missing secret, another database than PostgreSQL and
        SQLite, a database of another env, and a secret that differs from the one that the dispatchers have recorded for
        its kid; `SchemaError` for tables that are missing or outdated; and what the database raises if it is away.
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
        """Enqueue one effect in the caller's transaction. No I/O and no `await`, for Session and AsyncSession alike.

        The entry commits or rolls back with the transaction and the savepoint in which it is enqueued, whatever else happens
        to the session. It is written by the session's next flush that has rows to write, else before its next savepoint, at
        the latest before its commit. `outbox` never commits. A session without a transaction begins one, as `session.add`
        does.

        operation: the effect's registered name; its first segment picks the adapter.
        payload: JSON, at most `payload_bytes_max` bytes (256 KiB); the bytes that go out are these.
        parent: the key of what caused it; may be left out inside an `outbox.idempotent` block. A bare str has no scope:
            two tenants' `invoice:42` meet.
        discriminator: shows two effects of one operation under one parent apart, e.g. a line's id; never a counter.
        destination: what may be slow or down by itself; by default the operation's first segment, and with an account in
            the options `<segment>:<account>`.
        options: stored verbatim for the adapter: `account`, `api_version`, and what `configure(options=...)` names.
        due: an aware datetime, or a timedelta from the database's now: not before. One that has passed is now.
        ordering_key: entries of one key, whatever their operation, are sent one at a time, in commit order; an enqueue
            under it waits, when the entry is written, for the end of the others' transactions. After one that failed or is
            uncertain they wait until it is released, unless its adapter says otherwise. Put the tenant into it.
        if_exists: "raise", or "ignore" to keep the first of two enqueues of the same parent, operation, discriminator;
            the first keeps its own key, also across a rotation. If the first is in the database, the `child_key` of the
            returned entry is the first's as soon as this one is written, and may be another before.

        Raises, with nothing written: `InvalidValue`, `NotSerializable`, `ParentRequired`, `AlreadyAnswered` (inside a
        replay), `DuplicateEntry` if the first is pending in this session, `NoTransaction` after the commit, or outside a
        transaction with `autobegin=False`. When it is written: `NoTransaction` for an autocommit connection; `DuplicateEntry` if
        the first is in the database, after the session's other entries were written.
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

    def child_key(self, parent: str | ParentKey, operation: str, discriminator: str = "") -> str:
        """The key that `enqueue` would derive for this effect now, in its native form. Pure.

        From the key ring's current secret: an entry from before a rotation, or of a claim pinned to another kid, keeps
        the key that it was enqueued with.
        """
        return child_key(self.configuration, parent, operation, discriminator)

    def idempotent(
        self,
        session: AnySession,
        key: str | BodyKey,
        *,
        scope: str,
        request: Any,
        source: str = "http",
        in_flight: Literal["conflict", "wait"] = "conflict",
        wait: timedelta = timedelta(seconds=5),
        keep: timedelta = DAY,
    ) -> IdempotentBlock:
        """Claim a request's key for this transaction: `with` it on a Session, `async with` it on an AsyncSession.

        Inside, check `claim.replayed` first and return `claim.response`; else do the work and `claim.respond(...)`.
        The record, the rows and the entries commit together with the caller's commit after the block, or not at all. An
        exception inside stores nothing and frees the key.

        key: what the client repeats; a natural key such as `invoice:42`, with source "app"; or `outbox.BodyKey(window)`, for
            callers that cannot send one. scope: the authenticated caller, never from the request's body.
        request: what must be equal in a retry: the body's `bytes`, JSON (compared in canonical form), or an
            `outbox.Fingerprint`.
        in_flight: another transaction holds the key: "conflict" raises `KeyInFlight` at once, "wait" after `wait`.
        keep: how long a retry is answered with the stored response.

        Raises `KeyMissing`, `KeyMalformed`, `KeyInFlight` (.retry_after), `RequestMismatch`, `KeyExpired`.
        """
        check_in_flight(in_flight, wait)
        return IdempotentBlock(session, self._request(key, scope, source, request, keep), in_flight, wait)

    def leased(
        self,
        engine: Source,
        key: str | BodyKey,
        *,
        scope: str,
        request: Any,
        source: str = "http",
        lease: timedelta = timedelta(minutes=1),
        renew_for: timedelta | None = None,
        in_flight: Literal["conflict", "wait"] = "conflict",
        wait: timedelta = timedelta(seconds=5),
        keep: timedelta = DAY,
    ) -> LeasedBlock:
        """Claim a request's key under a lease, for a handler that calls outside services itself or runs for long.

        `with` it on an Engine or a sessionmaker, `async with` it on their async kin. The claim is committed at once, in a
        short transaction of its own; the block has none open. Inside, check `claim.replayed` first; else do the work, calling
        out with `claim.child_key(operation)`, and answer: `claim.respond(...)`, or with rows and entries
        `claim.fence(session)`.

        lease: how long the key stays with this attempt; longer than any single call. `claim.renew()` renews it.
        renew_for: renew it in the background, for this long at most.
        in_flight, wait: as for `idempotent`; `KeyInFlight.retry_after` is the rest of the lease.
        keep: how long a retry may take an unfinished request over, and how long it is answered with the stored response. No
            longer than the services that are called here remember a key.

        An exception stores nothing and ends the lease: the next attempt takes over at once. So does one after a killed
        process or a cancelled task, when the lease has run out. All attempts have the same child keys; the request stays
        the first one's: another under this key is a `RequestMismatch`.

        Raises what `idempotent` raises, and `LeaseLost` from whatever is stored after another attempt took over.
        """
        check_in_flight(in_flight, wait)
        check_span("lease", lease, least=SECOND)
        if renew_for is not None:
            check_span("renew_for", renew_for, otherwise=", or None for no renewals in the background")
        budget = wait if in_flight == "wait" else timedelta(0)
        return LeasedBlock(engine, self._request(key, scope, source, request, keep), lease, renew_for, budget)

    @overload
    def run_idempotent(
        self,
        session: Session | scoped_session[Any],
        key: str | BodyKey,
        fn: Callable[[Claim], object],
        *,
        scope: str,
        request: Any,
        source: str = "http",
        in_flight: Literal["conflict", "wait"] = "conflict",
        wait: timedelta = timedelta(seconds=5),
        keep: timedelta = DAY,
    ) -> Response: ...
    @overload
    def run_idempotent(
        self,
        session: AsyncSessionLike,
        key: str | BodyKey,
        fn: Callable[[Claim], Awaitable[object]],
        *,
        scope: str,
        request: Any,
        source: str = "http",
        in_flight: Literal["conflict", "wait"] = "conflict",
        wait: timedelta = timedelta(seconds=5),
        keep: timedelta = DAY,
    ) -> Awaitable[Response]: ...
    def run_idempotent(
        self, session: Any, key: str | BodyKey, fn: Callable[[Claim], Any], **settings: Any
    ) -> Response | Awaitable[Response]:
        """`idempotent` in the form in which a replay cannot be forgotten: `fn(claim)` runs only if there is work to do.

        `fn` answers with `claim.respond(...)` or `claim.reject(...)`; with an AsyncSession it is a coroutine function
        and the call is awaited. Returns the response, new or replayed. Raises what `idempotent` raises, and `ClaimError` for
        a coroutine function on a Session or a plain one on an AsyncSession: nothing of it is kept.
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
        in_flight: Literal["conflict", "wait"] = "conflict",
        wait: timedelta = timedelta(seconds=5),
        keep: timedelta = INBOX_KEEP,
    ) -> InboxBlock:
        """Take a consumed message in this transaction: `with` it on a Session, `async with` it on an AsyncSession.

        Inside, check `message.duplicate` first and do nothing if it is; else do the work. What the block writes and
        enqueues commits or rolls back together with the record that the message was handled: commit after the
        block, acknowledge the message after the commit. An exception inside undoes the block and stores nothing, so the
        message is worked on again when it is redelivered.

        consumer: who handles it; each consumer handles each message once. scope: whose message ids these are, such as
            the producer's name; not the queue, as one event may come through two. `outbox.inboxes` makes both from a client
            library's message.
        in_flight: another transaction is handling the message: "conflict" raises `KeyInFlight` at once, "wait" after
            `wait`. Leave the message unacknowledged.
        keep: for how long the message is known at least: as long as the broker keeps it, in its dead-letter queue too.

        Raises `KeyInFlight` (.retry_after), `InvalidValue`, `ClaimOpen`; `AlreadyAnswered` for work on a duplicate. Raises
        `ClaimLost` if the handler ends the transaction: acknowledge none of the messages that were handled in it.
        """
        check_in_flight(in_flight, wait)
        key = message_key(self.configuration, consumer=consumer, message_id=message_id, scope=scope, keep=keep)
        return InboxBlock(session, key, in_flight, wait)

    @overload
    def status(self, session: Session | scoped_session[Any], parent: str | ParentKey) -> list[EntryStatus]: ...
    @overload
    def status(self, session: AsyncSessionLike, parent: str | ParentKey) -> Awaitable[list[EntryStatus]]: ...
    def status(self, session: Any, parent: str | ParentKey) -> list[EntryStatus] | Awaitable[list[EntryStatus]]:
        """Every entry under `parent`, the older transactions' first. With an AsyncSession it is awaited. Flushes the session."""
        configuration = self.configuration
        found: list[EntryStatus] | Awaitable[list[EntryStatus]]
        found = in_session(session, lambda inner: read_status(configuration, inner, parent))
        return found

    @overload
    def cancel(self, session: Session | scoped_session[Any], entry_id: UUID) -> bool: ...
    @overload
    def cancel(self, session: AsyncSessionLike, entry_id: UUID) -> Awaitable[bool]: ...
    def cancel(self, session: Any, entry_id: UUID) -> bool | Awaitable[bool]:
        """Cancel an entry in the caller's transaction, if it was certainly never sent. With an AsyncSession: awaited.

        Returns False, and changes nothing, for an entry that is being sent, may have been sent, has ended or is
        unknown. No callback runs: the app decides, in its own transaction. Raises `InvalidValue` if it is not a UUID.
        """
        configuration = self.configuration
        cancelled: bool | Awaitable[bool] = in_session(
            session, lambda inner: cancel_entry(configuration, inner, entry_id)
        )
        return cancelled

    @overload
    def request_status(
        self, session: Session | scoped_session[Any], id: UUID, *, scope: str, sources: Collection[str] = ("http",)
    ) -> RequestStatus | None: ...
    @overload
    def request_status(
        self, session: AsyncSessionLike, id: UUID, *, scope: str, sources: Collection[str] = ("http",)
    ) -> Awaitable[RequestStatus | None]: ...
    def request_status(
        self, session: Any, id: UUID, *, scope: str, sources: Collection[str] = ("http",)
    ) -> RequestStatus | Awaitable[RequestStatus | None] | None:
        """The request whose claim had this `id`, with all its entries, or None: also if it is another scope's or source's.

        sources: as the claims were given; by default those of HTTP alone. The ids of jobs ("app") and messages (inboxes) can be
            guessed, and any caller could then read them.

        Payloads are not in it. With an AsyncSession it is awaited. Flushes the session. Raises `InvalidValue` for an id
        that is no UUID, a scope that is no text and sources that are no names.
        """
        configuration = self.configuration
        found: RequestStatus | Awaitable[RequestStatus | None] | None
        found = in_session(session, lambda inner: read_request(configuration, inner, id, scope, sources))
        return found

    def _request(self, key: Any, scope: str, source: str, request: Any, keep: timedelta) -> RecordKey | BodyRequest:
        if isinstance(key, BodyKey):
            return BodyRequest.of(self.configuration, key, scope, source, fingerprint(request))
        return self._record_key(key, scope, source, request, keep)

    def _record_key(self, key: Any, scope: str, source: str, request: Any, keep: timedelta) -> RecordKey:
        if key is None or key == "":
            raise KeyMissing("the request has no idempotency key: send one, e.g. a UUID, and repeat it with each retry")
        check_span("keep", keep)
        configuration = self.configuration
        try:
            parent = ParentKey(key, scope=scope, source=source)
        except InvalidValue as error:
            if error.field == "parent":
                raise KeyMalformed(f"the idempotency key is malformed: {error}") from error
            raise
        return RecordKey(
            configuration=configuration,
            id=parent_id(configuration.env, parent),
            parent=parent,
            fingerprint=fingerprint(request),
            keep=keep,
        )
