"""The app's own operations. Registering them needs no live dispatcher: there is no import cycle, and tests can call them."""

import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from datetime import timedelta
from functools import wraps
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload

from dispatchers.callbacks import Callback, Function, Kind, OnCompleted, Settlement
from dispatchers.delivery import (
    NATIVE,
    Adapter,
    Deferred,
    Delivered,
    Delivery,
    Finding,
    InProgress,
    KeyConflict,
    KeyFormat,
    Outcome,
    Rejected,
    Unknown,
)
from dispatchers.periodic.declaration import declare
from dispatchers.periodic.schedules import CatchUp, Schedule, TickFunction, Trigger
from dispatchers.threads import SEND_THREAD, as_async
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy, Window
from dispatchers.typed_functions import typed_callback, typed_function
from outbox.effects.effect import Effect
from outbox.errors import ConfigurationError
from outbox.keys import check_operation

Send = TypeVar("Send", bound=Callable[[Delivery], Outcome | Awaitable[Outcome]])
AnyCallback = TypeVar("AnyCallback", bound=Callback)
AnyCompletion = TypeVar("AnyCompletion", bound=OnCompleted)
AnyTickFunction = TypeVar("AnyTickFunction", bound=TickFunction)
Registered = TypeVar("Registered", bound=Function)
Payload = TypeVar("Payload")
Result = TypeVar("Result")
TypedOutcome: TypeAlias = Delivered[Result] | Rejected | KeyConflict | Deferred | InProgress | Unknown
AnySession = TypeVar("AnySession")
Answer = TypeVar("Answer")

AFTER_SENDING = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError, TimeoutError, ExceptionGroup)
"""After these of Python's exceptions the service may have got the request."""

AFTER_SENDING_OF = {
    "aiohttp": ("ClientOSError", "ServerDisconnectedError", "ServerTimeoutError", "ClientPayloadError"),
    "httpx": ("ReadError", "WriteError", "RemoteProtocolError", "ReadTimeout", "WriteTimeout"),
    "smtplib": ("SMTPServerDisconnected",),
    "requests": ("exceptions.ConnectionError", "exceptions.ReadTimeout", "exceptions.ChunkedEncodingError"),
    "urllib3": ("exceptions.ProtocolError", "exceptions.ReadTimeoutError", "exceptions.MaxRetryError"),
    "botocore": ("exceptions.ConnectionClosedError", "exceptions.ReadTimeoutError", "exceptions.HTTPClientError"),
}
"""Exceptions of the usual clients with this meaning: `requests.ConnectionError` is a refused connection or a reset one."""


class Handles(Protocol[Payload, Result]):
    """The decorator of a typed effect's function, async or sync: it gets the payload, and returns the result, of the effect."""

    @overload
    def __call__(
        self, function: Callable[[Delivery[Payload]], Coroutine[Any, Any, TypedOutcome[Result]]], /
    ) -> Callable[[Delivery[Payload]], Coroutine[Any, Any, TypedOutcome[Result]]]: ...
    @overload
    def __call__(
        self, function: Callable[[Delivery[Payload]], TypedOutcome[Result]], /
    ) -> Callable[[Delivery[Payload]], TypedOutcome[Result]]: ...


class Operations:
    """Functions that send, each under the name of its operation. Pass them as `Dispatcher(include=[...])`.

    Raises `ConfigurationError` if a name is registered twice, or if what is registered is not a function. Raises
    `InvalidValue` for a malformed name.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}
        self._callbacks: dict[tuple[Kind, str], Function] = {}
        self._schedules: dict[str, Schedule] = {}

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return dict(self._adapters)

    @property
    def callbacks(self) -> Mapping[tuple[Kind, str], Function]:
        return dict(self._callbacks)

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        return dict(self._schedules)

    def operation(
        self,
        name: str,
        *,
        window: Window = None,
        timeout: timedelta = timedelta(seconds=30),
        key_format: KeyFormat = NATIVE,
        at_least_once: bool = False,
        replays_errors: Literal["all", "2xx", "none"] = "none",
        retry: RetryPolicy = DEFAULT_RETRY,
        failure_blocks_group: bool = True,
        failure_fields: tuple[str, ...] = (),
        pinned: str = "",
        deferred_on: tuple[type[Exception], ...] = (),
        find: Callable[[Delivery], Finding | Awaitable[Finding]] | None = None,
        search: str | None = None,
    ) -> Callable[[Send], Send]:
        """Register the decorated function, async or sync, as the adapter of the operation `name` and of operations below it.

        The settings and their defaults are those of `Adapter`. Without a `window`, the service keeps no keys: if the outcome
        of an attempt is unknown, the entry becomes `uncertain`. A sync function runs on a thread. After its timeout it
        continues there, and its outcome counts as unknown.

        deferred_on: exceptions after which nothing was sent, such as `ConnectionRefusedError` or `httpx.ConnectError`. They mean
            `Deferred`: the dispatcher sends again. After every other exception the outcome is unknown. Raises
            `ConfigurationError` for a class that covers a lost connection or a timeout, such as `OSError` or
            `requests.ConnectionError`.
        """
        register: Callable[[Send], Send] = self._operation(
            name,
            None,
            deferred_on,
            window=window,
            timeout=timeout,
            key_format=key_format,
            at_least_once=at_least_once,
            replays_errors=replays_errors,
            retry=retry,
            failure_blocks_group=failure_blocks_group,
            failure_fields=failure_fields,
            pinned=pinned,
            find=find,
            search=search,
        )
        return register

    def handles(
        self,
        effect: Effect[Payload, Result],
        *,
        window: Window = None,
        timeout: timedelta = timedelta(seconds=30),
        key_format: KeyFormat = NATIVE,
        at_least_once: bool = False,
        replays_errors: Literal["all", "2xx", "none"] = "none",
        retry: RetryPolicy = DEFAULT_RETRY,
        failure_blocks_group: bool = True,
        failure_fields: tuple[str, ...] = (),
        pinned: str = "",
        deferred_on: tuple[type[Exception], ...] = (),
        find: Callable[[Delivery[Payload]], Finding | Awaitable[Finding]] | None = None,
        search: str | None = None,
    ) -> Handles[Payload, Result]:
        """Register the decorated function, async or sync, as the adapter of a typed effect, and of no operation below its name.

        The function gets a `Delivery` whose `payload` is an object of the effect's type, and so does `find`. The result in
        `Delivered` is an object of the effect's result type; if it does not fit, this is logged, and the entry is delivered
        without it. An entry whose payload this process cannot read waits for a process that can; it is neither sent nor failed.

        The settings are those of `operation`.
        """
        if not isinstance(effect, Effect):
            raise ConfigurationError(
                f"handles takes an outbox.Effect, not {effect!r}; a name belongs into operation(...)"
            )
        register: Handles[Payload, Result] = self._operation(
            effect.name,
            effect,
            deferred_on,
            window=window,
            timeout=timeout,
            key_format=key_format,
            at_least_once=at_least_once,
            replays_errors=replays_errors,
            retry=retry,
            failure_blocks_group=failure_blocks_group,
            failure_fields=failure_fields,
            pinned=pinned,
            find=find,
            search=search,
        )
        return register

    def _operation(
        self, name: str, effect: Effect[Any, Any] | None, deferred_on: tuple[type[Exception], ...], **settings: Any
    ) -> Any:
        """The decorator. settings: attributes of the adapter."""
        check_operation(name)
        self._require_free(name)
        _require_unsent(name, deferred_on)

        def register(function: Callable[[Delivery[Any]], Any]) -> Callable[[Delivery[Any]], Any]:
            self._require_free(name)
            _require_function(f"operation({name!r})", function)
            adapter = FunctionAdapter(_deferring(function, deferred_on) if deferred_on else function, effect)
            for setting, value in settings.items():
                setattr(adapter, setting, value)
            if effect is not None:
                adapter.send = typed_function(effect, adapter.send)
                adapter.find = adapter.find and typed_function(effect, adapter.find)
            self._adapters[name] = adapter
            return function

        return register

    @overload
    def on_settled(
        self, name: Effect[Payload, Result]
    ) -> Callable[
        [Callable[[AnySession, Settlement[Payload, Result]], Answer]],
        Callable[[AnySession, Settlement[Payload, Result]], Answer],
    ]: ...
    @overload
    def on_settled(self, name: str) -> Callable[[AnyCallback], AnyCallback]: ...
    def on_settled(self, name: Any) -> Any:
        """Register `function(session, settlement)`. It runs when an entry of `name`, or of an operation below it, has ended.

        It runs in the transaction that settles the entry as delivered, failed or cancelled. What it writes and enqueues
        commits together with the settlement, once. What it enqueues without `parent=` has the same parent as the entry. It is
        sync or async; an async function needs a dispatcher on an AsyncEngine. It must not commit, roll back, or call outside
        services. If it raises, the outcome is stored, the entry is not sent again, and the dispatcher calls the function
        again with backoff. `outbox.cancel` does not call it.

        name: the operation; or an `outbox.Effect`, for a settlement with a typed payload and a typed result.
        """
        return self._callback("on_settled", name)

    @overload
    def on_uncertain(
        self, name: Effect[Payload, Result]
    ) -> Callable[
        [Callable[[AnySession, Settlement[Payload, Result]], Answer]],
        Callable[[AnySession, Settlement[Payload, Result]], Answer],
    ]: ...
    @overload
    def on_uncertain(self, name: str) -> Callable[[AnyCallback], AnyCallback]: ...
    def on_uncertain(self, name: Any) -> Any:
        """Register `function(session, settlement)` for entries that become uncertain. `on_settled` follows when the entry is
        resolved.
        """
        return self._callback("on_uncertain", name)

    def on_completed(self, name: str) -> Callable[[AnyCompletion], AnyCompletion]:
        """Register `function(session, completed)`. It runs when every entry of a request that was accepted under `name` has
        ended.

        It calls `completed.respond(...)`, which gives the request its final response. It runs in the transaction that settles
        the last entry, after that entry's own callback. If it raises, the dispatcher calls it again with backoff, as with
        `on_settled`. What it enqueues does not keep the request open.
        """
        check_operation(name, "completion")
        return self._registering("on_completed", name)

    def periodic(
        self,
        trigger: str | Trigger,
        *,
        name: str | None = None,
        timezone: str | None = None,
        jitter: timedelta = timedelta(0),
        catch_up: CatchUp = "latest",
    ) -> Callable[[AnyTickFunction], AnyTickFunction]:
        """Register `function(session, tick)`, which enqueues what is due at an instant of the schedule. Needs the extra
        `dispatcher`.

        Every dispatcher with the schedule searches for due instants, and each instant is enqueued once: the function runs in the
        transaction that records its instant. What it enqueues without `parent=` has the schedule and the instant as its parent.
        It is sync or async; an async function needs a dispatcher on an AsyncEngine. It must not commit, roll back, or call
        outside services. If it raises, nothing is recorded, and it is called again with backoff.

        trigger: a crontab expression of five fields, a macro such as `@daily`, or a trigger of APScheduler 3: a CronTrigger, an
            IntervalTrigger with a start_date, a DateTrigger. The instants are whole seconds, and equal in each process.
        name: by default the function's name. It is in the keys of what is enqueued: a schedule that is renamed is a new one.
        timezone: of a crontab expression, such as `Europe/Berlin`; by default UTC.
        jitter: enqueue each instant later by up to this, by the same time in each process; less than between two instants.
        catch_up: which instants that were missed in a downtime are enqueued: the `latest` one, `all` (the latest 100), or `none`
            that is more than a minute late. The others are logged.

        Raises `ConfigurationError`, and `InvalidValue` for a malformed name.
        """

        def register(function: AnyTickFunction) -> AnyTickFunction:
            _require_function(f"periodic({trigger!r})", function)
            schedule = declare(trigger, function, name=name, timezone=timezone, jitter=jitter, catch_up=catch_up)
            if schedule.name in self._schedules:
                raise ConfigurationError(
                    f"the schedule {schedule.name!r} is registered twice: give one of them another name"
                )
            self._schedules[schedule.name] = schedule
            return function

        return register

    def _callback(self, kind: Kind, name: str | Effect[Any, Any]) -> Callable[[Registered], Registered]:
        if isinstance(name, Effect):
            return self._registering(kind, name.name, name)
        check_operation(name)
        return self._registering(kind, name)

    def _registering(
        self, kind: Kind, name: str, effect: Effect[Any, Any] | None = None
    ) -> Callable[[Registered], Registered]:
        def register(function: Registered) -> Registered:
            if (kind, name) in self._callbacks:
                raise ConfigurationError(f"{kind}({name!r}) is registered twice: register one callback")
            _require_function(f"{kind}({name!r})", function)
            self._callbacks[kind, name] = function if effect is None else typed_callback(effect, function)
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


def _require_unsent(name: str, deferred_on: object) -> None:
    if not isinstance(deferred_on, tuple) or not all(_is_exception(each) for each in deferred_on):
        raise ConfigurationError(
            f"operation({name!r}): deferred_on must be a tuple of exception classes, such as (ConnectionRefusedError,), not"
            f" {deferred_on!r}"
        )
    for each in deferred_on:
        if doubtful := [other.__name__ for other in _after_sending() if issubclass(other, each)]:
            raise ConfigurationError(
                f"operation({name!r}): deferred_on has {each.__name__}, which covers {doubtful[0]} too: after it the service may"
                " have executed the request. Name the exceptions that are raised before anything is sent:"
                " ConnectionRefusedError, socket.gaierror, httpx.ConnectError, requests.ConnectTimeout"
            )


def _after_sending() -> Iterator[type[BaseException]]:
    """The exceptions after which the service may have got the request. A client that is not imported raises none."""
    yield from AFTER_SENDING
    for package, names in AFTER_SENDING_OF.items():
        if package in sys.modules:
            yield from (attrgetter(name)(sys.modules[package]) for name in names)


def _is_exception(each: object) -> bool:
    return isinstance(each, type) and issubclass(each, Exception)


def _deferring(function: Callable[[Delivery], Any], exceptions: tuple[type[Exception], ...]) -> Callable[..., Any]:
    called = as_async(function, SEND_THREAD)

    @wraps(function)
    async def send(delivery: Delivery) -> Any:
        try:
            return await called(delivery)
        except exceptions as error:
            return Deferred(f"raised {type(error).__name__}, so nothing was sent")

    return send


class FunctionAdapter(Adapter):
    """One function as an adapter. send: the function itself, async or sync; a sync one is put on a thread.

    effect: the typed effect that it handles. It then serves this operation only.
    """

    send: Any = None

    def __init__(self, function: Callable[[Delivery], Any], effect: Effect[Any, Any] | None = None) -> None:
        self.send = function
        self.effect = effect

    def serves(self, operation: str) -> bool:
        return self.effect is None or operation == self.effect.name

    def nearest(self, operation: str) -> str | None:
        return None if self.effect is None else self.effect.name
