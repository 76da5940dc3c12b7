"""The errors that the app's side raises by itself. (`dispatchers.errors` has those of the sending side.)

A name that ends in `Error` is a kind of error, of which the text says what is wrong: a base class, or one with many causes.
Every other name states the one thing that happened, and an app may catch it.

OutboxError
├── ConfigurationError      no key ring, a weak secret, a second `configure` that differs
├── InvalidValue            a field outside its limits: .field, .value          (also a ValueError)
│   └── InvalidPayload      a payload or a result does not fit its effect: .effect
├── NotSerializable         a payload that is not JSON, or too large             (also a ValueError)
├── NoTransaction           an autocommit connection: nothing could be atomic
├── ParentRequired          enqueue outside a claim and without a parent
├── DuplicateEntry          the same effect enqueued twice: .entry_id
├── SchemaError             the tables are missing, or of another version
├── EncryptionError         a value cannot be encrypted or decrypted: see docs/encryption.md
│   ├── CannotDecrypt       no key, another key, or a ciphertext that was changed: .key_id
│   └── KeyServiceFailed    the key service does not answer
├── ClaimError              a claim is used against its rules
│   ├── AlreadyAnswered     work inside a replay
│   ├── ClaimOpen           a commit, or a second claim, while a claim is open
│   ├── ClaimLost           the transaction of an open claim ended inside its block
│   ├── LeaseLost           another attempt took a leased claim over
│   └── NotAnswered         the block ended without `respond`, `accept` or `reject`
└── RequestError            the request cannot be answered: .status, for HTTP
    ├── KeyMissing          400
    ├── KeyMalformed        400
    ├── KeyInFlight         409: .retry_after
    ├── RequestTooLarge     413: a body of more bytes than may be fingerprinted
    ├── RequestMismatch     422: the key was used with another request
    ├── KeyExpired          422: the key is older than its retry window
    └── RequestUndone       503: the database ended the transaction in favour of another: .retry_after
"""

from datetime import timedelta
from typing import ClassVar
from uuid import UUID


class OutboxError(Exception):
    """Base class of every error that this library raises by itself."""


class ConfigurationError(OutboxError):
    """The app's configuration cannot work; the text says what to set."""


class InvalidValue(OutboxError, ValueError):
    """A field is outside its limits. Nothing was written."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        shown = repr(value)
        if len(shown) > 100:
            shown = f"{shown[:80]}... ({len(shown)} characters)"
        super().__init__(f"{field} {shown}: {rule}")
        self.field = field
        self.value = value


class InvalidPayload(InvalidValue):
    """A payload or a result does not fit the type of its effect. The text names the field, and never shows the value.

    effect: its name. field: where, with dots: `payload.amount`. value: always None, because payloads may hold personal data.
    """

    def __init__(self, effect: str, field: str, problem: str) -> None:
        OutboxError.__init__(self, f"{effect}: {field}: {problem}")
        self.effect = effect
        self.field = field
        self.value = None


class NotSerializable(OutboxError, ValueError):
    """A payload, option or response is not JSON, or is too large. Nothing was written."""


class NoTransaction(OutboxError):
    """The connection is in autocommit mode: an entry could not commit together with the business rows."""


class ParentRequired(OutboxError):
    """`enqueue` outside an open claim needs `parent=`."""


class DuplicateEntry(OutboxError):
    """An entry with this operation, parent and discriminator was enqueued before."""

    def __init__(self, message: str, entry_id: UUID) -> None:
        super().__init__(message)
        self.entry_id = entry_id


class SchemaError(OutboxError):
    """The outbox's tables are missing or of another version; the text names the command that fixes it."""


class EncryptionError(OutboxError):
    """A value cannot be encrypted or decrypted. Nothing was sent or written."""


class CannotDecrypt(EncryptionError):
    """A stored value cannot be decrypted by the data keys of this process. `key_id` names its key, if that could be read."""

    def __init__(self, why: str, key_id: str | None = None) -> None:
        super().__init__(f"cannot be decrypted: {why}")
        self.key_id = key_id


class KeyServiceFailed(EncryptionError):
    """The key service, which wraps the data keys, did not answer. A later try may succeed."""


class ClaimError(OutboxError):
    """An idempotency claim is used against its rules."""


class AlreadyAnswered(ClaimError):
    """The request was answered before: a replay must not write, enqueue or answer."""


class ClaimOpen(ClaimError):
    """The session was committed, or a second claim was opened, inside an open `outbox.idempotent` block."""


class ClaimLost(ClaimError):
    """The transaction of the claim has ended, so its lock and its work are lost."""


class LeaseLost(ClaimError):
    """The lease of a leased claim expired, and another attempt took the request over. Nothing of this attempt is stored."""


class NotAnswered(ClaimError):
    """An `outbox.idempotent` block ended without `respond`, `accept` or `reject`; nothing of it is kept."""


class RequestError(OutboxError):
    """The request cannot be answered in its present form. `status` is its HTTP status."""

    status: ClassVar[int] = 400


class KeyMissing(RequestError):
    """The request has no idempotency key."""


class KeyMalformed(RequestError):
    """The idempotency key is outside its limits."""


class KeyInFlight(RequestError):
    """A request with this key is being processed now; `retry_after` says when to retry."""

    status = 409

    def __init__(self, message: str, retry_after: timedelta) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTooLarge(RequestError):
    """The request's body has more bytes than the library compares."""

    status = 413


class RequestMismatch(RequestError):
    """The key was used before, with another request."""

    status = 422


class KeyExpired(RequestError):
    """The key's retry window has passed, but the effects of its request are still remembered: use a new key."""

    status = 422


class RequestUndone(RequestError):
    """The database ended the request's transaction in favour of another one. Nothing is stored. `retry_after` says when to
    retry.
    """

    status = 503

    def __init__(self, message: str, retry_after: timedelta) -> None:
        super().__init__(message)
        self.retry_after = retry_after
