"""A strict fake of Stripe's v1 API without a network: what it remembers of a key, and what it answers.

    fake = FakeStripe(clock=lambda: now, random=Random(1))
    match fake.receive(request):
        case Execution() as execution: answer = fake.execute(execution)     # in between, the key is in use
        case Answer() as answer: ...

No I/O but the ledger; the clock and the random source are handed in. Source of every rule:
docs.stripe.com/api/idempotent_requests and docs.stripe.com/error-low-level. The order of the checks: limiter,
authentication, key, parameters.
"""

import json
import string
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from random import Random
from typing import Literal, NewType, cast
from urllib.parse import parse_qsl

from dispatchers.testing.service_faults import Faults, ServiceFault
from dispatchers.testing.stripe_ledger import Answered, Effect, RememberedKey, StripeLedger
from dispatchers.testing.stripe_objects import Json, Refused, Result, StripeObjects, error, nested

Account = NewType("Account", str)

API_KEY = "sk_test_fake"
MAX_KEY_CHARS = 255  # docs.stripe.com/api/idempotent_requests
FORM = "application/x-www-form-urlencoded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request. Header names are in lower case."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One HTTP response. `lost`: the connection is dropped instead, by a reset, by closing it, or in the middle of the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    lost: Literal["", "reset", "closed", "cut"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A request that has begun to execute. Hand it to `FakeStripe.execute` after `takes`."""

    request: Request
    request_id: str
    account: Account
    key: str | None
    fault: ServiceFault | None
    takes: timedelta
    operation: Callable[[datetime], Result]


@dataclass(slots=True)
class _Remembered:
    """What Stripe knows of a key. `result` is None while the first request executes."""

    method: str
    path: str
    parameters: list[tuple[str, str]]
    request_id: str
    since: datetime
    result: Result | None = None


@dataclass(slots=True)
class _Books:
    objects: StripeObjects
    keys: dict[str, _Remembered] = field(default_factory=dict)


class FakeStripe:
    """An exact imitation of Stripe's idempotency.

    accounts: which API key belongs to which account. A request with a `Stripe-Account` header belongs to that account.
    revoked: the connected accounts that have withdrawn the platform's access.
    ledger: the record of what happened; in memory by default. One that has records is continued, with its keys and objects.
    window: how long a key is remembered, counted from its first request.
    faults: may be replaced at any time.
    clock: aware UTC.
    random: chooses faults and ids.
    """

    def __init__(
        self,
        *,
        accounts: Mapping[str, str] | None = None,
        ledger: StripeLedger | None = None,
        faults: Faults | None = None,
        window: timedelta = timedelta(hours=24),
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        random: Random | None = None,
    ) -> None:
        self.accounts = dict(accounts or {API_KEY: "acct_fake"})
        self.revoked: set[str] = set()
        self.ledger = ledger or StripeLedger()
        self.faults = faults or Faults()
        self.window = window
        self._clock = clock
        self._random = random or Random()
        self._forced: deque[ServiceFault | None] = deque()
        self._books: dict[Account, _Books] = {}
        self._continue_ledger()

    def force(self, *faults: ServiceFault | None) -> None:
        """Let the next requests meet these faults, one each, in this order. None is a request without a fault."""
        self._forced.extend(faults)

    def latency(self) -> timedelta:
        """How long the next request takes on its way."""
        return self.faults.latency * (0.5 + self._random.random())

    def executing(self, key: str) -> bool:
        """Whether a request with this key is executing now, in any account."""
        books = list(self._books.values())
        return any(key in each.keys and each.keys[key].result is None for each in books)

    def receive(self, request: Request) -> Answer | Execution:
        """Answer a request at once, or begin to execute it."""
        fault = self._forced.popleft() if self._forced else self.faults.draw(self._random)
        request_id = self._new_id("req")
        key = request.headers.get("idempotency-key")
        account: Account | None = None

        def refuse(status: int, body: Json, **headers: str) -> Answer:
            answered = Result(status, body)
            return self._answer(request, request_id, account, key, answered, fault, headers=headers)

        if fault is ServiceFault.RATE_LIMIT:
            wait = max(1, round(self.faults.retry_after.total_seconds()))
            limited = error("invalid_request_error", "Too many requests hit the API too quickly.", code="rate_limit")
            return refuse(429, limited, retry_after=str(wait))
        if fault in (ServiceFault.UNAVAILABLE, ServiceFault.LOSE_REQUEST):
            return refuse(503, error("api_error", "Service unavailable."))

        account = self._account(request)
        if account is None:
            return refuse(401, error("invalid_request_error", "Invalid API Key provided."))
        if account in self.revoked:  # docs.stripe.com/error-codes, account_invalid
            message = f"The provided key does not have access to account '{account}' (or that account does not exist)."
            return refuse(403, error("invalid_request_error", message, code="account_invalid"))
        books = self._books_of(account)
        try:
            if request.method == "GET":
                found = books.objects.read(request.path, nested(parse_qsl(request.query, keep_blank_values=True)))
                return refuse(200, found)
            parameters = form(request)
        except Refused as refused:
            return refuse(refused.status, refused.body)

        if key is not None and len(key) > MAX_KEY_CHARS:
            message = f"The idempotency key is {len(key)} characters long; at most {MAX_KEY_CHARS} are allowed."
            return refuse(400, error("invalid_request_error", message))
        remembered = self._recall(books, key)
        if remembered is not None:
            conflict = _conflict(remembered, request, parameters, str(key))
            if conflict is not None:
                return refuse(*conflict)
            result = cast(Result, remembered.result)  # without one it would be a conflict
            return self._answer(request, request_id, account, key, result, fault, remembered.request_id)

        try:
            operation = books.objects.prepare(request.method, request.path, nested(parameters))
        except Refused as refused:
            return refuse(refused.status, refused.body)
        # From here on, and only from here on, every outcome is remembered.
        if key is not None:
            books.keys[key] = _Remembered(request.method, request.path, parameters, request_id, self._clock())
        return Execution(
            request=request,
            request_id=request_id,
            account=account,
            key=key,
            fault=fault,
            takes=self.faults.slow_for if fault is ServiceFault.SLOW else timedelta(0),
            operation=operation,
        )

    def execute(self, execution: Execution) -> Answer:
        """Finish what `receive` began: the effect happens here, and the answer is remembered here."""
        failed = error("api_error", "An unknown error occurred.")
        match execution.fault:
            case ServiceFault.FAIL_BEFORE:
                result = Result(500, failed)
            case ServiceFault.FAIL_AFTER:
                result = replace(execution.operation(self._clock()), status=500, body=failed)
            case _:
                result = execution.operation(self._clock())
        request_id, account, key = execution.request_id, execution.account, execution.key
        self.ledger.add_execution(
            [
                Effect(account=account, key=key, request_id=request_id, created=self._clock(), **asdict(each))
                for each in result.happened
            ],
            account=account,
            key=None if key is None else self._remember(account, key, request_id, result),
            objects=result.changed,
        )
        return self._answer(execution.request, request_id, account, key, result, execution.fault)

    # --- the parts

    def _continue_ledger(self) -> None:
        for account, stored in self.ledger.objects:
            self._books_of(Account(account)).objects.restore(stored)
        for each in self.ledger.keys:
            self._books_of(Account(each.account)).keys[each.key] = _Remembered(
                each.method, each.path, each.parameters, each.request_id, each.since, Result(each.status, each.body)
            )

    def _books_of(self, account: Account) -> _Books:
        return self._books.setdefault(account, _Books(StripeObjects(self._new_id)))

    def _remember(self, account: Account, key: str, request_id: str, result: Result) -> RememberedKey | None:
        """Keep the answer for the key; None if the window ended meanwhile and another request has taken the key."""
        remembered = self._books[account].keys.get(key)
        if remembered is None or remembered.request_id != request_id:
            return None
        remembered.result = result
        return RememberedKey(
            account=account,
            key=key,
            method=remembered.method,
            path=remembered.path,
            parameters=remembered.parameters,
            request_id=request_id,
            since=remembered.since,
            status=result.status,
            body=result.body,
        )

    def _account(self, request: Request) -> Account | None:
        scheme, _, api_key = request.headers.get("authorization", "").partition(" ")
        account = self.accounts.get(api_key.strip()) if scheme.lower() == "bearer" else None
        return Account(request.headers.get("stripe-account", account)) if account else None

    def _recall(self, books: _Books, key: str | None) -> _Remembered | None:
        remembered = books.keys.get(key) if key is not None else None
        if remembered is None or self._clock() < remembered.since + self.window:
            return remembered
        del books.keys[str(key)]
        return None

    def _answer(
        self,
        request: Request,
        request_id: str,
        account: Account | None,
        key: str | None,
        result: Result,
        fault: ServiceFault | None,
        original_request: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        replayed = original_request is not None
        lost: Literal["", "reset", "closed", "cut"] = "cut" if fault is ServiceFault.CUT_OFF else ""
        if fault in (ServiceFault.LOSE_RESPONSE, ServiceFault.LOSE_REQUEST):
            lost = "reset" if self._random.random() < 0.5 else "closed"
        self.ledger.add_answer(
            Answered(
                request_id=request_id,
                original_request=original_request or request_id,
                account=account,
                key=key,
                method=request.method,
                path=request.path,
                status=result.status,
                replayed=replayed,
                lost=bool(lost),
                fault=fault,
                at=self._clock(),
            )
        )
        now = format_datetime(self._clock(), usegmt=True)
        answered = {"Content-Type": "application/json", "Date": now, "Request-Id": request_id}
        answered |= {name.replace("_", "-").title(): value for name, value in (headers or {}).items()}
        if "stripe-version" in request.headers:
            answered["Stripe-Version"] = request.headers["stripe-version"]
        if key is not None and account is not None and request.method != "GET":
            answered |= {"Idempotency-Key": key, "Original-Request": original_request or request_id}
        if replayed:
            answered["Idempotent-Replayed"] = "true"
            if result.status >= 500:
                answered["Stripe-Should-Retry"] = "false"
        return Answer(status=result.status, headers=answered, body=json.dumps(result.body).encode(), lost=lost)

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_" + "".join(self._random.choices(string.ascii_letters + string.digits, k=24))


def form(request: Request) -> list[tuple[str, str]]:
    """The parameters of a request, in an order of their own: Stripe compares what they say, not how they are sorted."""
    media_type = request.headers.get("content-type", FORM).partition(";")[0].strip().lower()
    if request.body and media_type != FORM:
        raise Refused(400, f"Invalid request: parameters are sent as {FORM}, not {media_type}.")
    try:
        pairs = parse_qsl(request.body.decode(), keep_blank_values=True, strict_parsing=bool(request.body))
    except ValueError as undecodable:
        raise Refused(400, f"Invalid request body: {undecodable}") from None
    return sorted(parse_qsl(request.query, keep_blank_values=True) + pairs)


def _conflict(
    remembered: _Remembered, request: Request, parameters: list[tuple[str, str]], key: str
) -> tuple[int, Json] | None:
    """Why this key is refused; None if it is answered as before."""
    if (remembered.method, remembered.path) != (request.method, request.path):
        message = (
            "Keys for idempotent requests can only be used for the same endpoint they were first used for"
            f" ({remembered.method} {remembered.path}). Try using a key other than the one given if you meant to execute"
            " a different request."
        )
        return 400, error("idempotency_error", message)
    if remembered.parameters != parameters:
        message = (
            "Keys for idempotent requests can only be used with the same parameters they were first used with."
            f" Try using a key other than '{key}' if you meant to execute a different request."
        )
        return 400, error("idempotency_error", message)
    if remembered.result is None:
        message = f"There is currently another in-progress request using this Idempotent Key: {key}"
        return 409, error("invalid_request_error", message, code="idempotency_key_in_use")
    return None
