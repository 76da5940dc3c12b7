"""Encrypts what entries and requests carry: AES-256-GCM under the data keys of a ring, or under keys that a key service wraps.

An envelope is text: `obx1:<key id>:<wrapped data key>:<nonce, ciphertext and tag>`, the last two in base64. It is bound to its
place, so a ciphertext that was copied to another entry, field or deployment does not decrypt. See docs/encryption.md.
"""

import asyncio
import binascii
import hashlib
import hmac
import os
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextvars import copy_context
from functools import partial
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar, runtime_checkable
from uuid import UUID

from sqlalchemy.exc import MissingGreenlet
from sqlalchemy.util import await_only

from outbox.errors import CannotDecrypt, ConfigurationError, KeyServiceFailed
from outbox.extras import missing
from outbox.keys import pae, parsed_ring

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

DATA_KID = re.compile(r"[A-Za-z0-9_.-]{1,59}")  # with a mark before it, it is a `kid` of the database
KEY_BYTES = 32  # AES-256
NONCE_BYTES = 12  # NIST SP 800-38D, section 8.2: the length for which GCM is made
TAG_BYTES = 16
MAX_USES = 2**32  # of one key with random nonces: NIST SP 800-38D, section 8.3
DATA_KEY_USES = 2**20  # of a wrapped data key, before the next one: far below the limit, also if a process forks often
DATA_KEY_SECONDS = 3600.0
RENEW_AGAIN_SECONDS = 30.0  # after the key service did not give a new data key, and the old one is used on
FAILED_SECONDS = 30.0  # how long a wrapped key is not unwrapped again that the key service has refused
DOWN_SECONDS = 5.0  # how long the key service is not called after it failed to wrap, or took long to fail
CALL_SECONDS = 10.0  # how long a call of the key service is waited for: its client should give up sooner
HUNG_SECONDS = 60.0  # how long it is not called after a call that hung, and keeps its thread
SLOW_SECONDS = 1.0  # a refusal that comes sooner costs little, and may be of one wrapped key only
MAX_UNWRAPPED = 1000
MARK = "obx1:"
NONE = "none,"
"""How the text of a ring begins that only decrypts."""
QUOTED_MARK = b'"obx1:'

Result = TypeVar("Result")

FieldName: TypeAlias = Literal["payload", "result", "response_body", "response_headers"]


@runtime_checkable
class KeyService(Protocol):
    """A key management service, such as one of a cloud. Its key never leaves it; it wraps the data keys of the processes.

    Both methods are called on threads of their own, one call at a time. Give the client of the service a timeout of a few
    seconds; after 10 seconds a call is given up. An exception means that the service does not answer now: dispatchers try again,
    and `enqueue` raises `KeyServiceFailed`.
    """

    def wrap(self, data_key: bytes) -> bytes:
        """Encrypt the 32 bytes of a data key."""
        ...

    def unwrap(self, wrapped: bytes) -> bytes:
        """The data key that `wrap` encrypted."""
        ...


class StoredField(NamedTuple):
    """Where a value is stored. An envelope is bound to it.

    id: the entry's or the record's. operation: the entry's; empty for a record.
    """

    env: str
    id: UUID
    operation: str
    field: FieldName


class _Key(NamedTuple):
    """A key to encrypt with. head: the beginning of its envelopes."""

    head: str
    cipher: "AESGCM"


class Encryption:
    """The keys for `configure(encryption=...)`, each under its id. `current` encrypts, all of them decrypt.

    keys: 32 random bytes each, or a `KeyService`. current: the id of the key that encrypts; may be left out if there is one key.
    encrypts: False to decrypt only, after encryption was turned off.
    checks: 16 characters for each key that is bytes, by which processes see whether they have the same. They show nothing of it.
    Needs the extra `encryption`. Raises `ConfigurationError` for a key of another size, a malformed id, and an unknown `current`.
    """

    __slots__ = ("_digests", "_rings", "_services", "checks", "current", "encrypts")

    def __init__(
        self, keys: "Mapping[str, bytes | KeyService]", current: str | None = None, *, encrypts: bool = True
    ) -> None:
        self._digests: dict[str, object] = {}  # from here on it can be shown, whatever fails
        self.checks: dict[str, str] = {}
        self.current, self.encrypts = "", encrypts
        refused = _refusal_of(keys, current)
        if refused is not None:
            del keys  # an error tracker shows the variables of each frame that an error passes
            raise refused
        self.current = next(iter(keys)) if current is None else current
        self._rings: dict[str, _Key] = {}
        self._services: dict[str, _ServiceKeys] = {}
        for id, key in keys.items():
            if isinstance(key, bytes):
                self._rings[id] = _Key(f"{MARK}{id}::", cipher_of(key))
                self._digests[id] = hashlib.sha256(key).digest()
                self.checks[id] = hmac.digest(key, pae(b"obx/data-key-check/v1", id.encode()), "sha256")[:8].hex()
            else:
                self._services[id] = _ServiceKeys(id, key)
                self._digests[id] = key

    @classmethod
    def from_text(cls, text: str) -> "Encryption":
        """Read `d2:base64,d1:base64`, the form of OUTBOX_DATA_KEYS. The first key encrypts, all of them decrypt.

        `none,d1:base64` encrypts nothing, and decrypts what was encrypted before.
        """
        encrypts = not (isinstance(text, str) and text.startswith(NONE))
        keys = parsed_ring(text if encrypts else text.removeprefix(NONE), "OUTBOX_DATA_KEYS")
        if isinstance(keys, str):
            del text
            raise ConfigurationError(keys)
        refused = _refusal_of(keys, next(iter(keys)))
        if refused is not None:
            del text, keys
            raise refused
        return cls(keys, current=next(iter(keys)), encrypts=encrypts)

    @property
    def key_ids(self) -> list[str]:
        return sorted(self._digests)

    @property
    def calls_out(self) -> bool:
        """Whether a key is a `KeyService`, so that `seal`, `open` and `prepare` may wait for it."""
        return bool(self._services)

    def prepare(self) -> None:
        """Get a data key from the key service, so that the next `enqueue` does not wait for it. For the start of an async app.

        Raises `KeyServiceFailed`. Without a key service it does nothing.
        """
        if self.current in self._services:
            self._services[self.current].current()

    def seal(self, data: bytes, place: StoredField) -> str:
        """The envelope of `data`. Raises `KeyServiceFailed` if there is no data key yet and the key service gives none."""
        service = self._services.get(self.current)
        head, cipher = self._rings[self.current] if service is None else service.current()
        nonce = os.urandom(NONCE_BYTES)
        sealed = nonce + cipher.encrypt(nonce, data, _bound(head, place))
        return head + binascii.b2a_base64(sealed, newline=False).decode()

    def open(self, envelope: str, place: StoredField) -> bytes:
        """The data of the envelope. Raises `CannotDecrypt`, which no later try changes, and `KeyServiceFailed`."""
        try:
            mark, id, wrapped, encoded = envelope.split(":")
            sealed = binascii.a2b_base64(encoded, strict_mode=True)
        except (ValueError, binascii.Error):
            raise CannotDecrypt("the envelope is damaged") from None
        if not DATA_KID.fullmatch(id):
            raise CannotDecrypt("the envelope is damaged")
        head = f"{mark}:{id}:{wrapped}:"
        cipher = self._cipher(id, wrapped)
        if len(sealed) < NONCE_BYTES + TAG_BYTES:
            raise CannotDecrypt("the ciphertext is truncated", id)
        from cryptography.exceptions import InvalidTag

        try:
            return cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _bound(head, place))
        except InvalidTag:
            raise CannotDecrypt(
                f"it was changed, or it belongs to another entry, field or env, or key {id!r} has other bytes here", id
            ) from None

    def _cipher(self, id: str, wrapped: str) -> "AESGCM":
        if not wrapped and id in self._rings:
            return self._rings[id].cipher
        if wrapped and id in self._services:
            return self._services[id].unwrapped(wrapped)
        if id in self._digests:
            raise CannotDecrypt(f"key {id!r} is a key of another kind here", id)
        raise CannotDecrypt(f"this process has no data key {id!r}, only {', '.join(self.key_ids)}", id)

    def __contains__(self, id: object) -> bool:
        return id in self._digests

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Encryption):
            return NotImplemented
        return (self._digests, self.current, self.encrypts) == (other._digests, other.current, other.encrypts)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Encryption(keys={self.key_ids}, current={self.current!r}{'' if self.encrypts else ', encrypts=False'})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Encryption cannot be pickled or copied, because its keys would be copied too")


def _bound(head: str, place: StoredField) -> bytes:
    """The associated data: neither the key's name nor the place can be exchanged."""
    env, id, operation, field = place
    return pae(b"obx/encryption/v1", head.encode(), env.encode(), id.bytes, operation.encode(), field.encode())


def _refusal_of(keys: object, current: object) -> Exception | None:
    """The error if no ring can be made of these. It is not raised here, because this frame has the keys."""
    problem = _problem_of(keys, current)
    return _missing_package() if problem is None else ConfigurationError(problem)


def _missing_package() -> ImportError | None:
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ModuleNotFoundError as error:
        return missing("outbox.Encryption", "encryption", error)
    return None


def _problem_of(keys: object, current: object) -> str | None:
    """Why no ring can be made of these; None if one can."""
    if not isinstance(keys, Mapping) or not keys:
        return "encryption needs a mapping from key ids to 32 random bytes: `outbox keys generate --data` creates a key"
    for id, key in keys.items():
        if not isinstance(id, str):  # who swaps the two has the key here
            return f"the id of a data key must be a str, not {type(id).__name__} (it is not shown)"
        if not DATA_KID.fullmatch(id):
            return f"the data key's id {id!r} must match {DATA_KID.pattern}"
        if isinstance(key, bytes):
            if len(key) != KEY_BYTES:
                return f"data key {id!r} has {len(key)} bytes; AES-256 needs exactly {KEY_BYTES} random ones"
        elif not isinstance(key, KeyService):
            return f"data key {id!r} must be {KEY_BYTES} bytes, or an object with wrap() and unwrap(), not {type(key).__name__}"
    if (current is None and len(keys) == 1) or (isinstance(current, str) and current in keys):
        return None
    return f"current={current!r} is not among the data keys {sorted(keys)}"


def cipher_of(key: bytes) -> "AESGCM":
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


# --- a key service


class _DataKey:
    """A data key of this process, as the key service has wrapped it.

    uses: how often it has encrypted; threads may count a few at once as one. until, max_uses: when to renew it, by
    `time.monotonic` and by its uses.
    """

    __slots__ = ("key", "max_uses", "until", "uses")

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.uses = 0
        self.last(DATA_KEY_SECONDS)

    def last(self, seconds: float) -> None:
        """Let it be used for so long from now on."""
        self.until = time.monotonic() + seconds
        self.max_uses = self.uses + DATA_KEY_USES

    @property
    def is_due(self) -> bool:
        """Whether it is time for a new one."""
        return self.uses >= self.max_uses or time.monotonic() >= self.until


class _ServiceKeys:
    """The data keys that one key service has wrapped: this process's own, and those that it has unwrapped.

    The service is called on a thread, one call at a time, and all that need the same answer wait for one call. In a greenlet of
    SQLAlchemy, as under an AsyncSession, the wait does not block the event loop. A forked process begins again: it has none of
    the threads, and counts its own uses.
    """

    def __init__(self, id: str, service: KeyService) -> None:
        self._id = id
        self._service = service
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()  # held for a moment only
        self._turn = Lock()  # of the thread that calls the service
        self._calling_since = 0.0
        self._running: dict[str, Future[Any]] = {}
        self._own: _DataKey | None = None
        self._unwrapped: OrderedDict[str, AESGCM] = OrderedDict()
        self._failed: OrderedDict[str, float] = OrderedDict()
        self._down_until = 0.0

    def current(self) -> _Key:
        """The data key to encrypt with. It is renewed in the background: only the first one is waited for.

        While the key service does not answer, the old one is used on.
        """
        if self._pid != os.getpid():
            self._begin()
        own = self._own
        if own is None:
            self._require_up()
            own = self._answer_of(self._call("", self._new))
        elif own.is_due:
            self._call("", self._renew)
        if own.uses >= MAX_USES - DATA_KEY_USES:
            raise self._failure("has given no new data key, and the old one must not be used any more")
        own.uses += 1
        return own.key

    def unwrapped(self, wrapped: str) -> "AESGCM":
        """The data key of an envelope. A wrapped key is unwrapped once, and after a failure not again at once."""
        if self._pid != os.getpid():
            self._begin()
        found = self._unwrapped.get(wrapped)
        if found is not None:
            return found
        if self._failed.get(wrapped, 0.0) > time.monotonic():
            raise self._failure("has just failed for this data key")
        try:
            binascii.a2b_base64(wrapped, strict_mode=True)
        except ValueError:  # also of characters that are not ASCII
            raise CannotDecrypt("the envelope is damaged", self._id) from None
        self._require_up()
        return self._answer_of(self._call(wrapped, self._unwrap, wrapped))

    # --- on the waiting side

    def _call(self, name: str, work: "Callable[..., Result]", *arguments: str) -> "Future[Result]":
        """Do the work on a thread, unless it is being done already."""
        with self._lock:
            answer = self._running.get(name)
            if answer is None:
                answer = self._running[name] = Future()
                context = copy_context()  # so that the spans of the service's client belong to their caller's
                given = (self._work, name, answer, self._turn, work, arguments)
                Thread(target=context.run, args=given, name="outbox-keys", daemon=True).start()
            return answer

    def _answer_of(self, answer: "Future[Result]") -> "Result":
        """Wait for the answer, but not for a call that hangs. Its thread is given up, and later calls do not wait for it."""
        while not _is_done_within(answer, CALL_SECONDS):
            self._require_up()
            if time.monotonic() - self._calling_since >= CALL_SECONDS:
                with self._lock:
                    self._running, self._turn = {}, Lock()
                    self._down_until = time.monotonic() + HUNG_SECONDS
                raise self._failure(f"has not answered within {CALL_SECONDS:g} s")
        return answer.result()

    def _require_up(self) -> None:
        if time.monotonic() < self._down_until:
            raise self._failure("does not answer")

    def _failure(self, what: str) -> KeyServiceFailed:
        return KeyServiceFailed(f"cannot be decrypted now: key service {self._id!r} {what}")

    # --- on the thread

    def _work(
        self, name: str, answer: "Future[Any]", turn: Lock, work: Callable[..., Any], arguments: tuple[str, ...]
    ) -> None:
        with turn:
            self._calling_since = time.monotonic()
            try:
                result = work(*arguments)
            except BaseException as error:  # also a SystemExit, which is the service's
                done = partial(answer.set_exception, error)
            else:
                done = partial(answer.set_result, result)
            with self._lock:
                if self._running.get(name) is answer:
                    del self._running[name]
        done()

    def _new(self) -> _DataKey:
        own = self._own
        if own is not None and not own.is_due:  # another call has just ended
            return own
        self._require_up()
        data_key = os.urandom(KEY_BYTES)
        wrapped = binascii.b2a_base64(self._called("wrap", data_key), newline=False).decode()
        cipher = cipher_of(data_key)
        self._unwrapped[wrapped] = cipher
        self._own = own = _DataKey(_Key(f"{MARK}{self._id}:{wrapped}:", cipher))
        return own

    def _renew(self) -> None:
        old = self._own
        try:
            self._new()
        except KeyServiceFailed:
            if old is not None:
                old.last(RENEW_AGAIN_SECONDS)

    def _unwrap(self, wrapped: str) -> "AESGCM":
        if (found := self._unwrapped.get(wrapped)) is not None:  # another call has just ended
            return found
        self._require_up()
        try:
            data_key = self._called("unwrap", binascii.a2b_base64(wrapped))
        except KeyServiceFailed:
            self._failed[wrapped] = time.monotonic() + FAILED_SECONDS
            while len(self._failed) > MAX_UNWRAPPED:
                self._failed.popitem(last=False)
            raise
        if len(data_key) != KEY_BYTES:
            del data_key  # it may be the key in another form
            raise CannotDecrypt(f"key service {self._id!r} unwrapped something that is no data key", self._id)
        cipher = self._unwrapped[wrapped] = cipher_of(data_key)
        while len(self._unwrapped) > MAX_UNWRAPPED:
            self._unwrapped.popitem(last=False)
        return cipher

    def _called(self, method: Literal["wrap", "unwrap"], data: bytes) -> bytes:
        """The answer of the key service.

        One wrapped key that the service refuses, as of a deleted key, must not stop the others: only a slow failure of `unwrap`
        counts as an outage.
        """
        began = time.monotonic()
        try:
            answer = getattr(self._service, method)(data)
        except Exception as error:
            now = time.monotonic()
            if method == "wrap" or now - began >= SLOW_SECONDS:
                self._down_until = now + DOWN_SECONDS
            raise self._failure(f"raised {type(error).__name__} in {method}()") from error
        if not isinstance(answer, bytes) or not answer:
            kind = type(answer).__name__ if answer else "nothing"
            del answer  # it may be the key
            raise self._failure(f"returned {kind} instead of bytes from {method}()")
        return answer


def _is_done_within(answer: "Future[Any]", seconds: float) -> bool:
    """Wait for it; in a greenlet of SQLAlchemy, without blocking the event loop. Returns whether it is done."""
    if not answer.done() and "greenlet" in sys.modules:
        try:
            await_only(_wait(answer, seconds))
        except MissingGreenlet:
            pass
        else:
            return answer.done()
    return bool(wait_for([answer], seconds).done)


async def _wait(answer: "Future[Any]", seconds: float) -> None:
    await asyncio.wait([asyncio.wrap_future(answer)], timeout=seconds)


# --- where encryption may be off, or stored values are from before it was on


UNOPENED = "cannot be decrypted"
"""How the reason of an entry begins that waits because it cannot be decrypted."""

NO_KEYS = "this process has no data keys: set OUTBOX_DATA_KEYS, or outbox.configure(encryption=...)"


def is_sealed(value: object) -> bool:
    """Whether a parsed JSON value is an envelope."""
    return type(value) is str and value.startswith(MARK)


def is_sealed_json(stored: bytes | str) -> bool:
    """Whether stored JSON is an envelope."""
    return stored[:6] in (QUOTED_MARK, '"obx1:')


def key_id_of(envelope: str) -> str:
    """The id of the key of an envelope, with or without quotes around it."""
    return envelope.split(":", 2)[1]


def seal_json(encryption: Encryption | None, text: bytes, place: StoredField) -> bytes:
    """JSON as it is stored: an envelope in quotes, which is JSON too, or without encryption the text itself."""
    return text if encryption is None else b'"' + encryption.seal(text, place).encode() + b'"'


def open_json(encryption: Encryption | None, stored: bytes, place: StoredField) -> bytes:
    """The JSON that was stored. Raises `CannotDecrypt` and `KeyServiceFailed`."""
    if not is_sealed_json(stored):
        return stored
    return required(encryption).open(stored[1:-1].decode(errors="replace"), place)


def required(encryption: Encryption | None) -> Encryption:
    """The keys, for a value that is encrypted. Raises `CannotDecrypt` if there are none."""
    if encryption is None:
        raise CannotDecrypt(NO_KEYS)
    return encryption


def encryption_of(given: Any) -> Encryption | None:
    """The setting, checked."""
    if given is None or isinstance(given, Encryption):
        return given
    raise ConfigurationError(
        f"encryption must be an outbox.Encryption, such as Encryption.from_text(os.environ['OUTBOX_DATA_KEYS']), not"
        f" {type(given).__name__}"
    )
