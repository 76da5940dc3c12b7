"""A fake of any service that has a profile, without a network: what it remembers of a key, and what it answers.

    fake = FakeProvider(resend)
    match fake.receive(request):
        case Execution() as execution: reply = fake.execute(execution)      # in between, the key is in use
        case Reply() as reply: ...

It does what the profile states and nothing kinder. The order of the checks: limiter, route, authentication, key, payload.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from random import Random
from typing import Any, Final, Literal
from urllib.parse import parse_qs, urlsplit

from dispatchers.adapters.providers.auth import PLACEHOLDER, filled
from dispatchers.adapters.providers.json_paths import ANY, found, put
from dispatchers.adapters.providers.key_places import (
    BodyField,
    GraphQLArgument,
    Header,
    KeyPlace,
    NaturalKey,
    NoKey,
    QueryField,
)
from dispatchers.adapters.providers.operations import Operation
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Duplicate, Signal
from dispatchers.testing.faulty_http import Request
from dispatchers.testing.service_faults import Faults, ServiceFault
from dispatchers.time_limits import FOREVER

UNPUBLISHED: Final = timedelta(hours=24)  # the fake's window where the service publishes none
IN_FLIGHT: Final = Signal(409, body={"error": "in_flight"})
MISMATCH: Final = Signal(409, body={"error": "other_request"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Something that happened at the service, once. answer_lost: the client never saw the answer in full."""

    operation: str
    key: str | None
    id: str
    payload: Any
    at: datetime
    answer_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One answer. lost: the client never saw it in full."""

    operation: str | None
    key: str | None
    status: int
    replayed: bool
    lost: bool
    at: datetime


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent back. lost: how it does not arrive."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    lost: Literal["", "reset", "closed", "cut"] = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the service refuses to execute, for `force`: `Refusal(422, {"name": "invalid"})`."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A request that has begun to execute."""

    name: str
    operation: Operation
    key: str | None
    place: "_Place | None"
    payload: Any
    fault: "ServiceFault | Refusal | None"
    takes: timedelta


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a key is remembered: its scope, and the key."""

    scope: str
    key: str


@dataclass(slots=True)
class _Remembered:
    """What is known of a key. reply: None while the first request executes."""

    fingerprint: object
    began: datetime
    finished: datetime | None = None
    reply: Reply | None = None
    id: str = ""


class FakeProvider:
    """The service of a profile.

    window: how long a key is remembered; by default the profile's, or a day if none is published.
    faults: as fractions, drawn by `random`; they may be replaced at any time. clock: aware UTC, and moved by `advance`.
    record: called with each effect and each answer, to keep them elsewhere too.
    effects: what happened, in order. answers: every answer, whether or not it arrived.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        window: timedelta | None = None,
        faults: Faults | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        random: Random | None = None,
        record: Callable[[Effect | Answered], None] = lambda happened: None,
    ) -> None:
        self.profile = profile
        self.faults = faults or Faults()
        self.effects: list[Effect] = []
        self.answers: list[Answered] = []
        self._window = window
        self._clock = clock
        self._random = random or Random()
        self._record = record
        self._moved = timedelta(0)
        self._forced: deque[ServiceFault | Refusal | None] = deque()
        self._keys: dict[_Place, _Remembered] = {}
        self._ids = count(1)
        base = urlsplit(filled(profile.base_url, {name: f"fake_{name}" for name in profile.settings()})).path
        self.base_path = base.rstrip("/")
        self._routes = [
            (operation.method, _pattern(profile, operation), name, operation)
            for name, operation in profile.operations.items()
        ]

    # --- what a test does

    def force(self, *faults: ServiceFault | Refusal | None) -> None:
        """Let the next requests meet these, one each, in this order. None is a request without a fault."""
        self._forced.extend(faults)

    def advance(self, by: timedelta) -> None:
        """Move the service's clock."""
        self._moved += by

    def latency(self) -> timedelta:
        """How long the next request takes on its way."""
        return self.faults.latency * (0.5 + self._random.random())

    def now(self) -> datetime:
        return self._clock() + self._moved

    def executing(self, key: str) -> bool:
        """Whether a request with this key is executing now."""
        return any(place.key == key and each.reply is None for place, each in list(self._keys.items()))

    # --- a request

    def receive(self, request: Request) -> Reply | Execution:
        """Answer a request at once, or begin to execute it."""
        fault = self._forced.popleft() if self._forced else self.faults.draw(self._random)
        if fault is ServiceFault.RATE_LIMIT:
            seconds = str(max(1, round(self.faults.retry_after.total_seconds())))
            return self._answer(None, None, Reply(429, self._error("rate_limit"), {"Retry-After": seconds}))
        if fault is ServiceFault.UNAVAILABLE:
            return self._answer(None, None, Reply(503, self._error("unavailable")))
        if fault is ServiceFault.LOSE_REQUEST:
            return self._answer(None, None, Reply(503, lost="reset"))
        route = self._route(request)
        if route is None:
            return self._answer(None, None, Reply(404, self._error("no such route")))
        name, operation = route
        if any(not request.headers.get(auth.header.lower()) for auth in self.profile.auths):
            return self._answer(name, None, Reply(401, self._error("unauthorized")))
        try:
            payload = _payload(request)
        except ValueError:
            return self._answer(name, None, Reply(400, self._error("malformed")))
        place = self.profile.place_of(operation)
        key = _key_of(place, request, payload)
        if key is not None and (problem := _problem_of(key, place)):
            return self._answer(name, key, Reply(400, self._error(problem)))
        return self._begun(name, operation, key, payload, request, fault)

    def _begun(
        self,
        name: str,
        operation: Operation,
        key: str | None,
        payload: Any,
        request: Request,
        fault: ServiceFault | Refusal | None,
    ) -> Reply | Execution:
        place = self._place_of(name, operation, key, request)
        if place is not None:
            remembered = self._recall(place, operation)
            if remembered is not None:
                if (refusal := self._conflict(remembered, request, payload)) is not None:
                    return self._answer(name, key, refusal, fault)
                if (reply := self._repeated(remembered)) is not None:
                    return self._answer(name, key, reply, fault, replayed=True)
            self._keys[place] = _Remembered(self._fingerprint(request, payload), self.now())
        takes = self.faults.slow_for if fault is ServiceFault.SLOW else timedelta(0)
        return Execution(
            name=name, operation=operation, key=key, place=place, payload=payload, fault=fault, takes=takes
        )

    def execute(self, execution: Execution) -> Reply:
        """Finish what `receive` began: the effect happens here, and the answer is remembered here."""
        fault, name, key = execution.fault, execution.name, execution.key
        id = f"{self.profile.name}_{next(self._ids)}"
        match fault:
            case Refusal():
                reply = Reply(fault.status, fault.body, fault.headers)
            case ServiceFault.FAIL_BEFORE | ServiceFault.FAIL_AFTER:
                reply = Reply(500, self._error("internal"))
            case _:
                reply = Reply(execution.operation.success, self._success(execution.operation, id))
        if reply.status < 300 or fault is ServiceFault.FAIL_AFTER:
            lost = fault in (ServiceFault.LOSE_RESPONSE, ServiceFault.CUT_OFF)
            payload, at = execution.payload, self.now()
            self._add(self.effects, Effect(operation=name, key=key, id=id, payload=payload, at=at, answer_lost=lost))
        self._remember(execution.place, reply, id)
        return self._answer(name, key, reply, fault)

    # --- keys

    def _place_of(self, name: str, operation: Operation, key: str | None, request: Request) -> _Place | None:
        """Where the request's key is remembered; None if it has none. A natural key is what the request writes."""
        place = self.profile.place_of(operation)
        if isinstance(place, NaturalKey):
            return _Place(name, f"{request.target} {request.body!r}")
        if key is None:
            return None
        scope = ""
        if self.profile.scope in ("api_key", "unknown"):
            scope = repr([request.headers.get(auth.header.lower()) for auth in self.profile.auths])
        if self.profile.scope == "endpoint":
            scope = name
        return _Place(scope, key)

    def _recall(self, place: _Place, operation: Operation) -> _Remembered | None:
        remembered = self._keys.get(place)
        if remembered is None:
            return None
        window = self._window or self.profile.window_of(operation) or UNPUBLISHED
        since = remembered.began if self.profile.window_from == "first_attempt" else remembered.finished
        if window is FOREVER or since is None or self.now() < since + window:
            return remembered
        del self._keys[place]
        return None

    def _conflict(self, remembered: _Remembered, request: Request, payload: Any) -> Reply | None:
        """Why a request whose key is known is refused; None if it is not."""
        if remembered.fingerprint != self._fingerprint(request, payload):
            return reply_of(self.profile.mismatch or MISMATCH)
        return reply_of(self.profile.in_flight or IN_FLIGHT) if remembered.reply is None else None

    def _repeated(self, remembered: _Remembered) -> Reply | None:
        """The answer to a request whose key has been executed; None while it executes."""
        profile, first = self.profile, remembered.reply
        if first is None:
            return None
        if profile.duplicate is not None:
            return self._duplicate(profile.duplicate, remembered.id)
        return replace(first, headers={**first.headers, **(profile.replay.headers if profile.replay else {})})

    def _fingerprint(self, request: Request, payload: Any) -> object:
        match self.profile.compares:
            case "nothing":
                return None
            case "body":
                return request.method, request.target, request.body
            case _:
                return request.method, request.target, json.dumps(payload, sort_keys=True)

    def _remember(self, place: _Place | None, reply: Reply, id: str) -> None:
        """Store the answer; forget the key of an error that the service does not store."""
        if place is None or place not in self._keys:
            return
        profile = self.profile
        keeps_errors = profile.stores == "all" or (profile.duplicate is not None and profile.duplicate.after_errors)
        if reply.status >= 300 and not keeps_errors:
            del self._keys[place]
            return
        remembered = self._keys[place]
        remembered.reply, remembered.finished, remembered.id = reply, self.now(), id

    # --- answers

    def _duplicate(self, duplicate: Duplicate, id: str) -> Reply:
        reply = reply_of(duplicate.signal)
        if duplicate.id is not None:
            _fill(reply.body, duplicate.id, id)
        return reply

    def _error(self, text: str) -> Any:
        """The body of an error that no signal describes."""
        return None if self.profile.error_answer is not None else {"error": text}

    def _success(self, operation: Operation, id: str) -> Any:
        """The JSON of a success: the operation's example, or its results."""
        if operation.answer is not None:
            return json.loads(json.dumps(operation.answer).replace("{id}", id))
        paths = operation.result or self.profile.result
        body: dict[str, Any] = {}
        for path in paths:
            _fill(body, path, id)
        return body if paths else None

    def _answer(
        self,
        operation: str | None,
        key: str | None,
        reply: Reply,
        fault: ServiceFault | Refusal | None = None,
        *,
        replayed: bool = False,
    ) -> Reply:
        if reply.status >= 400 and self.profile.error_answer is not None:
            reply = replace(reply, body=_completed(reply.body, _with_status(self.profile.error_answer, reply.status)))
        if fault is ServiceFault.LOSE_RESPONSE:
            reply = replace(reply, lost="closed")
        elif fault is ServiceFault.CUT_OFF:
            reply = replace(reply, lost="cut")
        self._add(
            self.answers,
            Answered(
                operation=operation,
                key=key,
                status=reply.status,
                replayed=replayed,
                lost=bool(reply.lost),
                at=self.now(),
            ),
        )
        return reply

    def _add(self, happened: list[Any], what: Effect | Answered) -> None:
        happened.append(what)
        self._record(what)

    def _route(self, request: Request) -> tuple[str, Operation] | None:
        path = request.target.partition("?")[0]
        for method, pattern, name, operation in self._routes:
            if method == request.method and pattern.fullmatch(path):
                return name, operation
        return None


def _pattern(profile: Profile, operation: Operation) -> re.Pattern[str]:
    """The paths of the operation, with any value in the place of a setting or an id."""
    base = re.sub(r"^[^:/]+://[^/]*", "", profile.base_url).rstrip("/")
    path = f"{base}{operation.path.partition('?')[0]}"
    return re.compile("[^/]+".join(re.escape(part) for part in PLACEHOLDER.split(path)[::2]))


def _payload(request: Request) -> Any:
    """The parsed body. Raises `ValueError`."""
    if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        return parse_qs(request.body.decode(), keep_blank_values=True, strict_parsing=bool(request.body))
    return json.loads(request.body) if request.body else None


def _key_of(place: KeyPlace, request: Request, payload: Any) -> str | None:
    match place:
        case Header(name=name):
            key = request.headers.get(name.lower())
        case QueryField(name=name):
            key = next(iter(parse_qs(request.target.partition("?")[2]).get(name, [])), None)
        case BodyField(path=path):
            key = found(payload, path)
        case GraphQLArgument(path=path):
            key = found(payload, f"variables.{path}")
        case NoKey() | NaturalKey():
            return None
    return key if isinstance(key, str) and key else None


def _problem_of(key: str, place: KeyPlace) -> str | None:
    """Why the service takes no such key."""
    form = None if isinstance(place, NoKey | NaturalKey) else place.form
    if form is None:
        return None
    if len(key) > form.max_chars:
        return f"a key has at most {form.max_chars} characters"
    if form.encoding == "uuid" and not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", key):
        return "a key is a UUID"
    return None if re.fullmatch(f"({form.alphabet})*", key) else f"a key consists of {form.alphabet}"


def reply_of(signal: Signal) -> Reply:
    """An answer that has the signal."""
    body = None if signal.body is None else json.loads(json.dumps(signal.body).replace(f'"{ANY}":', '"any":'))
    return Reply(signal.status or 409, body, signal.headers)


def _with_status(example: Any, status: int) -> Any:
    return json.loads(json.dumps(example).replace('"{status}"', str(status)))


def _completed(body: Any, example: Any) -> Any:
    """The body with the members of the example that it lacks."""
    match body, example:
        case None, _:
            return example
        case dict(), dict():
            return {**example, **{name: _completed(value, example.get(name)) for name, value in body.items()}}
        case list(), [first, *_]:
            return [_completed(item, first) for item in body]
        case _:
            return body


def _fill(body: Any, path: str, id: str) -> None:
    """Put the id at a path; in the first item where the path goes through a list."""
    name, brackets, rest = path.partition("[]")
    if not brackets:
        put(body, path, id)
        return
    items = found(body, name)
    if not isinstance(items, list):
        put(body, name, [{}])
        items = found(body, name)
    _fill(items[0], rest.removeprefix("."), id)
