"""What an outbox is set up with: the key ring, the environment's name, the tables' schema and prefix."""

import os
from collections.abc import Collection
from datetime import timedelta
from functools import cached_property, lru_cache
from uuid import UUID

from sqlalchemy import MetaData

from outbox.durations import NOTHING, check_span
from outbox.errors import ConfigurationError, InvalidValue
from outbox.keys import Keyring, check_field
from outbox.observer import GuardedObserver, Observer
from outbox.sql.identifiers import check_table_names
from outbox.sql.schema import STATEMENTS_MAX, Tables, define_tables

PAYLOAD_BYTES_MAX = 256 * 1024
OPTIONS = frozenset({"account", "api_version"})
AUDIT_WINDOW = timedelta(days=30)


class Configuration:
    """The settings of one outbox; `outbox.Outbox` is what an app makes of them."""

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
        observe: Observer | None = None,
        status_url: str | None = None,
        fair: Collection[str] = (),
    ) -> None:
        if not isinstance(keyring, Keyring):
            raise ConfigurationError(f"keyring must be an outbox.Keyring, not {type(keyring).__name__}")
        check_field("env", env)
        check_table_names(schema, prefix)
        check_span("audit", audit, least=NOTHING)
        if isinstance(options, str):
            raise InvalidValue("options", options, "must be a collection of names, not one str")
        if not isinstance(payload_bytes_max, int) or payload_bytes_max < 1:
            raise InvalidValue("payload_bytes_max", payload_bytes_max, "must be a number of bytes, 1 or more")
        self.keyring = keyring
        self.env = env
        self.schema = schema
        self.prefix = prefix
        self.options = OPTIONS | frozenset(options)
        self.payload_bytes_max = payload_bytes_max
        self.audit = audit
        self.observer = None if observe is None else GuardedObserver(observe)
        self.status_url = _checked_status_url(status_url)
        self.fair = _checked_fair(fair)

    def status_url_of(self, id: UUID) -> str | None:
        """Where the request of this id can be watched, if the app said where."""
        return None if self.status_url is None else self.status_url.replace("{id}", str(id))

    @cached_property
    def tables(self) -> Tables:
        """The outbox's tables, in a MetaData of their own. Outboxes with the same schema and prefix share them."""
        return _tables_of(self.schema, self.prefix)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Configuration):
            return NotImplemented
        return self._settings() == other._settings()

    __hash__ = object.__hash__

    def _settings(self) -> tuple[object, ...]:
        return (
            self.keyring,
            self.env,
            self.schema,
            self.prefix,
            self.options,
            self.payload_bytes_max,
            self.audit,
            self.observer,
            self.status_url,
            self.fair,
        )


@lru_cache(maxsize=STATEMENTS_MAX)
def _tables_of(schema: str | None, prefix: str) -> Tables:
    """Defined once: statements are kept built for each set of tables, by us and by SQLAlchemy."""
    return define_tables(MetaData(), schema=schema, prefix=prefix)


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


def configuration_from_environment() -> Configuration:
    """Read OUTBOX_SECRET (`kid:base64,older:base64`, the current one first) and OUTBOX_ENV."""
    missing = [name for name in ("OUTBOX_SECRET", "OUTBOX_ENV") if not os.environ.get(name)]
    if missing:
        raise ConfigurationError(
            f"the outbox is not configured: call outbox.configure(keyring, env=...) at the app's start,"
            f" or set {' and '.join(missing)}"
        )
    return Configuration(Keyring.from_text(os.environ["OUTBOX_SECRET"]), env=os.environ["OUTBOX_ENV"])
