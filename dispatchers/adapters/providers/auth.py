"""How an adapter authenticates itself at a service: headers made of its settings, such as an API key."""

import base64
import re
from dataclasses import dataclass
from typing import Final

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

    def value(self, settings: dict[str, str]) -> str:
        text = self.template.format_map(settings)
        return f"Basic {base64.b64encode(text.encode()).decode()}" if self.encoded else text


def bearer(setting: str = "api_key") -> Auth:
    """`Authorization: Bearer <setting>`."""
    return Auth("Authorization", f"Bearer {{{setting}}}")


def basic(user: str, password: str = "") -> Auth:
    """`Authorization: Basic`, of two texts with settings in them: `basic("{account_sid}", "{auth_token}")`."""
    return Auth("Authorization", f"{user}:{password}", encoded=True)


def in_header(header: str, setting: str = "api_key") -> Auth:
    """The setting itself as a header's value: `in_header("X-API-Key")`."""
    return Auth(header, f"{{{setting}}}")
