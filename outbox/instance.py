"""`Outbox`: the library's face as an object. The module functions of `outbox` are the methods of its default instance."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, overload
from uuid import UUID

from sqlalchemy.orm import Session, scoped_session

from outbox.configuration import AUDIT_WINDOW, PAYLOAD_BYTES_MAX, Configuration, configuration_from_environment
from outbox.enqueue import Entry, child_key, enqueue
from outbox.errors import ConfigurationError, InvalidValue, KeyMalformed, KeyMissing
from outbox.fingerprint import fingerprint
from outbox.idempotency import Claim, IdempotentBlock
from outbox.keys import Keyring, ParentKey, parent_id
from outbox.records import RecordKey, Response
from outbox.session import AnySession, AsyncSessionLike, in_session, unscoped
from outbox.status import EntryStatus, cancel_entry, read_status

DAY = timedelta(hours=24)


class Outbox:
    """One outbox: its key ring, the deployment's name, and the schema and prefix of its tables.

    Most apps need none of their own: `outbox.configure` sets up the default one. An object serves tests, and apps with
    two databases. Raises `ConfigurationError` and `InvalidValue` for settings that cannot work.
    """

    def __init__(
        self,
        keyring: Keyring,
        *,
        env: str,
        schema: str | None = None,
        prefix: str = "outbox_",
        options: Collection[str] = (),
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
        audit: timedelta = AUDIT_WINDOW,
    ) -> None:
        self._configuration: Configuration | None = Configuration(
            keyring,
            env=env,
            schema=schema,
            prefix=prefix,
            options=options,
            payload_bytes_max=payload_bytes_max,
            audit=audit,
        )

    @property
    def configuration(self) -> Configuration:
        """The settings; of the default instance, those of `outbox.configure`, else of the environment."""
        if self._configuration is None:
            self._configuration = configuration_from_environment()
        return self._configuration

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
        """Ask for one effect in the caller's transaction. No I/O and no `await`, for Session and AsyncSession alike.

        The entry is written with the session's next flush and lives and dies with the transaction and its savepoint.
        `outbox` never commits.

        operation: the effect's registered name; its first segment picks the adapter.
        payload: JSON, at most `payload_bytes_max` bytes (256 KiB); the bytes that go out are these.
        parent: the key of what caused it; may be left out inside an `outbox.idempotent` block. A bare str has no scope:
            two tenants' `invoice:42` meet.
        discriminator: tells two effects of one operation under one parent apart, e.g. a line's id; never a counter.
        destination: what may be slow or down by itself; by default the operation's first segment.
        options: stored verbatim for the adapter: `account`, `api_version`, and what `configure(options=...)` names.
        due: an aware datetime, or a timedelta from the database's now: not before.
        ordering_key: stored with the entry; lanes are not enforced yet.
        if_exists: "raise", or "ignore" to keep the first of two enqueues of the same parent, operation, discriminator;
            the first keeps its own key, also across a rotation.

        Raises, with nothing written: `InvalidValue`, `NotSerializable`, `ParentRequired`, `AlreadyAnswered` (inside a
        replay), `DuplicateEntry` if the first is pending in this session. At the flush: `NoTransaction` for an autocommit
        connection; `DuplicateEntry` if the first is in the database, after the flush's other entries were written.
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
        key: str,
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
        The record, the rows and the entries commit with the caller's commit after the block, or vanish together. An
        exception inside stores nothing and frees the key.

        key: what the client repeats. scope: the authenticated caller, never from the request's body.
        request: what must be equal in a retry: the body's `bytes`, or JSON (compared in canonical form).
        in_flight: another transaction holds the key: "conflict" raises `KeyInFlight` at once, "wait" after `wait`.
        keep: how long a retry is answered with the stored response.

        Raises `KeyMissing`, `KeyMalformed`, `KeyInFlight` (.retry_after), `RequestMismatch`, `KeyExpired`.
        """
        return IdempotentBlock(
            session, self._record_key(key, scope, source, request, keep), _in_flight(in_flight), wait
        )

    @overload
    def run_idempotent(
        self,
        session: Session | scoped_session[Any],
        key: str,
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
        key: str,
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
        self, session: Any, key: str, fn: Callable[[Claim], Any], **settings: Any
    ) -> Response | Awaitable[Response]:
        """`idempotent` in the form in which a replay cannot be forgotten: `fn(claim)` runs only if there is work to do.

        `fn` answers with `claim.respond(...)` or `claim.reject(...)`; with an AsyncSession it is a coroutine function
        and the call is awaited. Returns the response, new or replayed. Raises what `idempotent` raises.
        """
        block = self.idempotent(session, key, **settings)
        return _run_async(block, fn) if hasattr(unscoped(session), "run_sync") else _run(block, fn)

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
        unknown. No callback runs: the app decides, in its own transaction.
        """
        configuration = self.configuration
        cancelled: bool | Awaitable[bool] = in_session(
            session, lambda inner: cancel_entry(configuration, inner, entry_id)
        )
        return cancelled

    def _record_key(self, key: Any, scope: str, source: str, request: Any, keep: timedelta) -> RecordKey:
        if key is None or key == "":
            raise KeyMissing("the request has no idempotency key: send one, e.g. a UUID, and repeat it with each retry")
        if keep <= timedelta(0):
            raise InvalidValue("keep", keep, "must be positive")
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


class DefaultOutbox(Outbox):
    """The instance behind the module functions: set up by `configure`, or from the environment at its first use."""

    def __init__(self) -> None:
        self._configuration = None

    def configure(
        self,
        keyring: Keyring,
        *,
        env: str,
        schema: str | None = None,
        prefix: str = "outbox_",
        options: Collection[str] = (),
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
        audit: timedelta = AUDIT_WINDOW,
    ) -> None:
        """Set up the module functions, once, at the app's start. The same settings again do no harm.

        keyring: the secrets; env: the deployment's name, part of every key, so that staging and production differ.
        schema, prefix: where the tables are. options: more names for `enqueue(options=...)`.
        payload_bytes_max: of one entry's JSON. audit: how long a record stays readable.
        Raises `ConfigurationError` for a second call that differs: half of the app would use other keys.
        """
        new = Configuration(
            keyring,
            env=env,
            schema=schema,
            prefix=prefix,
            options=options,
            payload_bytes_max=payload_bytes_max,
            audit=audit,
        )
        if self._configuration is not None and self._configuration != new:
            raise ConfigurationError(
                "outbox.configure was called before with other settings; a second outbox is an outbox.Outbox(...)"
            )
        if self._configuration is None:
            self._configuration = new


default = DefaultOutbox()


def _in_flight(mode: str) -> Literal["conflict", "wait"]:
    if mode == "conflict":
        return "conflict"
    if mode == "wait":
        return "wait"
    raise InvalidValue("in_flight", mode, "must be 'conflict' or 'wait'")


def _run(block: IdempotentBlock, fn: Callable[[Claim], object]) -> Response:
    with block as claim:
        if not claim.replayed:
            fn(claim)
    return claim.answer


async def _run_async(block: IdempotentBlock, fn: Callable[[Claim], Awaitable[object]]) -> Response:
    async with block as claim:
        if not claim.replayed:
            await fn(claim)
    return claim.answer
