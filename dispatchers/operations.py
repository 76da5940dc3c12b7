"""The app's own operations, registered without a live dispatcher: no import cycle, and a test can call them directly."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar

from dispatchers.callbacks import Callback, Function, Kind, OnCompleted
from dispatchers.delivery import NATIVE, Adapter, Delivery, KeyFormat, Window
from outbox.errors import ConfigurationError
from outbox.keys import check_operation

Send = TypeVar("Send", bound=Callable[[Delivery], Any])
AnyCallback = TypeVar("AnyCallback", bound=Callback)
AnyCompletion = TypeVar("AnyCompletion", bound=OnCompleted)
Registered = TypeVar("Registered", bound=Function)


class Operations:
    """Functions that send, each under its operation's name; `Dispatcher(include=[...])` takes them over.

    Raises `ConfigurationError` when a name is registered twice or what is registered is no function, `InvalidValue` for a
    malformed name.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}
        self._callbacks: dict[tuple[Kind, str], Function] = {}

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return dict(self._adapters)

    @property
    def callbacks(self) -> Mapping[tuple[Kind, str], Function]:
        return dict(self._callbacks)

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
        failure_blocks_group: bool = True,
        pinned: str = "",
        find: Callable[[Delivery], Any] | None = None,
    ) -> Callable[[Send], Send]:
        """Register the decorated function, async or sync, as the adapter of `name` and of names below it.

        The settings and their defaults are those of `Adapter`: without a `window` the service is taken to keep no keys,
        and an attempt whose fate is unknown leaves the entry `uncertain`. A sync function runs on a thread; after its
        timeout it continues there, and its outcome counts as unknown.
        """
        check_operation(name)
        self._require_free(name)

        def register(function: Send) -> Send:
            self._require_free(name)
            _require_function(f"operation({name!r})", function)
            adapter = FunctionAdapter(function)
            adapter.window = window
            adapter.timeout = timeout
            adapter.key_format = key_format
            adapter.at_least_once = at_least_once
            adapter.replays_errors = replays_errors
            adapter.attempts_max = attempts_max
            adapter.age_max = age_max
            adapter.failure_blocks_group = failure_blocks_group
            adapter.pinned = pinned
            adapter.find = find
            self._adapters[name] = adapter
            return function

        return register

    def on_settled(self, name: str) -> Callable[[AnyCallback], AnyCallback]:
        """Register `function(session, settlement)` to run when an entry of `name`, or of an operation below it, ends.

        Sync or async (then the dispatcher needs an AsyncEngine), it runs in the transaction that settles the entry as delivered,
        failed or cancelled: what it writes and enqueues commits with that, once. What it enqueues without `parent=` derives
        from the same parent. It must not commit or roll back, and not call outside services. If it raises, the outcome is
        stored, the entry is not sent again, and the callback is tried again with backoff. `outbox.cancel` settles
        without it.
        """
        check_operation(name)
        return self._callback("on_settled", name)

    def on_uncertain(self, name: str) -> Callable[[AnyCallback], AnyCallback]:
        """Register `function(session, settlement)` for entries that become uncertain; `on_settled` follows when resolved."""
        check_operation(name)
        return self._callback("on_uncertain", name)

    def on_completed(self, name: str) -> Callable[[AnyCompletion], AnyCompletion]:
        """Register `function(session, completed)` to run when every entry of a request accepted under `name` has ended.

        It calls `completed.respond(...)`, the request's final response, in the transaction that settles the last entry, after
        that entry's own callback. As with `on_settled`, if it raises, all of that is retried with backoff. What it enqueues
        does not keep the request open.
        """
        check_operation(name, "completion")
        return self._callback("on_completed", name)

    def _callback(self, kind: Kind, name: str) -> Callable[[Registered], Registered]:
        def register(function: Registered) -> Registered:
            if (kind, name) in self._callbacks:
                raise ConfigurationError(f"{kind}({name!r}) is registered twice: which callback is meant?")
            _require_function(f"{kind}({name!r})", function)
            self._callbacks[kind, name] = function
            return function

        return register

    def _require_free(self, name: str) -> None:
        if name in self._adapters:
            raise ConfigurationError(f"operation {name!r} is registered twice")


def _require_function(decorator: str, function: object) -> None:
    if not callable(function):
        raise ConfigurationError(
            f"{decorator} registers a function, async or sync, not {function!r}: write it as a decorator above a def"
        )


class FunctionAdapter(Adapter):
    """One function as an adapter. send: the function itself, async or sync; a sync one is put on a thread."""

    send: Any = None

    def __init__(self, function: Callable[[Delivery], Any]) -> None:
        self.send = function
