"""The instance whose methods are the module functions of `outbox`."""

from typing import Unpack

from outbox.configuration import Configuration, Settings, configuration_from_environment
from outbox.errors import ConfigurationError
from outbox.instance import Outbox
from outbox.keys import Keyring


class DefaultOutbox(Outbox):
    """The instance whose methods are the module functions. `configure` sets it up, or the environment does at its first use."""

    def __init__(self) -> None:
        self._configured: dict[str, Configuration] = {}

    @property
    def configuration(self) -> Configuration:
        """The settings of `outbox.configure`, else the environment's. Threads that first ask at the same time get one object."""
        return self._configured.get("") or self._configured.setdefault("", configuration_from_environment())

    def configure(self, keyring: Keyring, **settings: Unpack[Settings]) -> None:
        """Set up the module functions, once, at the app's start. A second call with the same settings does nothing.

        keyring: the secrets.
        settings: see `outbox.configuration.Settings`.
        Raises `ConfigurationError` for a second call with other settings, because a part of the app would then use other
        keys.
        """
        new = Configuration(keyring, **settings)
        if self._configured.setdefault("", new) != new:
            raise ConfigurationError(
                "outbox.configure was already called with other settings; for a second outbox, create an outbox.Outbox(...)"
            )


default = DefaultOutbox()
