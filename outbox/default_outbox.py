"""The instance behind the module functions of `outbox`."""

from collections.abc import Collection
from datetime import timedelta

from outbox.configuration import AUDIT_WINDOW, PAYLOAD_BYTES_MAX, Configuration
from outbox.errors import ConfigurationError
from outbox.instance import Outbox
from outbox.keys import Keyring
from outbox.observer import Observer


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
        observe: Observer | None = None,
        status_url: str | None = None,
        fair: Collection[str] = (),
    ) -> None:
        """Set up the module functions, once, at the app's start. The same settings again do no harm.

        keyring: the secrets; env: the deployment's name, part of every key, so that staging and production differ.
        schema, prefix: where the tables are. options: more names for `enqueue(options=...)`.
        payload_bytes_max: of one entry's JSON. audit: how long a record stays readable.
        observe: told of every claim, an `outbox.ObservedClaim`, when its transaction has ended; it must not block.
        status_url: where an accepted request can be watched, with `{id}` in it: the Location of `claim.accept`.
        fair: destinations whose permits dispatchers share out over the scopes that wait there; see docs/flow-control.md.
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
            observe=observe,
            status_url=status_url,
            fair=fair,
        )
        if self._configuration is not None and self._configuration != new:
            raise ConfigurationError(
                "outbox.configure was called before with other settings; a second outbox is an outbox.Outbox(...)"
            )
        if self._configuration is None:
            self._configuration = new


default = DefaultOutbox()
