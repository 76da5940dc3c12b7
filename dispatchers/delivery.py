"""The contract that an adapter's author reads: what an adapter gets, what it answers, what it declares.

An adapter is handed one `Delivery` and answers with one `Outcome`. It never retries by itself, never decides what happens to
the entry, and never touches the database: the dispatcher does all three. An adapter with a status lookup reports with `find`
what the service has of an earlier attempt.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias
from uuid import UUID

from outbox.errors import ConfigurationError
from outbox.keys import Tag, encode_hex, encode_native, encode_uuid
from outbox.times import EPOCH


class Forever(Enum):
    """The window of a service that never forgets a key (a natural key, an upsert, a PUT)."""

    FOREVER = "forever"


FOREVER: Final = Forever.FOREVER
"""The window of a service that never forgets a key: a natural key, an upsert."""
Window: TypeAlias = timedelta | Literal[Forever.FOREVER] | None


# --- what an adapter gets


class Delivery(NamedTuple):
    """One attempt at sending an entry, or one status lookup. (A tuple: it is made for each send.)

    body: the payload's JSON bytes as they were enqueued; they are what goes out, whatever the deploy.
    key: the child key in the form that the adapter declared: the same for every attempt.
    attempt: 1 for the first; how many sends of this entry may have left, this one included. For a lookup, those before it.
    options: stored verbatim by `outbox.enqueue`, e.g. {"account": "acct_1"}.
    deadline: when the dispatcher cancels this send, on the event loop's clock (`asyncio.timeout_at(deadline)`).
    due_at: from when on the app wanted it sent, by the database's clock: the same for every attempt.
    age: how long ago it was enqueued, by the same clock. No attempt is older, even if clocks differ.

    Its repr shows no body, options or headers.
    """

    id: UUID
    operation: str
    body: bytes
    key: str
    attempt: int
    options: Mapping[str, Any]
    headers: Mapping[str, str]
    deadline: float
    due_at: datetime = EPOCH
    age: timedelta = timedelta(0)

    @property
    def payload(self) -> Any:
        """The payload parsed; a new object at each call."""
        return json.loads(self.body)

    def __repr__(self) -> str:
        return f"Delivery(id={self.id!r}, operation={self.operation!r}, key={self.key!r}, attempt={self.attempt})"


# --- what an adapter answers: a closed union


@dataclass(frozen=True, slots=True)
class Delivered:
    """It was executed. `replayed`: the service says that it only repeated an earlier answer.

    result: what to remember of the answer, as JSON; None if nothing.
    """

    result: Any = None
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """Not executed, and a retry of the same request will not be either.

    conclusive: the service stored this answer under this key within its window, so no earlier attempt succeeded either.
    """

    reason: str
    conclusive: bool = False
    result: Any = None


@dataclass(frozen=True, slots=True)
class KeyConflict:
    """The service holds this key for ANOTHER request: an earlier one has reached it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Deferred:
    """Certainly not executed; retry later, `after` at the earliest.

    cooldown: the answer is about the whole destination, not this entry (429, 401): the whole destination waits.
    account: the one account of many that the service refuses. Only that account's own destination counts it as a failure or waits
        (`stripe:acct_1`); in a destination that accounts share, only the entry waits.
    """

    reason: str
    after: timedelta | None = None
    cooldown: bool = False
    account: str | None = None


@dataclass(frozen=True, slots=True)
class InProgress:
    """This very key is being executed now. Not success."""

    after: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """It may have been executed. `final`: a retry under this key cannot give another answer. `cooldown`: as in `Deferred`."""

    reason: str
    after: timedelta | None = None
    final: bool = False
    cooldown: bool = False


Outcome: TypeAlias = Delivered | Rejected | KeyConflict | Deferred | InProgress | Unknown
"""What `send` returns: one of these six."""


# --- the result of a lookup: a closed union


@dataclass(frozen=True, slots=True)
class Found:
    """The service shows that it happened.

    result: what to remember of it, as JSON; None if nothing.
    """

    result: Any = None


@dataclass(frozen=True, slots=True)
class Absent:
    """The service proves that no attempt at this entry was executed, under the present key at least.

    It was reached, all that could be the effect was read, and what it shows is up to date: else it is `CannotTell`.
    """


@dataclass(frozen=True, slots=True)
class CannotTell:
    """The lookup proves neither: the service was unreachable, its search index lags, or it returned more than could be read."""

    reason: str = ""


Finding: TypeAlias = Found | Absent | CannotTell
"""What `find` returns: one of these three."""


# --- what an adapter declares

ENCODINGS: Final = ("native", "uuid", "hex")
UUID_VERSIONS: Final = (4, 5, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFormat:
    """The form of the keys that a service accepts; checked when the adapter is registered.

    encoding: how the stored tag is written: `native` (ck1_..., 36 characters), `uuid` (36) or `hex` (64).
    chars_max: the longest key that the service takes. alphabet: a regular expression for one character.
    uuid_version: 8, or 4 or 5 where the service validates the version.
    Raises `ConfigurationError` for any other value.
    """

    encoding: Literal["native", "uuid", "hex"] = "native"
    chars_max: int = 255
    alphabet: str = r"[A-Za-z0-9_-]"
    uuid_version: Literal[4, 5, 8] = 8

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ConfigurationError(f"encoding={self.encoding!r} must be one of {', '.join(map(repr, ENCODINGS))}")
        if not isinstance(self.chars_max, int) or self.chars_max < 1:
            raise ConfigurationError(f"chars_max={self.chars_max!r} must be an int of at least 1")
        if self.uuid_version not in UUID_VERSIONS:
            raise ConfigurationError(f"uuid_version={self.uuid_version!r} must be one of 4, 5, 8")
        try:
            re.compile(self.alphabet)
        except (re.error, TypeError) as error:
            raise ConfigurationError(f"alphabet={self.alphabet!r} must be a regular expression: {error}") from error

    def __str__(self) -> str:
        return f"uuid{self.uuid_version}" if self.encoding == "uuid" else self.encoding

    def encode(self, tag: Tag) -> str:
        if self.encoding == "native":
            return encode_native(tag)
        return encode_hex(tag) if self.encoding == "hex" else encode_uuid(tag, version=self.uuid_version)

    def misfit(self) -> str | None:
        """Why no key of this encoding fits the service, or None if every one does."""
        sample = self.encode(Tag(bytes(range(32))))
        if len(sample) > self.chars_max:
            return f"{self.encoding} keys have {len(sample)} characters, the service takes {self.chars_max}"
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
    """How one outside service is called. Inherit from it to get the defaults, or just have these attributes.

    window: how long the service remembers a key: a `timedelta`, `FOREVER`, or None if it keeps none. Past it an entry in
        doubt is never sent again.
    timeout: how long one send may take in all. The dispatcher's lease must outlast it.
    key_format: which encoding of the child key the service takes.
    replays_errors: which answers the service repeats for a key: "all" (Stripe v1), "2xx" or "none".
    at_least_once: for a service without keys: True re-sends after an unknown outcome (it may happen twice), False
        (the default) parks the entry as `uncertain`.
    attempts_max: after so many sends without an answer that ends it, the entry ends: failed, or uncertain if in doubt.
    age_max: the same for the time since its first claim. Waiting for that has no limit.
    failure_blocks_group: whether a failed or uncertain entry blocks its ordering group until an operator releases it; False lets
        the entries after it continue.
    pinned: what else must not change between two attempts (an API version, an account); a later attempt in doubt whose
        adapter differs here or in `key_format` is refused and reported.

    find: the status lookup, async or sync, for an entry that may have been executed: given the `Delivery`, it answers
        with a `Finding` within `timeout`, and changes nothing there. None, the default: no lookup. What it
        raises counts as `CannotTell`.

    An adapter with an `async def aclose()` has it called when its dispatcher stops.
    """

    window: Window = None
    timeout: timedelta = timedelta(seconds=30)
    key_format: KeyFormat = NATIVE
    replays_errors: Literal["all", "2xx", "none"] = "none"
    at_least_once: bool = False
    attempts_max: int = 20
    age_max: timedelta = timedelta(days=3)
    failure_blocks_group: bool = True
    pinned: str = ""
    find: Any = None  # a function of the delivery; typed so, because a method may take its place as well

    def serves(self, operation: str) -> bool:
        """Whether it knows `operation`. Entries of unknown operations wait for a process that knows them, and are logged."""
        return True

    def nearest(self, operation: str) -> str | None:
        """The known operation, or prefix of one, closest to `operation`; None if it has no list. For suggestions in errors
        only."""
        return None

    def sends_alike(self, pinned: str, options: Mapping[str, Any]) -> bool:
        """Whether an entry with these options that may have left under another `pinned` would leave now as it did then.

        So it is where the options name all that the two differ in. Else it is not sent again, and waits for a process that
        is pinned as the first one was.
        """
        return False

    async def send(self, delivery: Delivery) -> Outcome:
        """Call the service once. Return an outcome for the service's errors too; an exception becomes `Unknown`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The adapter's declarations that `decide` needs, as plain values.

    fencing_delay: how long a send that lost its lease may still be in flight. can_look_up: whether there is a `find`.
    form: the key format and what else a send is pinned to.
    """

    window: Window
    timeout: timedelta = timedelta(seconds=30)
    at_least_once: bool = False
    attempts_max: int = 20
    age_max: timedelta = timedelta(days=3)
    failure_blocks_group: bool = True
    margin: timedelta = field(default=timedelta(seconds=5))
    fencing_delay: timedelta = timedelta(seconds=65)
    can_look_up: bool = False
    form: str = ""
