"""The adapter that serves any profile: it makes the service's requests, and reads the service's answers, over HTTP."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlencode

import httpx

from dispatchers.adapters.credentials import credentials_of
from dispatchers.adapters.http.adapter import HttpAdapter
from dispatchers.adapters.http.request import JSON, Malformed
from dispatchers.adapters.http_client.request_writer import Outgoing
from dispatchers.adapters.http_client.transport import HEADER_VALUE, Answer
from dispatchers.adapters.providers.answers import is_repeated, outcome_by
from dispatchers.adapters.providers.auth import PLACEHOLDER, Setting, check_settings, filled
from dispatchers.adapters.providers.json_paths import Blocked, put
from dispatchers.adapters.providers.key_places import (
    BodyField,
    GraphQLArgument,
    Header,
    KeyPlace,
    NaturalKey,
    NoKey,
    QueryField,
    where,
    with_key,
)
from dispatchers.adapters.providers.operations import Operation, path_of, problem_of
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.trust import Tls
from dispatchers.delivery import NATIVE, Adapter, Deferred, Delivery, InProgress, KeyFormat, Outcome, Unknown, digest
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy, Window
from outbox.errors import ConfigurationError

CONTENT_TYPES: Final = {"json": "application/json", "form": "application/x-www-form-urlencoded"}
DATED: Final = ("key", "window", "window_from", "stores", "compares", "scope", "in_flight", "mismatch", "duplicate")
"""The fields of a profile that state what the service guarantees."""

log = logging.getLogger("outbox.dispatcher")


class NoCredential(Exception):
    """The function of a credential raised an exception, so nothing can be sent now."""


class ProviderAdapter(HttpAdapter):
    """Serves the operations of a profile. After the first segment, an entry's operation is the profile's name for it.

    profile: what the service guarantees.
    settings: the credentials and names that the profile needs, as texts: `api_key=...`. For a token that expires, give a
        function that returns the present one. It is called at each send, and must not block.
    window: how long the service certainly remembers a key. By default the profile's; you must give it if none is published.
    base_url: of a sandbox, another region, or an imitation; by default the profile's.
    at_least_once: for a service without keys: True sends again after an unknown outcome, so the effect may happen twice.
    pinned: what else must not change between two attempts, such as the name of the account. Needed for an API key that a
        function returns, where the service may know a key to one API key only.
    timeout, retry, failure_blocks_group: as in `Adapter`. proxy, tls, reuse, transport, find: as in `HttpAdapter`. No profile
        has a status lookup of its own: none of the services states when its search shows everything. A lookup is sent without
        a credential that is a function.

    The payload is the service's own JSON. `parts` has the adapters of the operations whose window or key differs.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        window: Window = None,
        base_url: str | None = None,
        at_least_once: bool = False,
        pinned: str = "",
        timeout: timedelta = Adapter.timeout,
        retry: RetryPolicy = DEFAULT_RETRY,
        failure_blocks_group: bool = True,
        proxy: str | None = None,
        tls: Tls = None,
        reuse: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
        find: Callable[[Delivery, Any], Any] | None = None,
        **settings: Setting,
    ) -> None:
        self.profile = profile if window is None else replace(profile, window=window)
        secret = {name for auth in profile.auths for name in auth.settings}
        check_settings(profile.title, profile.settings(base_url), settings, secret)
        self._expiring = [auth for auth in profile.auths if auth.expires(settings)]
        self._settings = settings
        if self._expiring and not pinned and _is_bound_to_api_key(self.profile):
            raise ConfigurationError(
                f"{profile.title} may know a key to one API key only, and a function may return another: give pinned='...',"
                " the name of the account to which every credential that it returns belongs"
            )
        credentials = {auth.header: auth.value(settings) for auth in profile.auths if auth not in self._expiring}
        self._constant = {**{name: filled(value, settings) for name, value in profile.headers.items()}, **credentials}
        self._last_present: dict[str, str] = {}
        place = self.profile.key
        super().__init__(
            base_url=filled(base_url or profile.base_url, settings),
            headers=self._constant,
            key_header=None,
            timeout=timeout,
            at_least_once=at_least_once,
            retry=retry,
            proxy=proxy,
            tls=tls,
            reuse=reuse,
            transport=transport,
            find=find,
        )
        self.failure_blocks_group = failure_blocks_group
        self.failure_fields = ("status", *profile.error)
        self._scope = _scope_of(profile, self._service.base_url, credentials, settings, pinned)
        self._paths = {name: filled(each.path, settings) for name, each in profile.operations.items()}
        self.as_of = profile.as_of
        self._declare(place, _form(place), self.profile.window)
        self.parts = self._parts()
        self._log()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.profile.name!r}, window={self.window!r})"

    def serves(self, operation: str) -> bool:
        return operation.partition(".")[2] in self.profile.operations

    def nearest(self, operation: str) -> str | None:
        prefix, _, name = operation.partition(".")
        found = self.profile.nearest(name)
        return None if found is None else f"{prefix}.{found}"

    # --- its declaration

    def _declare(self, place: KeyPlace, form: KeyFormat, window: Window) -> None:
        self.key_format = form
        self.search = place.search if isinstance(place, NoKey) else None
        self.window = window
        is_bound = window is not None or self.find is not None
        self.pinned = " ".join(filter(None, [self.profile.name, *([self._scope, where(place)] if is_bound else [])]))
        self.replays_errors = "all" if self.profile.stores == "all" else "2xx"

    def _parts(self) -> Mapping[str, Adapter]:
        """An adapter for each operation that differs. They share the connections."""
        parts = {}
        for name, operation in self.profile.operations.items():
            place, window = self.profile.place_of(operation), self._window_of(name, operation)
            form = _form(place)
            if self.profile.compares == "nothing" and not isinstance(place, NoKey | NaturalKey):
                form = replace(form, route=f"{operation.method} {operation.path}")
            if (place, form, window) != (self.profile.key, self.key_format, self.window):
                part = copy.copy(self)
                part._declare(place, form, window)
                parts[name] = part
        return parts

    def _window_of(self, name: str, operation: Operation) -> Window:
        window = self.profile.window_of(operation)
        if window is None and not isinstance(self.profile.place_of(operation), NoKey):
            raise ConfigurationError(
                f"{self.profile.title} does not publish how long it remembers a key of {name!r}: give"
                f" window=timedelta(...), a time for which you have its word or your own tests"
            )
        return window

    def _log(self) -> None:
        """What a user must know at the start: operations without keys, and values that are not this release's."""
        profile, title = self.profile, self.profile.title
        keyless = [name for name, each in profile.operations.items() if isinstance(profile.place_of(each), NoKey)]
        if keyless:
            follows = "may happen twice" if self.at_least_once else "becomes uncertain, and is not sent again"
            log.info("%s keeps no keys for %s: an entry in doubt %s", title, ", ".join(keyless), follows)
        released = import_module("dispatchers.adapters.providers").PROVIDERS.get(profile.name, profile)
        for name in DATED:
            given, usual = getattr(profile, name), getattr(released, name)
            if given != usual:
                log.info("%s: %s=%s, not %s as of %s", title, name, given, usual, released.as_of)

    # --- a send

    async def send(self, delivery: Delivery) -> Outcome:
        try:
            outcome = await super().send(delivery)
        except NoCredential as error:
            return Deferred(str(error), cooldown=True)
        return self._paused(outcome, delivery) if isinstance(outcome, Unknown | InProgress) else outcome

    def _paused(self, outcome: Unknown | InProgress, delivery: Delivery) -> Outcome:
        """The outcome, with the pause that the service asks for before the next attempt."""
        pause = self.profile.operations[delivery.operation.partition(".")[2]].pause
        return outcome if pause is None else replace(outcome, after=max(pause, outcome.after or pause))

    def _request(self, delivery: Delivery) -> Outgoing:
        name = delivery.operation.partition(".")[2]
        if delivery.options:
            raise Malformed(f"an entry of {self.profile.title} takes no options")
        operation = self.profile.operations[name]
        place = self.profile.place_of(operation)
        path, content = self._paths[name], delivery.payload_json
        if operation.content == "form" or _is_in_body(place) or "{" in path:
            path, content = self._written(delivery, operation, place, path)
        elif content[:1] != (b"{" if operation.payload == "object" else b"["):
            raise Malformed(
                f"the payload of {name} must be {'an object' if operation.payload == 'object' else 'a list'}"
            )
        return self._service.made(
            operation.method,
            path,
            content,
            CONTENT_TYPES[operation.content] if content else None,
            own=self._present() if self._expiring else {},
            key=(place.name, delivery.key) if isinstance(place, Header) else None,
            passed_on=delivery.headers,
        )

    def _reading(self, url: str, delivery: Delivery) -> Outgoing:
        present = self._present() if self._expiring else {}
        return self._service.reading(url, own=present, passed_on=delivery.headers)

    def _written(self, delivery: Delivery, operation: Operation, place: KeyPlace, path: str) -> tuple[str, bytes]:
        """The path with its ids, and the body with the key where the body has it. Each attempt makes the same bytes.

        Raises `Malformed`, also for what JSON or the URL cannot carry, such as a lone surrogate.
        """
        try:
            return self._with_key(delivery, operation, place, path)
        except (ValueError, RecursionError):
            raise Malformed(f"the payload of {delivery.operation} cannot be read, or written again") from None

    def _with_key(self, delivery: Delivery, operation: Operation, place: KeyPlace, path: str) -> tuple[str, bytes]:
        payload = delivery.payload
        ids = tuple(PLACEHOLDER.findall(path)) if "{" in path else ()
        if (problem := problem_of(payload, operation, place, ids)) is not None:
            raise Malformed(f"the payload of {delivery.operation} {problem}")
        path = path_of(path, payload) if ids else path
        try:
            match place:
                case BodyField():
                    put(payload, place.path, delivery.key)
                case GraphQLArgument():
                    put(payload, f"variables.{place.path}", delivery.key)
                case NoKey(mark=mark) if mark is not None:
                    put(payload, mark.path, with_key(mark.value, delivery.key))
                case QueryField():
                    path += ("&" if "?" in path else "?") + urlencode({place.name: delivery.key})
        except Blocked as error:
            raise Malformed(f"the payload of {delivery.operation}: {error}") from None
        if operation.content == "form":
            return path, urlencode(_as_texts(payload), doseq=True).encode()
        if operation.method == "DELETE" and not payload:
            return path, b""
        return path, JSON.encode(payload).encode()

    def _present(self) -> dict[str, str]:
        """The headers whose credentials expire, as they are now. Raises `NoCredential`."""
        try:
            headers = {auth.header: auth.value(self._settings) for auth in self._expiring}
        except Exception as error:  # its text may have the credential
            raise NoCredential(
                f"nothing was sent: the function of a credential raised {type(error).__name__}"
            ) from error
        if not all(HEADER_VALUE.fullmatch(value) for value in headers.values()):
            raise NoCredential("nothing was sent: the function of a credential returned what no header can have")
        if headers != self._last_present:
            self._last_present = headers
            self._credentials = credentials_of({**self._constant, **headers})
        return headers

    def _outcome(self, answer: Answer, delivery: Delivery) -> Outcome:
        operation = self.profile.operations[delivery.operation.partition(".")[2]]
        return outcome_by(self.profile, operation, answer)

    def _is_replayed(self, answer: Answer) -> bool:
        return is_repeated(self.profile, answer)


def _scope_of(
    profile: Profile, base_url: str, credentials: Mapping[str, str], settings: Mapping[str, Setting], given: str
) -> str:
    """What voids a key when it changes: the service's address, the account that a setting names, and the API key if a key is
    known to one API key only.
    """
    secret = {name for auth in profile.auths for name in auth.settings}
    host, _, path = base_url.partition("://")[2].partition("/")
    parts = [f"{host}/{digest(path)}" if path else host]
    if names := sorted(settings.items() - {(name, settings[name]) for name in secret}):
        parts.append(f"account={digest(repr(names))}")
    if _is_bound_to_api_key(profile) and credentials:
        parts.append(f"key={digest(repr(sorted(credentials.items())))}")
    return " ".join([*parts, *([given] if given else [])])


def _is_bound_to_api_key(profile: Profile) -> bool:
    """Whether another API key voids the keys, as far as is known."""
    has_keys = any(profile.window_of(each) is not None for each in profile.operations.values())
    return has_keys and profile.scope in ("api_key", "unknown")


def _form(place: KeyPlace) -> KeyFormat:
    return NATIVE if isinstance(place, NoKey | NaturalKey) else place.form


def _is_in_body(place: KeyPlace) -> bool:
    return isinstance(place, BodyField | GraphQLArgument | QueryField) or (
        isinstance(place, NoKey) and place.mark is not None
    )


def _as_texts(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The form's fields: JSON's booleans as texts, and without the members that are null."""

    def text(value: Any) -> Any:
        return str(value).lower() if isinstance(value, bool) else value

    return {
        name: [text(each) for each in value] if isinstance(value, list) else text(value)
        for name, value in payload.items()
        if value is not None
    }
