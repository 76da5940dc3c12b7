"""A profile: what one outside service guarantees about keys, and how its operations are called, as dated data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from dispatchers.adapters.http.meanings import MEANINGS, Meaning
from dispatchers.adapters.providers.auth import PLACEHOLDER, Auth
from dispatchers.adapters.providers.key_places import KeyPlace, NaturalKey, NoKey
from dispatchers.adapters.providers.operations import Operation, check_results, misplaced, problem_of
from dispatchers.adapters.providers.signals import Duplicate, Signal
from dispatchers.names import did_you_mean, nearest
from dispatchers.time_limits import FOREVER, Window
from outbox.errors import ConfigurationError, InvalidValue
from outbox.keys import OPERATION

if TYPE_CHECKING:
    from dispatchers.adapters.providers.adapter import ProviderAdapter

Stores: TypeAlias = Literal["all", "2xx", "success", "current_state", "duplicate_refused", "nothing"]
Compares: TypeAlias = Literal["parameters", "body", "nothing", "unknown"]
Scope: TypeAlias = Literal["account", "api_key", "region", "endpoint", "unknown"]
WindowFrom: TypeAlias = Literal["first_attempt", "first_finished"]

_CHOICES: Final = {"stores": Stores, "compares": Compares, "scope": Scope, "window_from": WindowFrom}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a service guarantees. Call it for its adapter: `resend(api_key=...)`.

    name: of the service, and usually the first segment of its operations. title: as the service writes itself.
    as_of: when the sources were read. sources: the pages and files that state the values.
    base_url: the beginning of every URL. A `{name}` in it is a setting of the adapter, as in `auth`, `headers` and paths.
    auth: the headers that authenticate. headers: constant ones, such as an API version.
    key: where the service takes the key.
    window: how long the service certainly remembers a key, at least. None if it publishes no time: then the user must give one.
    window_from: what the window counts from. The dispatcher counts from the first attempt, which is never later.
    stores: what the service gives back for a key: "all" answers; "2xx" or "success" only, so that an error is executed again;
        the "current_state" of what was made; "duplicate_refused": an error that names it; or "nothing".
    compares: what must be equal in a request with the same key. "nothing": a different request gets the first one's answer.
    scope: within what a key is known. With another API key, region or endpoint the service does not know it.
    in_flight: the answer while the first request executes. mismatch: the answer to a different request under this key.
    duplicate: the answer to a request that was executed, if it is an error. replay: what marks a repeated answer.
    operations: by name, without the service's: "emails.send".
    errors: what other answers mean if it differs from HTTP's table; the first that fits counts.
    result: the members of a success that are stored, such as ("id",). error: the members of an error that name it, such as its
        code, and are never the customer's.
    error_answer: an example of an error's JSON, with "{status}" where its status is a number. It is for the fake: the members
        that an answer of its own lacks are added, because the service's clients read them.
    notes: what a user must know, one sentence each.
    Raises `ConfigurationError` for values that do not fit together.
    """

    name: str
    title: str
    as_of: date
    sources: tuple[str, ...]
    base_url: str
    auth: Auth | tuple[Auth, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)
    key: KeyPlace
    window: Window = None
    window_from: WindowFrom = "first_attempt"
    stores: Stores
    compares: Compares = "unknown"
    scope: Scope = "unknown"
    in_flight: Signal | None = None
    mismatch: Signal | None = None
    duplicate: Duplicate | None = None
    replay: Signal | None = None
    operations: Mapping[str, Operation] = field(hash=False)
    errors: tuple[tuple[Signal, Meaning], ...] = ()
    result: tuple[str, ...] = ()
    error: tuple[str, ...] = ()
    error_answer: Any = field(default=None, hash=False)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_names()
        self._check_choices()
        for name, operation in self.operations.items():
            self._check_key(name, operation)
        check_results(self.name, (*self.result, *self.error))

    # --- what it says

    @property
    def auths(self) -> tuple[Auth, ...]:
        return (self.auth,) if isinstance(self.auth, Auth) else self.auth

    def settings(self, base_url: str | None = None) -> tuple[str, ...]:
        """The names of the settings that the adapter needs, in order. base_url: one that replaces the profile's."""
        texts = [*(auth.template for auth in self.auths), base_url or self.base_url, *self.headers.values()]
        return tuple(dict.fromkeys(name for text in texts for name in PLACEHOLDER.findall(text)))

    def place_of(self, operation: Operation) -> KeyPlace:
        """Where this operation's key goes."""
        return self.key if operation.key is None else operation.key

    def window_of(self, operation: Operation) -> Window:
        """How long a key of this operation is remembered; None if it has no key, or none is published."""
        match self.place_of(operation):
            case NoKey():
                return None
            case NaturalKey():
                return FOREVER
        return self.window if operation.window is None else operation.window

    # --- what an app asks of it

    def __call__(self, **settings: Any) -> "ProviderAdapter":
        """The adapter. See `ProviderAdapter` for the settings; the credentials have the names that `settings` lists."""
        adapter: type[ProviderAdapter] = import_module("dispatchers.adapters.providers.adapter").ProviderAdapter
        return adapter(self, **settings)

    def check(self, operation: str, payload: Any) -> None:
        """Raise `InvalidValue` for an operation that the service does not have, or a payload that could never be sent.

        operation: without the service's name.
        """
        found = self.operations.get(operation)
        if found is None:
            raise InvalidValue("operation", f"{self.name}.{operation}", self.unknown(operation))
        if (problem := problem_of(payload, found, self.place_of(found), self.ids_of(found))) is not None:
            raise InvalidValue("payload of", f"{self.name}.{operation}", problem)

    def unknown(self, operation: str) -> str:
        """The end of a sentence about an operation that the service does not have."""
        hint = did_you_mean(operation, self.operations)
        return f"{self.title} has no such operation in this release{hint or ': it has ' + ', '.join(self.operations)}"

    def nearest(self, operation: str) -> str | None:
        return nearest(operation, self.operations)

    def ids_of(self, operation: Operation) -> tuple[str, ...]:
        """The payload's members that belong in the path."""
        return tuple(name for name in operation.placeholders if name not in self.settings())

    # --- the checks

    def _check_names(self) -> None:
        if not OPERATION.fullmatch(self.name) or "." in self.name:
            raise ConfigurationError(f"profile {self.name!r}: the name must be one lower-case word, such as 'resend'")
        if not isinstance(self.as_of, date) or not self.sources:
            raise self._refused("needs `as_of`, a date, and `sources`: a value without a source is not written")
        if not self.operations:
            raise self._refused("needs operations, such as {'emails.send': Post('/emails')}")
        for name in self.operations:
            if not OPERATION.fullmatch(name):
                raise self._refused(
                    f"operation {name!r} must be lower-case words joined by dots, such as 'emails.send'"
                )
            if longer := [other for other in self.operations if other.startswith(f"{name}.")]:
                raise self._refused(f"operation {name!r} is the beginning of {longer[0]!r}: give it a verb of its own")

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise self._refused(f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(choices))}")
        for signal, meaning in self.errors:
            if not isinstance(signal, Signal) or meaning not in MEANINGS:
                raise self._refused(f"errors must be pairs of a Signal and one of {', '.join(sorted(MEANINGS))}")
        if (self.stores == "duplicate_refused") != (self.duplicate is not None):
            raise self._refused("`duplicate` goes with stores='duplicate_refused', and needs it")

    def _check_key(self, name: str, operation: Operation) -> None:
        place, window = self.place_of(operation), operation.window or self.window
        if (problem := misplaced(place, operation)) is not None:
            raise self._refused(f"{name!r} {problem}")
        match place:
            case NoKey() | NaturalKey():
                if isinstance(operation.window, timedelta) or (operation.key is None and self.window is not None):
                    raise self._refused(f"{name!r} has no key, so it has no window: leave it out")
                if operation.key is None and self.stores != "nothing":
                    raise self._refused(f"{name!r} has no key, so the service stores 'nothing', not {self.stores!r}")
            case _:
                if self.stores == "nothing":
                    raise self._refused(f"{name!r} has a key, so stores='nothing' cannot be true")
                if not (
                    window is None or window is FOREVER or (isinstance(window, timedelta) and window > timedelta(0))
                ):
                    raise self._refused(f"{name!r}: window={window!r} must be a positive timedelta, FOREVER or None")
                if (misfit := place.form.misfit()) is not None:
                    raise self._refused(f"{name!r}: no child key fits: {misfit}")

    def _refused(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"profile {self.name!r}: {problem}")
