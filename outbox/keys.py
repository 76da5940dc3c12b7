"""Keys and ids as bytes: parent keys, the key ring, ids, and the `ck1` derivation of child keys.

Pure and deterministic; the same in every language. The specification and its vectors: docs/keys.md.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, NewType, NoReturn
from uuid import UUID, SafeUUID

from outbox.errors import ConfigurationError, InvalidValue

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

Tag = NewType("Tag", bytes)
"""The 32 bytes that every encoding of a child key is cut from; stored on the entry with its kid."""

ChildKey = NewType("ChildKey", str)

PARENT_BYTES = 4  # of its parent's id in an entry's: 90 bits remain for its own hash (docs/keys.md)
_OWN_BITS = 128 - 8 * PARENT_BYTES
BLOCK_BYTES = 64  # SHA-256's block: FIPS 180-4, section 1
SECRET_BYTES_MIN = 32  # docs/keys.md, rule 4: the size of the HMAC's own output
OPERATION = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
KID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
PUBLIC_KID = "public"

LIMITS = {
    "env": (1, 64),
    "scope": (0, 255),
    "source": (1, 64),
    "parent": (1, 255),
    "operation": (1, 128),
    "discriminator": (0, 255),
    "destination": (1, 255),
    "ordering_key": (1, 255),
    "completion": (1, 128),
    "schedule": (1, 128),
    "consumer": (1, 64 - len("inbox:")),  # it is the rest of a source
    "message_id": (1, 255),  # it is a parent
}
"""Fewest and most bytes of UTF-8, for each field of a key (docs/keys.md) and for what else names something."""


_BARE_SCOPE, _BARE_SOURCE = "", "app"  # of a parent that is a bare text


@dataclass(frozen=True, slots=True)
class ParentKey:
    """The key of the business request. A retry, a redelivery and a second execution of the request have the same key.

    key: the client's key, the message's id, or a natural key such as `invoice:42`; 1 to 255 bytes.
    scope: the authenticated caller; empty only for source `app`. Never take it from the request's body.
    source: where the key comes from: `http`, `inbox:<consumer>`, `schedule`, or `app` for the app's own natural keys.
    """

    key: str
    scope: str = _BARE_SCOPE
    source: str = _BARE_SOURCE

    def __post_init__(self) -> None:
        check_field("parent", self.key)
        check_field("source", self.source)
        check_field("scope", self.scope)
        if not self.scope and self.source != "app":
            raise InvalidValue(
                "scope", self.scope, f"may be empty only for source 'app', not {self.source!r}: give the caller's id"
            )


def as_parent_key(parent: str | ParentKey) -> ParentKey:
    """The parent key; a plain text is a key of the app without a scope."""
    return parent if isinstance(parent, ParentKey) else ParentKey(parent)


class KeyFields(NamedTuple):
    """The six fields that name one effect. encoded: as the last six parts of a PAE. Made by `key_fields`."""

    env: str
    scope: str
    source: str
    parent: str
    operation: str
    discriminator: str
    encoded: bytes
    parent_id: UUID


def key_fields(env: str, parent: str | ParentKey, operation: str, discriminator: str) -> KeyFields:
    """The checked fields of one effect. Raises `InvalidValue`."""
    name = check_operation(operation)
    key, scope, source = (
        (parent, _BARE_SCOPE, _BARE_SOURCE) if type(parent) is str else _fields_of(as_parent_key(parent))
    )
    parts, id = _known_parent(env, scope, source, key)
    encoded = parts + name + _part(check_field("discriminator", discriminator))
    return KeyFields(env, scope, source, key, operation, discriminator, encoded, id)


class Keyring:
    """The secrets from which child keys are derived, each under its key id (kid).

    secrets: at least 32 random bytes each. current: the kid that new parents use; may be left out if there is one secret.
    Raises `ConfigurationError` for a short secret, a malformed kid, an unknown `current`, and secrets that are not a mapping.
    """

    __slots__ = ("_secrets", "current", "is_public")

    def __init__(self, secrets: Mapping[str, bytes], current: str | None = None) -> None:
        self._secrets: dict[str, bytes] = {}  # from here on it can be shown, whatever fails
        self.current = ""
        problem = _problem_of(secrets, current)
        if problem is not None:
            del secrets  # an error tracker shows the variables of each frame that an error passes
            raise ConfigurationError(problem)
        self._secrets.update(secrets)
        self.current = next(iter(secrets)) if current is None else current
        self.is_public = False

    @classmethod
    def public(cls) -> "Keyring":
        """A ring without a secret: anyone can derive its keys. Use it in tests, and where guessed keys do no harm."""
        ring = cls({PUBLIC_KID: b"\x01" * SECRET_BYTES_MIN})
        ring._secrets = {PUBLIC_KID: bytes(SECRET_BYTES_MIN)}
        ring.is_public = True
        return ring

    @classmethod
    def from_text(cls, text: str) -> "Keyring":
        """Read `kid:base64,older:base64`, the form of OUTBOX_SECRET. The first kid is the current one."""
        secrets = parsed_ring(text, "OUTBOX_SECRET")
        problem = secrets if isinstance(secrets, str) else _problem_of(secrets, next(iter(secrets)))
        if isinstance(secrets, str) or problem is not None:
            del text, secrets
            raise ConfigurationError(problem)
        return cls(secrets, current=next(iter(secrets)))

    @property
    def kids(self) -> list[str]:
        return sorted(self._secrets)

    def secret(self, kid: str) -> bytes:
        try:
            return self._secrets[kid]
        except KeyError:
            raise ConfigurationError(f"no secret for kid {kid!r}; the key ring has {sorted(self._secrets)}") from None

    def __contains__(self, kid: object) -> bool:
        return kid in self._secrets

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Keyring):
            return NotImplemented
        return (self._secrets, self.current, self.is_public) == (other._secrets, other.current, other.is_public)

    def __repr__(self) -> str:
        return f"Keyring(kids={sorted(self._secrets)}, current={self.current!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Keyring cannot be pickled or copied, because its secrets would be copied too: create it in each process, from the"
            " environment or a secret store"
        )


def _problem_of(secrets: object, current: object) -> str | None:
    """Why no key ring can be made of these; None if one can. It returns the text, because its own frame has the secrets."""
    if not secrets:
        return "a key ring needs at least one secret: `outbox keys generate` creates one"
    if not isinstance(secrets, Mapping):
        return (
            f"a key ring is made of a mapping from kids to secrets, not {type(secrets).__name__} (it is not shown):"
            " Keyring({'k1': secret}), or Keyring.from_text(...) for text as OUTBOX_SECRET holds it"
        )
    for kid, secret in secrets.items():
        if (problem := _problem_of_secret(kid, secret)) is not None:
            return problem
    if (current is None and len(secrets) == 1) or (isinstance(current, str) and current in secrets):
        return None
    return f"current={current!r} is not among the key ring's kids {sorted(secrets)}"


def _problem_of_secret(kid: object, secret: object) -> str | None:
    if not isinstance(kid, str):  # who swaps the two has the secret here
        return f"a kid of the key ring must be a str, not {type(kid).__name__} (it is not shown)"
    if not KID.fullmatch(kid):
        return f"kid {kid!r} must match {KID.pattern}"
    if not isinstance(secret, bytes):
        return f"the secret of kid {kid!r} must be bytes, not {type(secret).__name__}"
    if len(secret) < SECRET_BYTES_MIN:
        return (
            f"the secret of kid {kid!r} has {len(secret)} bytes; at least {SECRET_BYTES_MIN} random ones are needed:"
            " `outbox keys generate` creates one"
        )
    return None


def parsed_ring(text: object, variable: str) -> dict[str, bytes] | str:
    """The secrets that `kid:base64,older:base64` holds, or what is wrong with it. variable: where it usually is."""
    if not isinstance(text, str):
        return f"a key ring's text must be a str, not {type(text).__name__}: is {variable} set?"
    secrets: dict[str, bytes] = {}
    for number, part in enumerate(text.split(","), 1):
        kid, colon, encoded = part.strip().partition(":")
        if not colon:
            return "a secret must be written as kid:base64, several separated by commas"
        try:
            secret = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            # Neither half is shown: a user who swaps them puts the secret in the place of the kid.
            return f"secret {number} of the key ring is not kid:base64: after its colon, {error}"
        if not KID.fullmatch(kid):
            return f"secret {number} of the key ring has no kid that matches {KID.pattern}"
        if kid in secrets:
            return f"kid {kid!r} occurs twice in the key ring"
        secrets[kid] = secret
    return secrets


# --- derivation


def pae(*parts: bytes) -> bytes:
    """Pre-authentication encoding: no two lists of parts give the same bytes, whatever is in them."""
    return _u64(len(parts)) + _parts(*parts)


def _parts(*parts: bytes) -> bytes:
    return b"".join(map(_part, parts))


def _part(part: bytes) -> bytes:
    return _u64(len(part)) + part


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "big")


# The beginnings of what is hashed: the number of parts, and the label.
_CHILD_KEY = _u64(7) + _parts(b"obx/child-key/v1")
_CHILD_KEY_PUBLIC = _u64(7) + _parts(b"obx/child-key/v1-public")
_CHILD_KEY_EPOCH = _u64(8) + _parts(b"obx/child-key/v1/epoch")
_CHILD_KEY_PUBLIC_EPOCH = _u64(8) + _parts(b"obx/child-key/v1-public/epoch")
_SECRET_CHECK = _u64(2) + _parts(b"obx/secret-check/v1")
_ENTRY_ID = hashlib.sha256(_u64(7) + _parts(b"obx/entry-id/v1"))
_PARENT_ID = hashlib.sha256(_u64(5) + _parts(b"obx/parent-id/v1"))


def derive_tag(keyring: Keyring, kid: str, fields: KeyFields, epoch: int = 0) -> Tag:
    """The tag of one effect. `epoch` above 0 only after an operator's or a lookup's "send again"."""
    if epoch == 0:
        message = (_CHILD_KEY_PUBLIC if keyring.is_public else _CHILD_KEY) + fields.encoded
    else:
        label = _CHILD_KEY_PUBLIC_EPOCH if keyring.is_public else _CHILD_KEY_EPOCH
        message = label + fields.encoded + _parts(b"%d" % epoch)
    inner, outer = _keyed(keyring.secret(kid))
    return Tag(_digest(outer, _digest(inner, message)))


@lru_cache(maxsize=64)
def _keyed(secret: bytes) -> "tuple[Hash, Hash]":
    """HMAC's two hashes, which have read the key already (RFC 2104, section 4): `hmac.digest` takes up to five times as long."""
    key = hashlib.sha256(secret).digest() if len(secret) > BLOCK_BYTES else secret
    key = key.ljust(BLOCK_BYTES, b"\0")
    return hashlib.sha256(bytes(byte ^ 0x36 for byte in key)), hashlib.sha256(bytes(byte ^ 0x5C for byte in key))


def _digest(begun: "Hash", rest: bytes) -> bytes:
    """The digest of what `begun` has read, and of `rest`. A new start takes as long as reading a short message."""
    hash = begun.copy()
    hash.update(rest)
    return hash.digest()


def secret_check(keyring: Keyring, kid: str) -> str:
    """16 characters by which two processes see whether they have the same secret under `kid`, without showing it.

    A MAC of a constant under the secret, as each tag is one of an entry's fields: neither the secret nor any key follows from it.
    """
    inner, outer = _keyed(keyring.secret(kid))
    return _digest(outer, _digest(inner, _SECRET_CHECK + _part(kid.encode())))[:8].hex()


def entry_id(fields: KeyFields) -> UUID:
    """The id that identifies one effect. No secret is in it: it never changes, and a rotation keeps it.

    It begins with its parent's first bytes, so that an index holds the entries of one parent side by side.
    """
    own = _digest(_ENTRY_ID, fields.encoded)[PARENT_BYTES:16]
    return _as_uuid(fields.parent_id.bytes[:PARENT_BYTES] + own, 8)


def ids_under(parent_id: UUID) -> tuple[UUID, UUID]:
    """The least and the greatest id of an entry under this parent. Entries of a few other parents may be between them."""
    least = parent_id.int >> _OWN_BITS << _OWN_BITS
    return UUID(int=least), UUID(int=least | (1 << _OWN_BITS) - 1)


def parent_id(env: str, parent: ParentKey) -> UUID:
    """The digest under which a parent's record and entries are found."""
    key, scope, source = _fields_of(parent)
    return _known_parent(env, scope, source, key)[1]


_fields_of = attrgetter("key", "scope", "source")


# One parent often has many entries, all in a row: what is the same for all of them is computed once.
@lru_cache(maxsize=1024)
def _known_parent(env: str, scope: str, source: str, key: str) -> tuple[bytes, UUID]:
    """The first parts of a PAE, and the parent's digest. Raises `InvalidValue` for the key: a bare one is checked here."""
    parts = _place(env, scope, source) + _part(check_field("parent", key))
    return parts, _as_uuid(_digest(_PARENT_ID, parts)[:16], 8)


@lru_cache(maxsize=1024)
def _place(env: str, scope: str, source: str) -> bytes:
    return _parts(env.encode(), scope.encode(), source.encode())


def bind(tag: Tag, route: str) -> Tag:
    """The tag for one route of a service that gives any request under a key the first answer. docs/keys.md"""
    return Tag(hashlib.sha256(pae(b"obx/bound-key/v1", tag, route.encode())).digest())


def encode_native(tag: Tag) -> ChildKey:
    """36 characters, 192 bits."""
    return ChildKey("ck1_" + binascii.b2a_base64(tag[:24], newline=False).translate(_URLSAFE).decode())


_URLSAFE = bytes.maketrans(b"+/", b"-_")  # base64.urlsafe_b64encode takes twice the time


def encode_uuid(tag: Tag, version: Literal[4, 5, 8] = 8) -> ChildKey:
    """36 characters, 122 bits; `version` 4 or 5 where a service validates it."""
    return ChildKey(str(_as_uuid(tag[:16], version)))


def encode_hex(tag: Tag) -> ChildKey:
    """64 characters, 256 bits."""
    return ChildKey(tag.hex())


_UNKNOWN = SafeUUID.unknown
_FREE_BITS = (1 << 128) - 1 ^ (0xF << 76 | 0x3 << 62)  # without the version and the variant: RFC 9562, section 4


def _as_uuid(data: bytes, version: int) -> UUID:
    number = int.from_bytes(data, "big") & _FREE_BITS | version << 76 | 0x2 << 62
    id = UUID.__new__(UUID)
    object.__setattr__(id, "int", number)  # as its `__setstate__` does: its constructor takes as long as the hash
    object.__setattr__(id, "is_safe", _UNKNOWN)
    return id


# --- limits


def check_field(name: str, value: object) -> bytes:
    """The value in UTF-8. Raises `InvalidValue` unless it is text within the limits of the field `name`."""
    fewest, most = LIMITS[name]
    if not isinstance(value, str):
        raise InvalidValue(name, value, f"must be a str, not {type(value).__name__}")
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise InvalidValue(name, value, "contains a lone surrogate, which UTF-8 cannot encode") from None
    if "\0" in value:
        raise InvalidValue(name, value, "contains a NUL character")
    if not fewest <= len(encoded) <= most:
        raise InvalidValue(name, value, f"has {len(encoded)} bytes of UTF-8; {fewest} to {most} are allowed")
    return encoded


def check_id(name: str, value: object) -> None:
    """Raise `InvalidValue` unless `value` is a UUID: a database would end the caller's transaction over anything else."""
    if not isinstance(value, UUID):
        raise InvalidValue(name, value, f"must be a uuid.UUID, not {type(value).__name__}")


def check_operation(name: object, field: str = "operation") -> bytes:
    """The name as a part of a PAE. Raises `InvalidValue` unless it is lower-case words joined by dots, as operations have."""
    # What is no text is refused, and may be unhashable, too.
    return _check_operation(name, field) if isinstance(name, str) else check_field(field, name)


@lru_cache(maxsize=1024)
def _check_operation(name: str, field: str) -> bytes:
    encoded = check_field(field, name)
    if not OPERATION.fullmatch(name):
        raise InvalidValue(field, name, "must be lower-case words joined by dots, e.g. 'stripe.refunds.create'")
    return _part(encoded)
