"""The adapters of the library, one folder for each service. No adapter uses another one.

    from dispatchers.adapters import StripeAdapter

A service's SDK is imported when its adapter is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outbox.extras import missing

if TYPE_CHECKING:
    from dispatchers.adapters.email.adapter import SmtpAdapter
    from dispatchers.adapters.email.lookup import ImapSearch
    from dispatchers.adapters.http.adapter import HttpAdapter
    from dispatchers.adapters.memory import MemoryAdapter
    from dispatchers.adapters.stripe.adapter import StripeAdapter

__all__ = ["HttpAdapter", "ImapSearch", "MemoryAdapter", "SmtpAdapter", "StripeAdapter"]

_HOMES = {
    "HttpAdapter": "http.adapter",
    "ImapSearch": "email.lookup",
    "MemoryAdapter": "memory",
    "SmtpAdapter": "email.adapter",
    "StripeAdapter": "stripe.adapter",
}
"""In which module each adapter lives; where it needs an SDK, the extra that installs it has its folder's name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    try:
        module = import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {"dispatchers", "outbox"}:
            raise
        raise missing(name, home.partition(".")[0], error) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
