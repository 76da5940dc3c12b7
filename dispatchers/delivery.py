"""The contract for authors of adapters: what an adapter receives, what it returns, and what it declares.

An adapter receives one `Delivery` and returns one `Outcome`. It never retries by itself, never decides the state of the
entry, and never uses the database: the dispatcher does all three. An adapter with a status lookup also has `find`, which
returns whether the service shows the effect of an earlier attempt.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import date, datetime, timedelta
from enum import Enum
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeAlias
from uuid import UUID

from typing_extensions import TypeVar

from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy, Window
from outbox.errors import ConfigurationError
from outbox.keys import Tag, bind, encode_hex, encode_native, encode_uuid
from outbox.times import EPOCH

Payload = TypeVar("Payload", covariant=True, default=Any)
Result = TypeVar("Result", covariant=True, default=Any)


# --- what an adapter gets


class Untyped(Enum):
    """The value of a delivery whose payload is plain JSON."""

    UNTYPED = "untyped"


UNTYPED: Final = Untyped.UNTYPED


class Delivery(NamedTuple, Generic[Payload]):
    """One attempt to send an entry, or one status lookup. (A tuple, because one is created for each send.)

    payload_json: the payload as JSON, byte for byte as it was enqueued. Every attempt sends these bytes, in every release of
        the app. (`payload` is the same, parsed: JSON data, or the object of a typed effect.)
    key: the child key in the form that the adapter declared: the same for every attempt.
    attempt: 1 for the first attempt: how many sends of this entry may have left, this one included. For a lookup: the sends
        before it.
    options: what `outbox.enqueue(options=...)` stored, e.g. {"account": "acct_1"}.
    headers: the W3C headers that go out: of this attempt's span, or of the enqueue if the dispatcher has no `trace`.
    deadline: when the dispatcher cancels this send, on the event loop's clock (`asyncio.timeout_at(deadline)`).
    due_at: when the app wanted the entry sent, by the database's clock: the same for every attempt.
    age: how long ago the entry was enqueued, by the same clock. No attempt is older, even if clocks differ.
    ordering_key: what `outbox.enqueue(ordering_key=...)` was given. A broker that has ordering groups or partitions gets it.
    value: the payload as an object, for a function that `Operations.handles` has registered. `payload` returns it.

    The repr shows no payload, options, headers or ordering key.
    """

    id: UUID
    operation: str
    payload_json: bytes
    key: str
    attempt: int
    options: Mapping[str, Any]
    headers: Mapping[str, str]
    deadline: float
    due_at: datetime = EPOCH
    age: timedelta = timedelta(0)
    ordering_key: str | None = None
    value: Payload | Untyped = UNTYPED

    @property
    def payload(self) -> Payload:
        """The parsed payload: plain JSON data is a new object at each call."""
        if isinstance(self.value, Untyped):
            plain: Payload = json.loads(self.payload_json)
            return plain
        return self.value

    def __repr__(self) -> str:
        return f"Delivery(id={self.id!r}, operation={self.operation!r}, key={self.key!r}, attempt={self.attempt})"


# --- what an adapter answers: a closed union


@dataclass(frozen=True, slots=True)
class Delivered(Generic[Result]):
    """The service executed the request. `replayed`: the service says that it only repeated an earlier answer.

    result: what to store of the answer, as JSON; None for nothing. Of a typed effect with a result, an object of that type.
    """

    result: Result | None = None
    _: KW_ONLY
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """The service did not execute the request, and would not execute the same request later either.

    conclusive: the service stored this answer under this key within its window, so no earlier attempt succeeded either.
    """

    reason: str
    _: KW_ONLY
    conclusive: bool = False
    result: Any = None


@dataclass(frozen=True, slots=True)
class KeyConflict:
    """The service holds this key for ANOTHER request, which it received earlier."""

    reason: str


@dataclass(frozen=True, slots=True)
class Deferred:
    """The service certainly did not execute the request. The dispatcher sends it again, at the earliest `after` this time.

    cooldown: the answer concerns the whole destination, not only this entry (429, 401): the whole destination waits.
    account: the one account of many that the service refuses. Only this account's own destination (`stripe:acct_1`) counts a
        failure or waits. In a destination that several accounts share, only the entry waits.
    """

    reason: str
    _: KW_ONLY
    after: timedelta | None = None
    cooldown: bool = False
    account: str | None = None


@dataclass(frozen=True, slots=True)
class InProgress:
    """The service is executing this key now. This is not a success."""

    after: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """The service may have executed the request.

    final: another attempt under this key cannot give another answer.
    cooldown: as in `Deferred`.
    """

    reason: str
    _: KW_ONLY
    after: timedelta | None = None
    final: bool = False
    cooldown: bool = False


Outcome: TypeAlias = Delivered | Rejected | KeyConflict | Deferred | InProgress | Unknown
"""What `send` returns: one of these six."""

Answered: TypeAlias = Callable[[int, Outcome], None]
"""What `send_batch` calls with the place of a delivery in the batch, from 0, and its outcome."""

MAX_RESULT_BYTES: Final = 64 * 1024
"""The longest result that is stored, as JSON. Of a longer one only the length is stored."""


# --- the result of a lookup: a closed union


@dataclass(frozen=True, slots=True)
class Found(Generic[Result]):
    """The service shows that the effect happened.

    result: what to store of it, as in `Delivered`.
    """

    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Absent:
    """The service proves that it executed no attempt at this entry under the present key.

    Return it only if the service answered, if you read everything that could be the effect, and if what you read is up to
    date. Otherwise return `CannotTell`.
    """


@dataclass(frozen=True, slots=True)
class CannotTell:
    """The lookup proves neither: the service was unreachable, its search index lags, or there was too much to read."""

    reason: str = ""


Finding: TypeAlias = Found | Absent | CannotTell
"""What `find` returns: one of these three."""


# --- what an adapter declares

DIGEST_CHARS: Final = 8


def digest(text: str) -> str:
    """32 bits of SHA-256 in hex: enough to see that the text has changed, too few to find a secret in it."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


ENCODINGS: Final = ("native", "uuid", "hex")
UUID_VERSIONS: Final = (4, 5, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFormat:
    """The form of the keys that a service accepts. `Dispatcher(...)` checks it.

    encoding: how the stored tag is written: `native` (ck1_..., 36 characters), `uuid` (36) or `hex` (64).
    max_chars: the longest key that the service accepts.
    alphabet: a regular expression for one character.
    uuid_version: 8; or 4 or 5 if the service validates the version.
    route: the key is derived from it too, for a service that compares nothing: `POST /payment_orders`. A key of one route is
        then unknown to every other route. Empty for all other services.
    Raises `ConfigurationError` for any other value.
    """

    encoding: Literal["native", "uuid", "hex"] = "native"
    max_chars: int = 255
    alphabet: str = r"[A-Za-z0-9_-]"
    uuid_version: Literal[4, 5, 8] = 8
    route: str = ""

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ConfigurationError(f"encoding={self.encoding!r} must be one of {', '.join(map(repr, ENCODINGS))}")
        if not isinstance(self.max_chars, int) or self.max_chars < 1:
            raise ConfigurationError(f"max_chars={self.max_chars!r} must be an int of at least 1")
        if self.uuid_version not in UUID_VERSIONS:
            raise ConfigurationError(f"uuid_version={self.uuid_version!r} must be one of 4, 5, 8")
        try:
            re.compile(self.alphabet)
        except (re.error, TypeError) as error:
            raise ConfigurationError(f"alphabet={self.alphabet!r} must be a regular expression: {error}") from error

    def __str__(self) -> str:
        encoding = f"uuid{self.uuid_version}" if self.encoding == "uuid" else self.encoding
        return f"{encoding}/{digest(self.route)}" if self.route else encoding

    def encode(self, tag: Tag) -> str:
        if self.route:
            tag = bind(tag, self.route)
        if self.encoding == "native":
            return encode_native(tag)
        return encode_hex(tag) if self.encoding == "hex" else encode_uuid(tag, version=self.uuid_version)

    def misfit(self) -> str | None:
        """Why no key of this encoding fits the service, or None if every one does."""
        sample = self.encode(Tag(bytes(range(32))))
        if len(sample) > self.max_chars:
            return f"{self.encoding} keys have {len(sample)} characters, the service takes {self.max_chars}"
        # Every character that this encoding can produce, not just those of one sample.
        alphabet = {
            "native": "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_",
            "uuid": "0123456789abcdef-",
            "hex": "0123456789abcdef",
        }[self.encoding]
        refused = [char for char in alphabet if not re.fullmatch(self.alphabet, char)]
        return (
            f"{self.encoding} keys contain {''.join(refused)!r}, the service takes {self.alphabet}" if refused else None
        )


NATIVE: Final = KeyFormat()
"""The default: ck1_ and 32 characters of base64url."""


class Adapter(Protocol):
    """How one outside service is called. Inherit from it for the defaults, or define the same attributes.

    window: how long the service remembers a key: a `timedelta`, `FOREVER`, or None if it keeps no keys. After the window an
        entry in doubt is never sent again.
    timeout: how long one send may take. The dispatcher's lease must be longer.
    key_format: which encoding of the child key the service accepts.
    replays_errors: which answers the service repeats for a key: "all" (Stripe v1), "2xx" or "none".
    at_least_once: for a service without keys. True sends again after an unknown outcome, so the effect may happen twice.
        False, the default, makes the entry `uncertain`.
    retry: when the dispatcher gives up on an entry without a final answer: `RetryPolicy(max_attempts=..., max_age=...)`.
    failure_blocks_group: whether a failed or uncertain entry blocks its ordering group until an operator releases it. With
        False the later entries continue.
    failure_fields: the members of a rejected answer's `result` that classify the failure, such as its code, and are never the
        customer's. The dashboard shows them to everybody who may view it. None by default.
    pinned: what else must not change between two attempts (an API version, an account). An entry in doubt is not sent again
        by an adapter that differs here or in `key_format`; the dispatcher logs that it waits.
    find: the status lookup, async or sync, for an entry that may have been executed. It receives the `Delivery`, returns a
        `Finding` within `timeout`, and changes nothing at the service. An exception counts as `CannotTell`. None, the
        default: no lookup.
    send_batch: `async def send_batch(deliveries, answered)`, for a client that sends several messages at less cost than one by
        one. It calls `answered(number, outcome)` on the event loop as soon as it knows the outcome of a delivery; the first
        number is 0. All deliveries have the same deadline; then the dispatcher cancels the call. A delivery without an outcome
        at the end of the call counts as `Unknown`. The dispatcher calls `send` for an entry with a later key. If a subclass
        replaces only `send`, the dispatcher calls this `send`. None, the default: always `send`.

    search: where at the service an operator finds the effect of an entry in doubt, with `{key}` in the place of the child key.
        The dashboard and `outbox show` say it for an entry that may have been executed. None by default.
    as_of: the day on which the window and the rest were last compared with the service's documentation, if it is known. `outbox
        doctor` reports a day that is more than a year ago.
    parts: the adapters of operations that it serves but for which it declares something else, such as another window, by the
        operation's name without the prefix under which this adapter is registered. None by default.

    If an adapter has an `async def aclose()`, the dispatcher calls it when it stops.
    """

    window: Window = None
    timeout: timedelta = timedelta(seconds=30)
    key_format: KeyFormat = NATIVE
    replays_errors: Literal["all", "2xx", "none"] = "none"
    at_least_once: bool = False
    retry: RetryPolicy = DEFAULT_RETRY
    failure_blocks_group: bool = True
    failure_fields: tuple[str, ...] = ()
    pinned: str = ""
    send_batch: Any = None  # typed as `find` is
    search: str | None = None
    as_of: date | None = None
    parts: Mapping[str, "Adapter"] | None = None
    find: Any = None  # a function of the delivery; typed so, because a method may take its place as well

    def serves(self, operation: str) -> bool:
        """Whether the adapter knows `operation`. Other entries wait for a process that knows their operation, and are logged."""
        return True

    def nearest(self, operation: str) -> str | None:
        """The known operation, or prefix of one, that is most similar to `operation`; None without a list. Only for suggestions
        in errors.
        """
        return None

    def sends_alike(self, pinned: str, options: Mapping[str, Any]) -> bool:
        """Whether this adapter would send an entry with these options now as it was sent under the other `pinned`.

        That is so if the options name everything in which the two adapters differ. Otherwise the entry is not sent again, and
        waits for a process with the first `pinned`.
        """
        return False

    async def send(self, delivery: Delivery) -> Outcome:
        """Call the service once. Return an outcome for the service's errors too. An exception counts as `Unknown`."""
        ...
