"""The outside services that an app declares, so that an enqueue refuses what they could never be sent."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from outbox.errors import ConfigurationError, InvalidValue
from outbox.keys import check_operation


class Service(Protocol):
    """What `outbox.configure(services={"resend": resend})` takes: a profile of `dispatchers.adapters.providers`, or the like."""

    def check(self, operation: str, payload: Any) -> None:
        """Raise `InvalidValue` for what could never be sent. operation: without the name of the service."""
        ...


Services: TypeAlias = tuple[tuple[str, Service], ...]
"""The declared services by the beginning of their operations, `resend.`; the longest first."""


def checked_services(services: Mapping[str, Service]) -> Services:
    """Raises `ConfigurationError` and `InvalidValue` for what is no mapping from names to services."""
    if not isinstance(services, Mapping):
        raise ConfigurationError(
            f"services must be a mapping such as {{'resend': resend}}, not {type(services).__name__}"
        )
    for name, service in services.items():
        check_operation(name)
        if not callable(getattr(service, "check", None)):
            raise ConfigurationError(f"services: {name!r} must have check(operation, payload), as a profile has")
    return tuple((f"{name}.", services[name]) for name in sorted(services, key=len, reverse=True))


def check_declared(services: Services, operation: str, payload: Any) -> None:
    """Ask the operation's service, if it is declared. Raises `InvalidValue`."""
    for prefix, service in services:
        if operation.startswith(prefix):
            return service.check(operation.removeprefix(prefix), payload)
        if f"{operation}." == prefix:
            raise InvalidValue("operation", operation, f"must name an operation of the service: {prefix}...")
    return None
