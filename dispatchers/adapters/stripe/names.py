"""Checks names of Stripe at the start: operations of the SDK, API versions, API keys. So typing errors are found early."""

import logging
import re
from typing import Any, Final

from dispatchers.names import nearest
from outbox.errors import ConfigurationError

log = logging.getLogger("outbox.dispatcher")

API_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}(\.[a-z]+)?(;.*)?")
"""2024-06-20, 2025-03-31.basil, either with beta headers. Source: docs.stripe.com/api/versioning."""


OTHER_KEYS: Final = {
    "pk_": "a publishable key, for browsers, and Stripe refuses it for charges",
    "whsec_": "the secret of a webhook, which only checks Stripe's signatures",
    "ek_": "an ephemeral key, for mobile apps",
    "sk_org_": "an organization's key, which needs the header Stripe-Context, and this adapter does not send it",
}
"""Keys with which every send would fail. Source: docs.stripe.com/keys and docs.stripe.com/keys/organization-api-keys."""


def check_api_key(api_key: object) -> str:
    """Raise `ConfigurationError`, which does not show the key, unless it can be a secret or a restricted one."""
    if not isinstance(api_key, str) or not re.fullmatch(r"[\x21-\x7e]+", api_key):
        raise ConfigurationError("api_key must be Stripe's secret key as text, without spaces (it is not shown)")
    for prefix, kind in OTHER_KEYS.items():
        if api_key.startswith(prefix):
            raise ConfigurationError(
                f"api_key begins with {prefix}: that is {kind}; give the secret key (sk_...) or a restricted one (rk_...)"
                " (it is not shown)"
            )
    return api_key


def warn_of_api_version(api_version: str | None) -> None:
    if api_version is not None and not API_VERSION.fullmatch(api_version):
        log.warning(
            "StripeAdapter(api_version=%r) is not a Stripe API version such as 2024-06-20 or 2025-03-31.basil: Stripe"
            " will refuse every request",
            api_version,
        )


def nearest_operation(v1: Any, operation: str) -> str | None:
    """The SDK's operation, or the beginning of one, that is most like this; None without one. v1: the client's services."""
    first, *words = operation.split(".")
    found, service = [first], v1
    for word in words:
        names = {*_services_of(service), *_methods_of(service)}
        name = word if word in names else nearest(word, names)
        if name is None:
            return None
        found.append(name)
        service = getattr(service, name, None)
    return ".".join(found)


def _services_of(service: Any) -> list[str]:
    """The names of a service's sub-services, from its annotations: the objects are created only when they are used."""
    return [name for name in getattr(type(service), "__annotations__", {}) if not name.startswith("_")]


def _methods_of(service: Any) -> list[str]:
    return [name[: -len("_async")] for name in dir(service) if name.endswith("_async") and not name.startswith("_")]
