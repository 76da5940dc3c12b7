"""The adapter that serves any profile: it makes the service's requests, and reads the service's answers, over HTTP."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import httpx

from dispatchers.adapters.http.adapter import HttpAdapter
from dispatchers.adapters.http.request import JSON, Malformed
from dispatchers.adapters.http_client.request_writer import Outgoing
from dispatchers.adapters.http_client.transport import Answer
from dispatchers.adapters.providers.answers import is_repeated, outcome_by
from dispatchers.adapters.providers.json_paths import Blocked, put
from dispatchers.adapters.providers.key_places import (
    BodyField,
    GraphQLArgument,
    Header,
    KeyPlace,
    NaturalKey,
    NoKey,
    QueryField,
    filled,
)
from dispatchers.adapters.providers.operations import PLACEHOLDER, Operation, path_of, problem_of
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.trust import Tls
from dispatchers.delivery import NATIVE, Adapter, Delivery, KeyFormat, Outcome, digest
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy, Window
from outbox.errors import ConfigurationError

log = logging.getLogger("outbox.dispatcher")


class ProviderAdapter(HttpAdapter):
    """Serves the operations of a profile. After the first segment, an entry's operation is the profile's name for it.

    profile: what the service guarantees.
    settings: the credentials and names that the profile needs, as texts: `api_key=...`.
    window: how long the service certainly remembers a key. By default the profile's; you must give it if none is published.
    base_url: of a sandbox, another region, or an imitation; by default the profile's.
    at_least_once: for a service without keys: True sends again after an unknown outcome, so the effect may happen twice.
    pinned: what else must not change between two attempts, such as the name of the account.
    timeout, retry, failure_blocks_group: as in `Adapter`. proxy, tls, reuse, transport: as in `HttpAdapter`.

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
        **settings: str,
    ) -> None:
        self.profile = profile if window is None else replace(profile, window=window)
        _check_settings(profile, settings)
        credentials = {auth.header: auth.value(settings) for auth in profile.auths}
        headers = {name: value.format_map(settings) for name, value in profile.headers.items()}
        place = self.profile.key
        super().__init__(
            base_url=(base_url or profile.base_url).format_map(settings),
            headers={**headers, **credentials},
            key_header=place.name if isinstance(place, Header) else None,
            timeout=timeout,
            at_least_once=at_least_once,
            retry=retry,
            proxy=proxy,
            tls=tls,
            reuse=reuse,
            transport=transport,
        )
        self.failure_blocks_group = failure_blocks_group
        self.failure_fields = ("status", *profile.error)
        self._scope = _scope_of(profile, self._service.place, credentials, settings, pinned)
        self._paths = {name: _with_settings(each.path, settings) for name, each in profile.operations.items()}
        self._declare(_form(place), self.profile.window)
        self.parts = self._parts()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.profile.name!r}, window={self.window!r})"

    def serves(self, operation: str) -> bool:
        return operation.partition(".")[2] in self.profile.operations

    def nearest(self, operation: str) -> str | None:
        prefix, _, name = operation.partition(".")
        found = self.profile.nearest(name)
        return None if found is None else f"{prefix}.{found}"

    # --- its declaration

    def _declare(self, form: KeyFormat, window: Window) -> None:
        self.key_format = form
        self.window = window
        self.pinned = self.profile.name if window is None else f"{self.profile.name} {self._scope}"
        self.replays_errors = "all" if self.profile.stores == "all" else "2xx"

    def _parts(self) -> Mapping[str, Adapter]:
        """An adapter for each operation that differs. They share the connections."""
        parts = {}
        for name, operation in self.profile.operations.items():
            form, window = _form(self.profile.place_of(operation)), self._window_of(name, operation)
            if self.profile.compares == "nothing":
                form = replace(form, route=f"{operation.method} {operation.path}")
            if (form, window) != (self.key_format, self.window):
                part = copy.copy(self)
                part._declare(form, window)
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

    # --- a send

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
        kind = (
            ("application/json" if operation.content == "json" else "application/x-www-form-urlencoded")
            if content
            else None
        )
        own = {place.name: delivery.key} if isinstance(place, Header) and place is not self.profile.key else {}
        return self._service.made(
            operation.method, path, content, kind, own=own, key=delivery.key, passed_on=delivery.headers
        )

    def _written(self, delivery: Delivery, operation: Operation, place: KeyPlace, path: str) -> tuple[str, bytes]:
        """The path with its ids, and the body with the key where the body has it. Each attempt makes the same bytes."""
        payload = delivery.payload
        ids = tuple(PLACEHOLDER.findall(path))
        if (problem := problem_of(payload, operation, place, ids)) is not None:
            raise Malformed(f"the payload of {delivery.operation} {problem}")
        path = path_of(path, payload)
        try:
            match place:
                case BodyField():
                    put(payload, place.path, delivery.key)
                case GraphQLArgument():
                    put(payload, f"variables.{place.path}", delivery.key)
                case NoKey(mark=mark) if mark is not None:
                    put(payload, mark.path, filled(mark.value, delivery.key))
                case QueryField():
                    path += ("&" if "?" in path else "?") + urlencode({place.name: delivery.key})
        except Blocked as error:
            raise Malformed(f"the payload of {delivery.operation}: {error}") from None
        if operation.content == "form":
            return path, urlencode(_as_texts(payload), doseq=True).encode()
        if operation.method == "DELETE" and not payload:
            return path, b""
        return path, JSON.encode(payload).encode()

    def _outcome(self, answer: Answer, delivery: Delivery) -> Outcome:
        operation = self.profile.operations[delivery.operation.partition(".")[2]]
        return outcome_by(self.profile, operation, answer)

    def _is_replayed(self, answer: Answer) -> bool:
        return is_repeated(self.profile, answer)


def _check_settings(profile: Profile, settings: Mapping[str, object]) -> None:
    if missing := [name for name in profile.settings if not settings.get(name)]:
        raise ConfigurationError(f"{profile.title} needs {', '.join(f'{name}=...' for name in missing)}")
    if unknown := sorted(settings.keys() - set(profile.settings)):
        needed = ", ".join(profile.settings) or "none of its own"
        raise ConfigurationError(f"{profile.title} has no setting {unknown[0]!r}; its settings are {needed}")
    if wrong := [name for name, value in settings.items() if not isinstance(value, str)]:
        raise ConfigurationError(f"{profile.title}: {wrong[0]} must be a text (it is not shown)")


def _scope_of(
    profile: Profile, place: str, credentials: Mapping[str, str], settings: Mapping[str, str], given: str
) -> str:
    """What voids a key when it changes: the service's address, the account that a setting names, and the API key if a key is
    known to one API key only.
    """
    secret = {name for auth in profile.auths for name in auth.settings}
    parts = [place.partition(" ")[0].partition("://")[2]]
    if names := sorted(settings.items() - {(name, settings[name]) for name in secret}):
        parts.append(f"account={digest(repr(names))}")
    if profile.scope in ("api_key", "unknown") and credentials:
        parts.append(f"key={digest(repr(sorted(credentials.items())))}")
    return " ".join([*parts, *([given] if given else [])])


def _with_settings(path: str, settings: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda match: settings.get(match[1], match[0]), path)


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
