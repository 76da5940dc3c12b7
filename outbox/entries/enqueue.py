"""Enqueue an entry, or many, in the caller's transaction."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

from outbox.configuration import EFFECT_VERSION, Configuration
from outbox.encryption import StoredField, is_sealed_json, seal_json
from outbox.entries.payload import encode_json
from outbox.errors import InvalidValue, OutboxError, ParentRequired
from outbox.keys import ChildKey, ParentKey, check_field, derive_tag, encode_native, entry_id, key_fields
from outbox.services import check_declared
from outbox.sessions.entry_rows import Entry, NewEntry
from outbox.sessions.session import AnySession, ClaimedParent, state_of, sync_session
from outbox.times import EPOCH, MAX_SPAN, NEVER
from outbox.trace_headers import NO_HEADERS, Enqueued

Value = TypeVar("Value")
Payload = TypeVar("Payload")

PerPayload: TypeAlias = Value | Callable[[Payload], Value]
"""One value for all payloads of `enqueue_many`, or a function that returns the value for each."""


class Written(NamedTuple):
    """The payload of a typed effect. data: its JSON data. text: the same as JSON. version: of its form; 1 is not stored."""

    data: Any
    text: bytes
    version: int


def enqueue(
    configuration: Configuration,
    session: AnySession,
    operation: str,
    payload: Any,
    *,
    parent: str | ParentKey | None,
    discriminator: str,
    destination: str | None,
    options: Mapping[str, Any] | None,
    due: datetime | timedelta | None,
    ordering_key: str | None,
    if_exists: Literal["raise", "ignore"],
) -> Entry:
    """Validate the arguments, derive the key, and hand the entry to the session. See `Outbox.enqueue`."""
    inner = sync_session(session)
    state = state_of(inner)
    claimed = state.claim.parent_for(configuration) if state.claim is not None else None
    entry = _new_entry(
        configuration,
        claimed,
        operation,
        payload,
        _keep_first(if_exists),
        parent,
        discriminator,
        destination,
        options,
        due,
        ordering_key,
    )
    return state.keep(inner, configuration, entry)


def enqueue_many(
    configuration: Configuration,
    session: AnySession,
    operation: str,
    payloads: Iterable[Payload],
    write: Callable[[Payload], Any] | None = None,
    *,
    parent: PerPayload[str | ParentKey | None, Payload],
    discriminator: PerPayload[str, Payload],
    destination: PerPayload[str | None, Payload],
    options: PerPayload[Mapping[str, Any] | None, Payload],
    due: PerPayload[datetime | timedelta | None, Payload],
    ordering_key: PerPayload[str | None, Payload],
    if_exists: Literal["raise", "ignore"],
) -> list[Entry]:
    """Validate all payloads, and only then hand their entries to the session. See `Outbox.enqueue_many`.

    write: for the payloads of a typed effect.
    """
    inner = sync_session(session)
    state = state_of(inner)
    claimed = state.claim.parent_for(configuration) if state.claim is not None else None
    keep_first = _keep_first(if_exists)
    fields = (parent, discriminator, destination, options, due, ordering_key)
    entries: list[NewEntry] = []
    for index, payload in enumerate(_checked_payloads(payloads)):
        values: list[Any] = [field(payload) if callable(field) else field for field in fields]
        try:
            written = payload if write is None else write(payload)
            entries.append(_new_entry(configuration, claimed, operation, written, keep_first, *values))
        except OutboxError as error:
            error.args = (f"payloads[{index}]: {error}",)
            raise
    return state.keep_all(inner, configuration, entries)


def _checked_payloads(payloads: Iterable[Payload]) -> Iterable[Payload]:
    if isinstance(payloads, str | bytes | Mapping) or not isinstance(payloads, Iterable):
        raise InvalidValue("payloads", type(payloads), "must be a list of payloads")
    return payloads


def _new_entry(
    configuration: Configuration,
    claimed: ClaimedParent | None,
    operation: str,
    payload: Any,
    keep_first: bool,
    parent: Any,
    discriminator: Any,
    destination: Any,
    options: Any,
    due: Any,
    ordering_key: Any,
) -> NewEntry:
    """The entry of validated arguments. (By position: an app may enqueue hundreds in one transaction.)"""
    fields = key_fields(configuration.env, _parent(parent, claimed), operation, discriminator)
    version = 1
    if type(payload) is Written:
        if len(payload.text) > configuration.max_payload_bytes:
            encode_json("payload", payload.data, configuration.max_payload_bytes)  # raises
        payload, text, version = payload
    else:
        text = None
    if configuration.services:
        check_declared(configuration.services, operation, payload)
    kid = claimed.kid if claimed and claimed.kid else configuration.keyring.current
    due_at, delay = (None, None) if due is None else _due(due)
    id, trace = entry_id(fields), configuration.trace_headers
    to = _default_destination(operation, options) if destination is None else _named("destination", destination)
    return NewEntry(
        id,
        fields.env,
        fields.scope,
        fields.source,
        fields.parent,
        fields.operation,
        fields.discriminator,
        kid,
        derive_tag(configuration.keyring, kid, fields),
        fields.parent_id,
        claimed.record_id if claimed else None,
        to,
        _payload(configuration, id, operation, payload, text),
        _options(configuration, options, version) if options or version > 1 else "{}",
        NO_HEADERS if trace is None else trace.stored(Enqueued(id, operation, to)),
        None if ordering_key is None else _named("ordering_key", ordering_key),
        due_at,
        delay,
        keep_first,
    )


def child_key(configuration: Configuration, parent: str | ParentKey, operation: str, discriminator: str) -> ChildKey:
    """The native child key of one effect under the current secret. See `Outbox.child_key`."""
    fields = key_fields(configuration.env, parent, operation, discriminator)
    return encode_native(derive_tag(configuration.keyring, configuration.keyring.current, fields))


def _payload(configuration: Configuration, id: UUID, operation: str, payload: Any, text: bytes | None) -> bytes:
    """The payload as it is stored: as JSON, or encrypted. text: its JSON, if it is known already."""
    if text is None:
        text = encode_json("payload", payload, configuration.max_payload_bytes)
    if is_sealed_json(text):  # also with encryption: it may be turned off before `outbox again`
        rule = "begins as an encrypted payload does: put the text into an object"
        raise InvalidValue("payload", text[1:6].decode(), rule)
    if configuration.encryption is not None and configuration.encryption.encrypts:
        return seal_json(configuration.encryption, text, StoredField(configuration.env, id, operation, "payload"))
    return text


def _parent(parent: str | ParentKey | None, claimed: ClaimedParent | None) -> str | ParentKey:
    if parent is not None:
        return parent
    if claimed is None or claimed.parent is None:
        raise ParentRequired(
            "enqueue needs parent=, the key of what caused the effect (e.g. parent='invoice:42'); leave it out only inside an"
            " outbox.idempotent block, where the parent is the request"
        )
    return claimed.parent


def _named(field: str, name: str) -> str:
    check_field(field, name)
    return name


def _default_destination(operation: str, options: Mapping[str, Any] | None) -> str:
    """The operation's first segment; for an entry that names an account of many, that account's own: `stripe:acct_1`."""
    service = operation.partition(".")[0]
    account = options.get("account") if isinstance(options, Mapping) else None
    return _named("destination", f"{service}:{account}") if isinstance(account, str) and account else service


def _options(configuration: Configuration, options: Mapping[str, Any] | None, version: int) -> str:
    """The options as JSON, with the version of a typed payload if it is not the first."""
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise InvalidValue("options", options, f"must be a mapping, not {type(options).__name__}")
    for name in options:
        if name not in configuration.options:
            raise InvalidValue(
                "option",
                name,
                f"is unknown; known options are {sorted(configuration.options)}; outbox.configure(options=...) adds others",
            )
    stored = dict(options) if version == 1 else {**options, EFFECT_VERSION: version}
    return encode_json("options", stored, configuration.max_payload_bytes).decode()


def _due(due: datetime | timedelta) -> tuple[datetime | None, timedelta | None]:
    match due:
        case timedelta():
            if due < timedelta(0):
                raise InvalidValue("due", due, "a timedelta counts from now and must not be negative")
            if due > MAX_SPAN:
                raise InvalidValue("due", due, f"is more than {MAX_SPAN.days} days from now")
            return None, due
        case datetime():
            if due.utcoffset() is None:
                raise InvalidValue("due", due, "has no time zone: give an aware datetime, e.g. datetime.now(UTC)")
            if due >= NEVER - MAX_SPAN:
                raise InvalidValue("due", due, f"must lie before {NEVER - MAX_SPAN:%Y}")
            # Year 1 and its neighbours are other languages' "at once"; no driver reads them back in every time zone.
            return (EPOCH if due < EPOCH else due.astimezone(UTC)), None
    raise InvalidValue("due", due, f"must be an aware datetime or a timedelta, not {type(due).__name__}")


def _keep_first(if_exists: str) -> bool:
    if if_exists not in ("raise", "ignore"):
        raise InvalidValue("if_exists", if_exists, "must be 'raise' or 'ignore'")
    return if_exists == "ignore"
