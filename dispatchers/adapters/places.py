"""The place to which an operation's entries go: a subject, topic, queue or routing key of a broker, or a workflow. No I/O."""

from collections.abc import Mapping

from dispatchers.delivery import Adapter, Delivery
from dispatchers.names import nearest
from outbox.errors import ConfigurationError

OPERATION = "{operation}"
"""What a template contains in the place of the operation's name."""

EVENT_ID = "event_id"
"""The header, field or attribute of a message that has the child key: where `outbox.inboxes` finds it."""


class Unsendable(Exception):
    """Why an entry can never be sent, as the reason of a `Rejected`."""


class Places:
    """The place of each operation's messages.

    setting: what the broker calls such a place: "subject". It is also the option with which an entry names its own place.
    given: a template for all operations, such as `shop.{operation}`; or the place of each operation that is served.
    Raises `ConfigurationError` for any other value.
    """

    def __init__(self, setting: str, given: str | Mapping[str, str]) -> None:
        self._setting = setting
        self._template = given if isinstance(given, str) else None
        self._by_operation = {} if isinstance(given, str) else dict(given)
        names = [given] if isinstance(given, str) else [*self._by_operation, *self._by_operation.values()]
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigurationError(
                f"{setting}={given!r} must be a text such as 'shop.{OPERATION}', or a mapping from operations to texts"
            )

    def serves(self, operation: str) -> bool:
        return self._template is not None or operation in self._by_operation

    def nearest(self, operation: str) -> str | None:
        return nearest(operation, self._by_operation)

    def of(self, delivery: Delivery) -> str:
        """The place of this entry's message. Raises `Unsendable` for an option that is not known or not a text."""
        if delivery.options:
            return self._chosen(delivery)
        return self._of_operation(delivery.operation)

    def _of_operation(self, operation: str) -> str:
        if self._template is not None:
            return self._template.replace(OPERATION, operation)
        return self._by_operation[operation]

    def _chosen(self, delivery: Delivery) -> str:
        unknown = sorted(delivery.options.keys() - {self._setting})
        if unknown:
            raise Unsendable(f"unknown options {unknown}: a message takes only {self._setting!r}")
        chosen = delivery.options[self._setting]
        if not isinstance(chosen, str) or not chosen:
            raise Unsendable(f"the option {self._setting!r} must be a text that is not empty")
        return chosen


class PlacesAdapter(Adapter):
    """Serves the operations that have a place."""

    _places: Places

    def serves(self, operation: str) -> bool:
        return self._places.serves(operation)

    def nearest(self, operation: str) -> str | None:
        return self._places.nearest(operation)
