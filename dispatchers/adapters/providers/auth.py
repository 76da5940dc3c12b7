"""How an adapter authenticates itself at a service: headers made of its settings, such as an API key."""

import base64
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from outbox.errors import ConfigurationError

Setting: TypeAlias = str | Callable[[], str]
"""A setting of an adapter. A function is called at each send, for a credential that expires; it must not block."""

PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Auth:
    """One header. template: its value, with `{setting}` in it. encoded: whether the value is Basic's base64."""

    header: str
    template: str
    encoded: bool = False

    @property
    def settings(self) -> list[str]:
        return PLACEHOLDER.findall(self.template)

    def expires(self, settings: Mapping[str, Setting]) -> bool:
        return any(callable(settings[name]) for name in self.settings)

    def value(self, settings: Mapping[str, Setting]) -> str:
        text = filled(self.template, settings)
        return f"Basic {base64.b64encode(text.encode()).decode()}" if self.encoded else text


def filled(template: str, settings: Mapping[str, Setting]) -> str:
    """The template with the settings that are given; other placeholders stay."""

    def value(match: re.Match[str]) -> str:
        given = settings.get(match[1], match[0])
        text = given() if callable(given) else given
        if not text:
            raise ValueError(f"the function of {match[1]!r} returned no text")
        return text

    return PLACEHOLDER.sub(value, template)


def check_settings(title: str, needed: Sequence[str], given: Mapping[str, object], secret: Collection[str]) -> None:
    """Raise `ConfigurationError` for a setting that is missing, unknown or no text. No value is shown.

    secret: the names of credentials, which may be functions.
    """
    if missing := [name for name in needed if not given.get(name)]:
        raise ConfigurationError(f"{title} needs {', '.join(f'{name}=...' for name in missing)}")
    if unknown := sorted(given.keys() - set(needed)):
        names = ", ".join(needed) or "none of its own"
        raise ConfigurationError(f"{title} has no setting {unknown[0]!r}; its settings are {names}")
    for name, value in given.items():
        if not isinstance(value, str) and not (name in secret and callable(value)):
            also = ", or a function that returns one" if name in secret else ""
            raise ConfigurationError(f"{title}: {name} must be a text{also} (it is not shown)")


def bearer(setting: str = "api_key") -> Auth:
    """`Authorization: Bearer <setting>`."""
    return Auth("Authorization", f"Bearer {{{setting}}}")


def basic(user: str, password: str = "") -> Auth:
    """`Authorization: Basic`, of two texts with settings in them: `basic("{account_sid}", "{auth_token}")`."""
    return Auth("Authorization", f"{user}:{password}", encoded=True)


def in_header(header: str, setting: str = "api_key") -> Auth:
    """The setting itself as a header's value: `in_header("X-API-Key")`."""
    return Auth(header, f"{{{setting}}}")
