"""The settings of an outbox: the key ring, the deployment's name, the schema and prefix of the tables, and others."""

import os
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, Required, TypedDict, Unpack
from uuid import UUID

from outbox.encryption import Encryption, encryption_of
from outbox.errors import ConfigurationError, InvalidValue
from outbox.keys import Keyring, check_field
from outbox.observer import GuardedObserver, Observer
from outbox.services import Service, checked_services
from outbox.sql.postgresql.hint_messages import channel_of
from outbox.sql.schema.identifiers import check_table_names
from outbox.sql.schema.tables import ENCRYPTED_VERSION, SCHEMA_VERSION, Tables, tables_of
from outbox.times import NOTHING, check_span
from outbox.trace_headers import GuardedTraceHeaders, TraceHeaders

MAX_PAYLOAD_BYTES = 256 * 1024
OPTIONS = frozenset({"account", "api_version"})
RECORD_RETENTION = timedelta(days=30)
EFFECT_VERSION = "effect_version"
"""The option in which the version of a typed payload is stored. Only the library writes it."""


class Settings(TypedDict, total=False):
    """The settings of an outbox, besides its key ring. Each of them except `env` has a default."""

    env: Required[str]
    """The deployment's name, 1 to 64 bytes. It is part of every key, so staging and production must differ."""

    schema: str | None
    """The schema of the tables. None, the default, means the connection's own."""

    prefix: str
    """The prefix of the tables' names; `outbox_` by default."""

    options: Collection[str]
    """More names for `enqueue(options=...)`, besides `account` and `api_version`."""

    max_payload_bytes: int
    """The largest payload of an entry and the largest stored response, in bytes; 256 KiB by default."""

    record_retention: timedelta
    """How long a request's record is kept; 30 days by default."""

    observe: Observer | None
    """A function that is called with an `outbox.ObservedClaim` for every claim, after its transaction. It must not block."""

    trace_headers: TraceHeaders | None
    """A function that returns the W3C headers which are stored with the entry that it gets, an `Enqueued`. It must not block."""

    status_url: str | None
    """The status URL of accepted requests, with `{id}` in it. `claim.accept` sends it as Location."""

    fair: Collection[str]
    """The destinations whose sends the dispatchers divide between the scopes that have due entries there."""

    hints: bool
    """Whether commits wake the dispatchers, and whether dispatchers listen. True by default. See docs/operations.md."""

    services: Mapping[str, Service]
    """The profiles of outside services, by the first part of their operations: `enqueue` refuses what they do not take."""

    encryption: Encryption | None
    """The data keys that encrypt payloads, results and stored answers. None, the default: they are stored as they are."""


class Configuration:
    """The checked settings of one outbox. Raises `ConfigurationError` and `InvalidValue` for settings that cannot work."""

    def __init__(self, keyring: Keyring, **settings: Unpack[Settings]) -> None:
        _check_names(settings)
        if not isinstance(keyring, Keyring):
            raise ConfigurationError(f"keyring must be an outbox.Keyring, not {type(keyring).__name__}")
        self.keyring = keyring
        self.env = settings["env"]
        self.schema = settings.get("schema")
        self.prefix = settings.get("prefix", "outbox_")
        self.record_retention = settings.get("record_retention", RECORD_RETENTION)
        check_field("env", self.env)
        check_table_names(self.schema, self.prefix)
        check_span("record_retention", self.record_retention, least=NOTHING)
        self.options = _checked_options(settings.get("options", ()))
        self.max_payload_bytes = _checked_bytes(settings.get("max_payload_bytes", MAX_PAYLOAD_BYTES))
        observe = settings.get("observe")
        self.observer = None if observe is None else GuardedObserver(observe)
        trace_headers = settings.get("trace_headers")
        self.trace_headers = None if trace_headers is None else GuardedTraceHeaders(trace_headers)
        self.status_url = _checked_status_url(settings.get("status_url"))
        self.fair = _checked_fair(settings.get("fair", ()))
        self.hints = _checked_hints(settings.get("hints", True))
        self.services = checked_services(settings.get("services", {}))
        self.encryption = encryption_of(settings.get("encryption"))
        self.tables: Tables = tables_of(self.schema, self.prefix)
        """The outbox's tables, in a MetaData of their own. Outboxes with the same schema and prefix share them."""

    def status_url_of(self, id: UUID) -> str | None:
        """The URL of the status of the request with this id, if the app has set one."""
        return None if self.status_url is None else self.status_url.replace("{id}", str(id))

    @property
    def schema_version(self) -> int:
        """The version of the entries that are enqueued. A process without data keys leaves encrypted ones to others."""
        return SCHEMA_VERSION if self.encrypting is None else ENCRYPTED_VERSION

    @property
    def encrypting(self) -> Encryption | None:
        """The data keys, if new values are encrypted; `encryption` decrypts also after that was turned off."""
        return self.encryption if self.encryption is not None and self.encryption.encrypts else None

    @property
    def hint_channel(self) -> str:
        """The notification channel on which the dispatchers of these tables listen."""
        return channel_of(self.schema, self.prefix)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Configuration):
            return NotImplemented
        return self is other or self._given() == other._given()

    __hash__ = object.__hash__

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "tables"}


def _check_names(settings: Mapping[str, object]) -> None:
    """Raise `TypeError` as a call does, for a setting that does not exist and for one that is missing."""
    unknown = sorted(settings.keys() - Settings.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"an outbox has no setting {unknown[0]!r}; its settings are {', '.join(Settings.__annotations__)}"
        )
    if "env" not in settings:
        raise TypeError("an outbox needs env=..., the deployment's name")


def _checked_options(options: Collection[str]) -> frozenset[str]:
    if isinstance(options, str):
        raise InvalidValue("options", options, "must be a collection of names, not one str")
    if EFFECT_VERSION in options:
        raise InvalidValue("option", EFFECT_VERSION, "is reserved: an outbox.Effect stores its version in it")
    return OPTIONS | frozenset(options)


def _checked_bytes(max_payload_bytes: int) -> int:
    if not isinstance(max_payload_bytes, int) or max_payload_bytes < 1:
        raise InvalidValue("max_payload_bytes", max_payload_bytes, "must be a number of bytes, 1 or more")
    return max_payload_bytes


def _checked_status_url(template: str | None) -> str | None:
    if template is None:
        return None
    if not isinstance(template, str) or "{id}" not in template:
        raise ConfigurationError(
            f"status_url must be a URL or path with {{id}} in it, e.g. '/requests/{{id}}', not {template!r}"
        )
    if not template.isascii() or not template.isprintable() or " " in template:
        raise ConfigurationError(
            f"status_url {template!r} contains a character that is not allowed in a URL: percent-encode it"
        )
    return template


def _checked_fair(fair: Collection[str]) -> frozenset[str]:
    if isinstance(fair, str) or not isinstance(fair, Collection):
        raise ConfigurationError(f"fair must be a set of destinations, e.g. {{'stripe'}}, not {fair!r}")
    for name in fair:
        check_field("destination", name)
    return frozenset(fair)


def _checked_hints(hints: bool) -> bool:
    if not isinstance(hints, bool):  # the text "false" is true
        raise ConfigurationError(f"hints={hints!r}: must be True or False")
    return hints


def encryption_from_environment() -> Encryption | None:
    """The data keys of OUTBOX_DATA_KEYS (`d2:base64,d1:base64`, the first one encrypts); None if it is not set."""
    text = os.environ.get("OUTBOX_DATA_KEYS")
    return Encryption.from_text(text) if text else None


def configuration_from_environment() -> Configuration:
    """Read OUTBOX_SECRET (`kid:base64,older:base64`, the current kid first), OUTBOX_ENV, OUTBOX_DATA_KEYS, and OUTBOX_HINTS
    (`on` or `off`).
    """
    missing = [name for name in ("OUTBOX_SECRET", "OUTBOX_ENV") if not os.environ.get(name)]
    if missing:
        raise ConfigurationError(
            f"the outbox is not configured: call outbox.configure(keyring, env=...) at the app's start,"
            f" or set {' and '.join(missing)}"
        )
    hints = os.environ.get("OUTBOX_HINTS") or "on"
    if hints not in ("on", "off"):
        raise ConfigurationError(f"OUTBOX_HINTS is {hints!r}: must be on or off")
    keyring = Keyring.from_text(os.environ["OUTBOX_SECRET"])
    return Configuration(
        keyring, env=os.environ["OUTBOX_ENV"], hints=hints == "on", encryption=encryption_from_environment()
    )
