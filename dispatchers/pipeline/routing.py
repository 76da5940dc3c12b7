"""Finds the adapter of an operation, checks what each adapter declares before anything is sent, and logs what is not served."""

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from dispatchers.callbacks import Kind
from dispatchers.decide import is_repeatable
from dispatchers.delivery import UNTYPED, Adapter, Answered, CannotTell, Delivery, KeyFormat
from dispatchers.flow_control.state import service_of
from dispatchers.names import did_you_mean, prefixes
from dispatchers.store.queue.claim_request import Forms
from dispatchers.telemetry.errors import ErrorReports
from dispatchers.telemetry.log_ids import of_entry
from dispatchers.threads import SEND_THREAD, as_async, is_async
from dispatchers.time_limits import FOREVER, Memory, RetryPolicy
from dispatchers.transitions import ClaimedEntry
from outbox.configuration import EFFECT_VERSION
from outbox.effects.effect import Effect
from outbox.errors import ConfigurationError, InvalidPayload
from outbox.keys import check_operation

log = logging.getLogger("outbox.dispatcher")

UNSERVED_REPORT_SECONDS = 60.0
MAX_OPERATIONS = 1000  # the names come from rows, so their number needs a limit
MAX_UNREPORTED = 10_000


class Route:
    """An adapter as the dispatcher uses it, with what it declares as plain values."""

    __slots__ = (
        *(
            "adapter",
            "effect",
            "encode_key",
            "errors",
            "find",
            "form",
            "is_repeatable",
            "memory",
            "name",
            "send",
            "send_batch",
        ),
        "timeout_seconds",
    )

    def __init__(self, name: str, adapter: Adapter, lease: timedelta, margin: timedelta, errors: ErrorReports) -> None:
        self.name = name
        self.errors = errors
        self.adapter = adapter
        self.effect: Effect[Any, Any] | None = getattr(adapter, "effect", None)
        find = finder_of(adapter)
        self.form = f"{adapter.key_format} {adapter.pinned}".rstrip()
        self.memory = Memory(
            window=adapter.window,
            timeout=adapter.timeout,
            at_least_once=adapter.at_least_once,
            max_attempts=adapter.retry.max_attempts,
            max_age=adapter.retry.max_age,
            failure_blocks_group=adapter.failure_blocks_group,
            margin=margin,
            fencing_delay=lease + margin,  # after this delay a sender has noticed that its lease is lost
            can_look_up=find is not None,
            form=self.form,
        )
        self.is_repeatable = is_repeatable(self.memory)
        self.timeout_seconds = adapter.timeout.total_seconds()
        self.send = as_async(adapter.send, SEND_THREAD)
        self.send_batch = batch_sender_of(adapter)
        self.find = as_async(find or (lambda delivery: CannotTell("its adapter has no find")), SEND_THREAD)
        self.encode_key = adapter.key_format.encode

    def read_payload(self, entry: ClaimedEntry) -> Any:
        """The object for a typed effect's function; `UNTYPED` for all others. Raises `InvalidPayload` if it must wait."""
        if self.effect is not None:
            return self.effect.read(entry.payload, entry.options)
        if entry.options and (version := entry.options.get(EFFECT_VERSION)) is not None:
            problem = f"version {version} of a typed effect is stored, and what serves it here was not registered with `handles`"
            raise InvalidPayload(entry.operation, "payload", problem)
        return UNTYPED

    def sends_alike(self, entry: ClaimedEntry) -> bool:
        """Whether a send now has the same key, account and version as an earlier send of `entry` may have had."""
        if entry.sent_as in (None, self.form):
            return True
        key_format, _, pinned = entry.sent_as.partition(" ")
        if key_format != str(self.adapter.key_format):
            return False
        try:
            return self.adapter.sends_alike(pinned, entry.options)
        except Exception as error:  # the entry is claimed already, and other entries with it must still be sent
            log.exception(
                "the adapter of %r raised in sends_alike() for entry %s; the entry waits", self.name, entry.id
            )
            self.errors.report("adapter", error, entry)
            return False


class Routes:
    """The registered adapters; the longest dotted prefix of an operation's name wins."""

    def __init__(
        self,
        adapters: Mapping[str, Adapter],
        *,
        lease: timedelta,
        margin: timedelta,
        errors: ErrorReports | None = None,
    ) -> None:
        self._routes: dict[str, Route] = {}
        self._errors = errors or ErrorReports()
        for name, adapter in adapters.items():
            check_operation(name)
            check_adapter(name, adapter, lease=lease, margin=margin)
            self._routes[name] = Route(name, adapter, lease, margin, self._errors)
        self._found: dict[str, Route | None] = {}
        self.forms = Forms({name: route.form for name, route in self._routes.items()})
        self.windows = [route.memory.window for route in self._routes.values()]
        self.can_look_up = any(route.memory.can_look_up for route in self._routes.values())
        self.destinations = sorted({name.partition(".")[0] for name in self._routes})
        doubtful = {name.partition(".")[0] for name, route in self._routes.items() if not route.is_repeatable}
        self.repeatable = frozenset(self.destinations) - doubtful

    @property
    def all(self) -> Collection[Route]:
        return self._routes.values()

    def find(self, operation: str) -> Route | None:
        """The route of `operation`, or None if no adapter of this process serves it."""
        if operation not in self._found:
            if len(self._found) > 10_000:  # the names come from rows, so the memo needs a limit
                self._found.clear()
            self._found[operation] = self._longest_prefix(operation)
        return self._found[operation]

    def covers(self, name: str) -> bool:
        """Whether this process may serve `name` or an operation that begins with it."""
        if self.find(name) is not None or any(route.startswith(f"{name}.") for route in self._routes):
            return True
        return self._known_to(name) == name

    def suggestion(self, operation: str) -> str:
        """The end of a sentence with a name similar to an operation that this process does not serve; empty if there is none."""
        return did_you_mean(operation, self._routes, self._known_to(operation))

    def _known_to(self, operation: str) -> str | None:
        """The most similar name that the adapter of the operation's prefix knows."""
        route = self._registered(operation)
        try:
            return None if route is None else route.adapter.nearest(operation)
        except Exception:  # an adapter need not inherit from `Adapter`, and this is only a hint
            return None

    def may_look_up(self, operation: str, sent_as: str | None) -> bool:
        """Whether this process can look up an entry that was sent by a route of this form; None if it was not sent."""
        route = self.find(operation)
        return route is not None and route.memory.can_look_up and sent_as in (None, route.form)

    def closing(self) -> list[Callable[[], Awaitable[None]]]:
        """The `aclose` methods of the adapters that have one."""
        adapters = {id(route.adapter): route.adapter for route in self._routes.values()}
        return [close for adapter in adapters.values() if (close := getattr(adapter, "aclose", None)) is not None]

    def _longest_prefix(self, operation: str) -> Route | None:
        route = self._registered(operation)
        if route is None:
            return None
        try:
            return route if route.adapter.serves(operation) else None
        except Exception as error:  # the entry is claimed already, and other entries with it must still be sent
            log.exception("the adapter of %r raised in serves(%r); the entry waits", route.name, operation)
            self._errors.report("adapter", error)
            return None

    def _registered(self, operation: str) -> Route | None:
        return next((self._routes[name] for name in prefixes(operation) if name in self._routes), None)


@dataclass(slots=True)
class UnservedReport:
    """The last log line of an operation.

    reported_at: by the process's clock. unreported: the entries skipped since then, up to `MAX_UNREPORTED`.
    """

    reported_at: float = -math.inf
    unreported: set[UUID] = field(default_factory=set)


class UnservedLog:
    """Stores for each operation when it was last logged, and which entries were skipped since. clock: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reports: dict[str, UnservedReport] = {}

    def log_skipped(self, entry: ClaimedEntry, reason: str) -> None:
        """Log that the entry waits for `reason`, or count it for the next line of its operation."""
        if len(self._reports) >= MAX_OPERATIONS and entry.operation not in self._reports:
            self._reports.clear()
        report = self._reports.setdefault(entry.operation, UnservedReport())
        now = self._clock()
        if now - report.reported_at < UNSERVED_REPORT_SECONDS:
            if len(report.unreported) < MAX_UNREPORTED:
                report.unreported.add(entry.id)
            return
        others = len(report.unreported - {entry.id})
        addition = f"; {others} more entries of this operation wait too" if others else ""
        log.warning("entry %s (%s) waits: %s%s", entry.id, entry.operation, reason, addition, extra=of_entry(entry))
        report.reported_at = now
        report.unreported.clear()


def unmatched(routes: Routes, callbacks: Iterable[tuple[Kind, str]], limits: Iterable[str]) -> Iterator[str]:
    """A warning for each callback, and each limit, that matches no operation or destination of this dispatcher."""
    for kind, name in callbacks:
        if kind != "on_completed" and not routes.covers(name):
            yield (
                f"{kind}({name!r}) matches no operation that this dispatcher serves, so this dispatcher never calls it"
                f"{routes.suggestion(name) or '.'} It stays recorded until you run `outbox callbacks forget '{kind} {name}'`"
            )
    for name in limits:
        if name not in routes.destinations and service_of(name) not in routes.destinations:
            yield (
                f"limits={{{name!r}: ...}} matches no destination of the operations that this dispatcher serves: it applies only"
                f" to entries that are enqueued with destination={name!r}{did_you_mean(name, routes.destinations)}"
            )


def merge(*sources: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """All adapters in one dict. Raises `ConfigurationError` if a name is registered twice, or a source is no mapping."""
    merged: dict[str, Adapter] = {}
    for source in sources:
        if not isinstance(source, Mapping):
            raise ConfigurationError(
                "adapters must be a mapping from an operation's prefix to its adapter, such as {'stripe': StripeAdapter(...)},"
                f" not {type(source).__name__}"
            )
        for name, adapter in [each for given in source.items() for each in _with_parts(*given)]:
            if name in merged:
                raise ConfigurationError(f"operation {name!r} is registered twice: register one adapter")
            merged[name] = adapter
    if not merged:
        raise ConfigurationError(
            "a dispatcher needs an adapter: Dispatcher(..., adapters={'stripe': StripeAdapter(...)})"
        )
    return merged


def _with_parts(name: str, adapter: Adapter) -> Iterator[tuple[str, Adapter]]:
    """The adapter, and its `parts` below its name; an adapter need not inherit from `Adapter`."""
    yield name, adapter
    for below, part in (getattr(adapter, "parts", None) or {}).items():
        yield f"{name}.{below}", part


def check_adapter(name: str, adapter: Adapter, *, lease: timedelta, margin: timedelta) -> None:
    """Raise `ConfigurationError` for a declaration that breaks the guarantees."""

    def refuse(problem: str) -> ConfigurationError:
        return ConfigurationError(f"the adapter of {name!r} ({type(adapter).__name__}): {problem}")

    if isinstance(adapter, type):
        raise ConfigurationError(f"the adapter of {name!r} is the class {adapter.__name__}: give an instance of it")
    if not callable(getattr(adapter, "send", None)) or getattr(type(adapter), "send", None) is Adapter.send:
        raise refuse("has no send(delivery)")
    if not (adapter.window is None or adapter.window is FOREVER or isinstance(adapter.window, timedelta)):
        raise refuse(f"its window must be a timedelta, FOREVER or None, not {adapter.window!r}")
    if not isinstance(adapter.timeout, timedelta) or adapter.timeout <= timedelta(0):
        raise refuse(f"its timeout must be a positive timedelta, not {adapter.timeout!r}")
    if not isinstance(adapter.retry, RetryPolicy):
        raise refuse(f"its retry must be a RetryPolicy(max_attempts=..., max_age=...), not {adapter.retry!r}")
    for name_of in ("at_least_once", "failure_blocks_group"):  # the text "no" would count as true
        if not isinstance(getattr(adapter, name_of), bool):
            raise refuse(f"its {name_of} must be True or False, not {getattr(adapter, name_of)!r}")
    if not _are_names(failure_fields := getattr(adapter, "failure_fields", ())):
        raise refuse(f"its failure_fields must be a tuple of names, not {failure_fields!r}")
    if adapter.timeout + margin >= lease:
        raise refuse(
            f"its timeout {adapter.timeout} and the margin {margin} do not fit into the lease {lease}: a send could"
            " outlive its lease; shorten the timeout or give Dispatcher(lease=...)"
        )
    if isinstance(adapter.window, timedelta) and lease + adapter.timeout + margin >= adapter.window:
        raise refuse(
            f"its window {adapter.window} is not longer than lease, timeout and margin together"
            f" ({lease + adapter.timeout + margin}): the service may forget a key before a second attempt"
        )
    if (find := finder_of(adapter)) is not None and not callable(find):
        raise refuse(f"its find must be a function of the delivery, or None, not {find!r}")
    if (send_batch := batch_sender_of(adapter)) is not None and not is_async(send_batch):
        raise refuse("its send_batch must be an `async def` of the deliveries and a function, or None")
    if not isinstance(adapter.key_format, KeyFormat):
        raise refuse(f"its key_format must be a KeyFormat(encoding=...), not {adapter.key_format!r}")
    misfit = adapter.key_format.misfit()
    if misfit is not None:
        raise refuse(f"no child key fits its key format: {misfit}")
    if len(f"{adapter.key_format} {adapter.pinned}") > 255:
        raise refuse("`pinned` and the key format together are longer than 255 characters")


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, str) for each in value)


def finder_of(adapter: Adapter) -> Callable[[Delivery], Any] | None:
    """The adapter's `find`; None if it has none, because an adapter need not inherit from `Adapter`."""
    return getattr(adapter, "find", None)


def batch_sender_of(adapter: Adapter) -> Callable[[Sequence[Delivery], Answered], Any] | None:
    """The adapter's `send_batch`; None if it has none, or if a subclass or the object itself has replaced only `send`."""
    own = getattr(adapter, "__dict__", {})
    for names in (own, *map(vars, type(adapter).__mro__)):
        if "send_batch" in names:
            return getattr(adapter, "send_batch", None)
        if "send" in names:
            return None
    return None
