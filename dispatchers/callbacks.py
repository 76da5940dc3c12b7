"""The app's callbacks: what runs when an entry, or every entry of an accepted request, has ended, and the arguments that it
gets.

A callback runs in the transaction that settles the entry, after a check that this process still has the lease. What the
callback writes commits together with the settlement, once, or not at all.
"""

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Row, select
from sqlalchemy.orm import Session, SessionTransaction
from typing_extensions import TypeVar

from dispatchers.errors import CallbackError
from dispatchers.names import prefixes
from dispatchers.threads import is_async
from dispatchers.transitions import ClaimedEntry, End, Settle
from outbox.configuration import MAX_PAYLOAD_BYTES, Configuration
from outbox.effects.effect import Effect
from outbox.encryption import required
from outbox.entries.status import EntryStatus, entries_of_request
from outbox.errors import AlreadyAnswered, ConfigurationError, NotAnswered
from outbox.keys import ParentKey, Tag, encode_native
from outbox.requests.responses import Response, response_to_keep
from outbox.sessions.session import ClaimedParent, OpenClaim, state_of
from outbox.sql.schema.tables import ENCRYPTED_VERSION

Payload = TypeVar("Payload", covariant=True, default=Any)
Result = TypeVar("Result", covariant=True, default=Any)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledEntry(Generic[Payload]):
    """The settled entry, as it was enqueued. effect: the typed effect for which the callback is registered, if it is one."""

    id: UUID
    operation: str
    parent: ParentKey
    discriminator: str
    destination: str
    child_key: str
    payload_json: bytes = field(repr=False)
    created_at: datetime
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    effect: Effect[Any, Any] | None = field(default=None, repr=False)

    @property
    def payload(self) -> Payload:
        """The parsed payload; a new object at each call. Raises `InvalidPayload` if it does not fit the effect's type."""
        effect, text = self.effect, self.payload_json
        payload: Payload = json.loads(text) if effect is None else effect.read(text, self.options)
        return payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement(Generic[Payload, Result]):
    """How the entry ended: the argument of a callback.

    state: `delivered`: the effect happened. `failed` or `cancelled`: it did not happen and will not. For `on_uncertain`:
        `uncertain`.
    result: the part of the service's answer that the adapter kept. For a typed effect with a result: an object of that type if
        the entry is delivered and its result is stored, and otherwise None.
    stored_result: the same as JSON data, in every state.
    attempts: how many sends may have left.
    """

    entry: SettledEntry[Payload]
    state: Literal["delivered", "failed", "cancelled", "uncertain"]
    result: Result | None = field(repr=False)
    reason: str | None
    attempts: int
    stored_result: Any = field(default=None, repr=False)


@dataclass(slots=True, eq=False)
class Completed:
    """An accepted request whose entries have all ended: the argument of `on_completed`, which gives the final response.

    id: the request's id, as `claim.id`.
    completion: the name under which the request was accepted.
    entries: the entries that it caused, oldest first, each `delivered`, `failed` or `cancelled`, with its result.
    response: the final response, once there is one.
    """

    id: UUID
    completion: str
    parent: ParentKey
    entries: list[EntryStatus] = field(repr=False)
    response: Response | None = field(default=None, init=False, repr=False)
    _max_response_bytes: int = field(default=MAX_PAYLOAD_BYTES, init=False, repr=False)

    def respond(self, status: int, body: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        """Give the request its final response. Every later retry gets it. Arguments and errors: see `claim.respond`."""
        if self.response is not None:
            raise AlreadyAnswered(f"respond after an answer: on_completed({self.completion!r}) has already responded")
        self.response = response_to_keep(status, body, headers, max_bytes=self._max_response_bytes)
        return self.response


def final_response(completed: Completed) -> Response:
    """The response that the app's function gave. Raises `NotAnswered` if it gave none."""
    if completed.response is None:
        raise NotAnswered(f"on_completed({completed.completion!r}) has ended without completed.respond()")
    return completed.response


Callback: TypeAlias = Callable[[Any, Settlement], Any]
OnCompleted: TypeAlias = Callable[[Any, Completed], Any]
Function: TypeAlias = Callback | OnCompleted
Kind: TypeAlias = Literal["on_settled", "on_uncertain", "on_completed"]


class AppTransactions(Protocol):
    """The transactions of a framework, in which callbacks run instead of those of the dispatcher's engine, each on a thread."""

    def begin(self) -> AbstractContextManager[tuple[Connection, Session]]:
        """A transaction that commits at the end of the block, and a session that cannot end it."""
        ...

    def call(self, connection: Connection, function: Function, session: Session, argument: Any) -> Any:
        """Call the app's function, which may be async, on this thread."""
        ...


MAX_OPERATIONS = 10_000


class Calls(NamedTuple):
    """The app's functions in the transaction that settles an entry: for its end, and for the end of its whole request."""

    ended: Callback | None = None
    completed: OnCompleted | None = None


class Callbacks:
    """The registered callbacks; as with adapters, the longest dotted prefix of an operation's name wins.

    A completion's name is matched exactly: it is no operation's.
    to_record: those that settle entries, as they are put on record. What completes a request is in the request's record.
    """

    def __init__(self, sources: Iterable[Mapping[tuple[Kind, str], Function]]) -> None:
        self._registered: dict[tuple[Kind, str], Callable[[Any, Any], Any]] = {}
        for source in sources:
            for (kind, name), callback in source.items():
                if (kind, name) in self._registered:
                    raise ConfigurationError(f"{kind}({name!r}) is registered twice: register one callback")
                self._registered[kind, name] = callback
        self.to_record = frozenset(_name(kind, name) for kind, name in self._registered if kind != "on_completed")
        self._may_call: dict[str, bool] = {}
        self._on_record: frozenset[str] = frozenset()
        self._missing: dict[tuple[Kind, str], str | None] = {}

    def __bool__(self) -> bool:
        return bool(self._registered)

    @property
    def is_any_on_record(self) -> bool:
        """Whether any process of this deployment has registered a callback, as far as this one knows."""
        return bool(self._on_record)

    def learn(self, on_record: frozenset[str]) -> None:
        """These are registered in some process of this deployment, or were in an earlier deploy."""
        self._on_record = on_record
        self._missing.clear()

    def missing(self, claimed: ClaimedEntry, end: End) -> str | None:
        """The callback that is due when `claimed` comes to `end`, if another process has registered it, and this one has not."""
        if not self._on_record:
            return None
        asked = _kind(end), claimed.operation
        if asked not in self._missing:
            if len(self._missing) > MAX_OPERATIONS:
                self._missing.clear()
            self._missing[asked] = self._find_missing(*asked)
        return self._missing[asked]

    def _find_missing(self, kind: Kind, operation: str) -> str | None:
        for name in prefixes(operation):
            if (kind, name) in self._registered:
                return None
            if _name(kind, name) in self._on_record:
                return _name(kind, name)
        return None

    @property
    def names(self) -> Collection[tuple[Kind, str]]:
        """The kind of each registered callback, and the name that it is registered for."""
        return self._registered.keys()

    @property
    def complete_requests(self) -> bool:
        """Whether there is a completion among them."""
        return any(kind == "on_completed" for kind, _ in self._registered)

    def calls(self, claimed: ClaimedEntry, end: End) -> Calls:
        """The functions that run in the transaction that brings `end` to `claimed`."""
        ended = self.find(claimed.operation, end)
        if claimed.completion is None or not isinstance(end, Settle):
            return Calls(ended)
        return Calls(ended, self.find_completion(claimed.completion))

    def may_call(self, claimed: ClaimedEntry) -> bool:
        """Whether some end of `claimed` has a callback or a completion here."""
        found = self._may_call.get(claimed.operation)
        if found is None:
            if len(self._may_call) > MAX_OPERATIONS:  # names come from rows: keep the memo from growing without end
                self._may_call.clear()
            found = any(self._registered_for(kind, claimed.operation) for kind in ("on_settled", "on_uncertain"))
            self._may_call[claimed.operation] = found
        return found or (claimed.completion is not None and self.find_completion(claimed.completion) is not None)

    @property
    def destinations(self) -> set[str]:
        """The destinations of the operations with callbacks, unless an entry names another destination."""
        return {name.partition(".")[0] for kind, name in self._registered if kind != "on_completed"}

    def find_completion(self, name: str) -> OnCompleted | None:
        """The function that completes the requests that were accepted under `name`."""
        return self._registered.get(("on_completed", name))

    def find(self, operation: str, end: End) -> Callback | None:
        """The callback for an entry of `operation` that comes to `end`, if there is one."""
        name = self._registered_for(_kind(end), operation)
        return None if name is None else self._registered[name]

    def _registered_for(self, kind: Kind, operation: str) -> tuple[Kind, str] | None:
        found = next((name for name in prefixes(operation) if (kind, name) in self._registered), None)
        return None if found is None else (kind, found)

    def first_async(self) -> str | None:
        """The name of a callback that is a coroutine function, if there is one."""
        for (kind, name), callback in self._registered.items():
            if is_async(callback):
                return f"{kind}({name!r})"
        return None


def _kind(end: End) -> Kind:
    return "on_settled" if isinstance(end, Settle) else "on_uncertain"


def _name(kind: Kind, name: str) -> str:
    return f"{kind} {name}"


class CallbackFailed(Exception):
    """The callback raised, as its `__cause__` says; nothing of its transaction is kept."""

    what: ClassVar[Literal["callback", "completion", "schedule"]] = "callback"


class CompletionFailed(CallbackFailed):
    """The completion of an accepted request raised, as its `__cause__` says; nothing of its transaction is kept."""

    what = "completion"


class ScheduleFailed(CallbackFailed):
    """The function of a schedule raised, as its `__cause__` says; nothing of its transaction is kept."""

    what = "schedule"


class CallbackOverdue(Exception):
    """The callback timed out. function: its name. place: the line where it was then, if known."""

    def __init__(self, seconds: float, function: str, place: str = "") -> None:
        super().__init__(seconds, function, place)
        self.summary = f"took longer than {seconds:g} s"
        self.report = f"{function} took longer than {seconds:g} s, its deadline; its transaction is rolled back{place}"


class Cause(OpenClaim):
    """The open claim of a callback's session: entries that it enqueues derive from the settled entry's parent."""

    def __init__(self, configuration: Configuration, kid: str, parent: ParentKey, record_id: UUID | None) -> None:
        self._configuration = configuration
        self._kid = kid
        self._parent = parent
        self._record_id = record_id

    def parent_for(self, configuration: Configuration) -> ClaimedParent | None:
        if configuration != self._configuration:
            return None
        kid = self._kid if self._kid in configuration.keyring.kids else configuration.keyring.current
        return ClaimedParent(self._parent, kid, self._record_id)

    def before_commit(self, committed: SessionTransaction | None) -> None:
        if committed is None:
            raise CallbackError(
                "a callback must not commit: what it writes commits together with the settlement of the entry"
            )


def prepare(
    connection: Connection, configuration: Configuration, session: Session, claimed: ClaimedEntry, end: End
) -> Settlement:
    """The callback's argument; `session`, on `connection`, belongs to the callback from now on."""
    entry = configuration.tables.entry
    row = connection.execute(select(entry).where(entry.c.id == claimed.id)).one()
    parent = ParentKey(row.parent, scope=row.scope, source=row.source)
    state_of(session).claim = Cause(configuration, row.kid, parent, row.record_id)
    return Settlement(
        entry=SettledEntry(
            id=row.id,
            operation=row.operation,
            parent=parent,
            discriminator=row.discriminator,
            destination=claimed.destination,
            child_key=encode_native(Tag(bytes(row.tag))),
            payload_json=_payload(configuration, claimed),
            created_at=row.created_at,
            options=claimed.options,
        ),
        state=end.state if isinstance(end, Settle) else "uncertain",
        result=end.result if isinstance(end, Settle) else None,
        stored_result=end.result if isinstance(end, Settle) else None,
        reason=end.reason,
        attempts=end.attempts,
    )


def _payload(configuration: Configuration, claimed: ClaimedEntry) -> bytes:
    """The payload, as it was opened at the claim. Without its key an entry must be able to be uncertain, cancelled or resolved:
    then it is the envelope, as it is stored.
    """
    if claimed.schema_version == ENCRYPTED_VERSION:
        required(configuration.encryption)  # a process with keys may have the callback run
    return claimed.payload


def begin_completed(connection: Connection, configuration: Configuration, session: Session, row: Row[Any]) -> Completed:
    """The argument of the request's completion; `session` belongs to it from now on. row: the request's record."""
    parent = ParentKey(row.parent, scope=row.scope, source=row.source)
    state_of(session).claim = Cause(configuration, row.kid, parent, row.id)
    entries = entries_of_request(connection, configuration, row.id)
    completed = Completed(row.id, row.completion, parent, entries)
    completed._max_response_bytes = configuration.max_payload_bytes
    return completed


def require_no_awaitable(answer: object) -> None:
    """Raise if a callback that is called as a sync one has only made a coroutine, which is never awaited."""
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise CallbackError(
            "a callback that is not an `async def` returned an awaitable: register the `async def` itself, or make its wrapper"
            " an `async def` too"
        )
