"""The adapters that come with the library, one service a file; none knows another.

    from dispatchers.adapters import StripeAdapter

A service's SDK is imported when its adapter is asked for, never before.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatchers.adapters.email import SmtpAdapter
    from dispatchers.adapters.email_looks import ImapSearch
    from dispatchers.adapters.http import HttpAdapter
    from dispatchers.adapters.memory import MemoryAdapter
    from dispatchers.adapters.stripe import StripeAdapter

__all__ = ["HttpAdapter", "ImapSearch", "MemoryAdapter", "SmtpAdapter", "StripeAdapter"]

_HOMES = {
    "HttpAdapter": "http",
    "ImapSearch": "email_looks",
    "MemoryAdapter": "memory",
    "SmtpAdapter": "email",
    "StripeAdapter": "stripe",
}
"""In which module each adapter lives; where it needs an SDK, the extra that installs it has the module's name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    try:
        module = import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {"dispatchers", "outbox"}:
            raise
        raise ImportError(
            f"{name} needs the package {error.name!r}: pip install 'sqlalchemy-outbox[{home}]'", name=error.name
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
