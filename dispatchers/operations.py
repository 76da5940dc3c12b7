"""The app's own operations, registered without a live dispatcher: no import cycle, and a test can call them directly."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar

from dispatchers.delivery import NATIVE, Adapter, Delivery, KeyFormat, Window
from outbox.errors import ConfigurationError
from outbox.keys import check_operation

Send = TypeVar("Send", bound=Callable[[Delivery], Any])


class Operations:
    """Functions that send, each under its operation's name; `Dispatcher(include=[...])` takes them over.

    Raises `ConfigurationError` when a name is registered twice, `InvalidValue` for a malformed one.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return dict(self._adapters)

    def operation(
        self,
        name: str,
        *,
        window: Window = None,
        timeout: timedelta = timedelta(seconds=30),
        key_format: KeyFormat = NATIVE,
        at_least_once: bool = False,
        replays_errors: Literal["all", "2xx", "none"] = "none",
        attempts_max: int = 20,
        age_max: timedelta = timedelta(days=3),
        pinned: str = "",
    ) -> Callable[[Send], Send]:
        """Register the decorated function, async or sync, as the adapter of `name` and of names below it.

        The settings and their defaults are those of `Adapter`: without a `window` the service is taken to keep no keys,
        and an attempt whose fate is unknown leaves the entry `uncertain`. A sync function runs on a thread; after its
        timeout it goes on there, and its outcome counts as unknown.
        """
        check_operation(name)
        self._require_free(name)

        def register(function: Send) -> Send:
            self._require_free(name)
            adapter = FunctionAdapter(function)
            adapter.window = window
            adapter.timeout = timeout
            adapter.key_format = key_format
            adapter.at_least_once = at_least_once
            adapter.replays_errors = replays_errors
            adapter.attempts_max = attempts_max
            adapter.age_max = age_max
            adapter.pinned = pinned
            self._adapters[name] = adapter
            return function

        return register

    def _require_free(self, name: str) -> None:
        if name in self._adapters:
            raise ConfigurationError(f"operation {name!r} is registered twice")


class FunctionAdapter(Adapter):
    """One function as an adapter. send: the function itself, async or sync; a sync one is put on a thread."""

    send: Any = None

    def __init__(self, function: Callable[[Delivery], Any]) -> None:
        self.send = function
