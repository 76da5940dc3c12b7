"""Stripe: every write of its v1 API, under the entry's child key.

    Dispatcher(..., adapters={"stripe": StripeAdapter(api_key=os.environ["STRIPE_API_KEY"])})

    outbox.enqueue(session, "stripe.payment_intents.create", {"amount": 2000, "currency": "eur"}, parent="invoice:42")
    outbox.enqueue(session, "stripe.payment_intents.capture", {"intent": "pi_1", "amount_to_capture": 500}, ...)
    outbox.enqueue(session, "stripe.checkout.sessions.create", {...}, options={"account": "acct_1"}, ...)

After `stripe.`, the operation is the SDK's own name: `StripeClient.v1.<name>_async`. The payload holds its parameters. If the
URL contains an id, the payload holds it too, under the SDK's name for it (`intent` above, `customer` for
`stripe.customers.update`). No operation has a parameter and a URL id with the same name.
"""

import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from itertools import takewhile
from typing import Any, Final

import httpx
import stripe

from dispatchers.adapters.credentials import Credentials
from dispatchers.adapters.http_client.request_writer import Echo, Outgoing, Target, origin_of
from dispatchers.adapters.http_client.transport import HEADER_VALUE, Transport
from dispatchers.adapters.stripe.lookup import MARK, MAX_METADATA_KEYS, Unlistable, Wanted, find_effect
from dispatchers.adapters.stripe.names import check_api_key, nearest_operation, warn_of_api_version
from dispatchers.adapters.stripe.outcomes import Exchange, Failure, outcome_of, remembered
from dispatchers.adapters.trust import Tls, for_http
from dispatchers.delivery import Adapter, CannotTell, Deferred, Delivered, Delivery, Finding, Outcome, Rejected
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy
from outbox.errors import ConfigurationError
from outbox.trace_headers import of_trace

WINDOW: Final = timedelta(hours=24)  # docs.stripe.com/api/idempotent_requests: "at least 24 hours old"
TARGETS_REMEMBERED: Final = 256
OPTIONS: Final = frozenset({"account", "api_version"})
KEY_HEADER: Final = "Idempotency-Key"
TELEMETRY: Final = "x-stripe-client-telemetry"  # how long the last request took: not sent


class StripeAdapter(Adapter):
    """Serves `stripe.*`. Each send is one request with the child key as its idempotency key. The SDK's own retries are off.

    api_key: secret or restricted; never shown, logged or stored.
    api_version: sent with every request; by default the version of the installed SDK. Set it, so that an upgrade of the SDK
        does not change it between two attempts. An entry's options {"api_version": ...} override it.
    account: the connected account (`Stripe-Account`). An entry's options {"account": ...} override it; {"account": None}
        means the platform itself.
    base_url: the URL of a server that imitates Stripe, for tests and demos. It replaces all hosts of the SDK.
    timeout: how long one send may take. Connecting and TLS get up to a third of it each, so that an unreachable Stripe is
        recognised.
    window: how long Stripe certainly remembers a key.
    retry: when the dispatcher gives up on an entry.
    proxy, tls: as in `HttpAdapter`; without `tls` and the environment's files, the authorities of the SDK.
    transport: replaces real connections in tests.
    reuse: False for a connection of its own for each send. With True, a success counts only if it repeats the request's key, as
        Stripe's answers do, unless it is the first answer on its connection.

    For each `.create` the adapter sets `metadata.outbox_id` to the entry's id, if Stripe takes metadata there and the payload
    does not set it. A status lookup searches Stripe's lists for this id (`lookup.LISTED` names the lists). The headers
    of the trace, `traceparent` and `tracestate`, are sent too. `replays` counts the answers that Stripe only repeated.
    """

    replays_errors = "all"
    failure_fields = ("type", "code", "decline_code", "param", "http_status", "request_id")

    def __init__(
        self,
        *,
        api_key: str,
        api_version: str | None = None,
        account: str | None = None,
        base_url: str | None = None,
        timeout: timedelta = timedelta(seconds=30),
        window: timedelta = WINDOW,
        retry: RetryPolicy = DEFAULT_RETRY,
        proxy: str | None = None,
        tls: Tls = None,
        reuse: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        check_api_key(api_key)
        self.api_version = api_version or stripe.api_version
        self.account = account
        self.timeout = timeout
        self.window = window
        self.retry = retry
        for name, value in (("api_version", self.api_version), ("account", account)):
            if value is not None and not HEADER_VALUE.fullmatch(value):
                raise ConfigurationError(f"{name}={value!r} cannot be sent as a header")
        if stripe.proxy and proxy is None and transport is None:
            raise ConfigurationError(
                "stripe.proxy is set, but StripeAdapter does not read it: give StripeAdapter(proxy=...)"
            )
        warn_of_api_version(api_version)
        # Live and test mode have separate keys, so a change of mode is like a change of account. The API key may be rolled.
        self.mode = next((mode for mode in ("live", "test") if f"_{mode}_" in api_key), "?")
        self.pinned = f"stripe version={self.api_version} account={account or '-'} mode={self.mode}"
        self.replays = 0
        self._credentials = Credentials([api_key])
        addresses = _everywhere(base_url)
        self._transport = Transport(
            timeout=timeout,
            tls=for_http(tls, stripe.ca_bundle_path),
            proxy=proxy,
            reuse=reuse,
            origins=[origin_of(base_url or stripe.DEFAULT_API_BASE)],
            transport=transport,
        )
        self._client = stripe.StripeClient(
            api_key,
            stripe_version=self.api_version,
            base_addresses=addresses,
            max_network_retries=0,
            http_client=_Client(self._transport, echoes=base_url is None),
        )
        self._operations: dict[str, _Operation] = {}

    def __repr__(self) -> str:
        return f"StripeAdapter(api_version={self.api_version!r}, account={self.account!r}, mode={self.mode!r})"

    async def send(self, delivery: Delivery) -> Outcome:
        account = delivery.options.get("account")
        exchange = Exchange(account=account if isinstance(account, str) else None, trace=_trace(delivery))
        _current.set(exchange)
        try:
            call = self._call(delivery)
            answer = await call
        except _Refused as refused:
            return refused.outcome
        except Exception as error:
            # Not only stripe.StripeError: the SDK raises other errors for unusual answers, but a 2xx is delivered anyway.
            outcome = outcome_of(error, exchange)
        else:
            outcome = Delivered(remembered(answer, exchange), replayed=exchange.replayed)
        self.replays += exchange.replayed
        return self._credentials.removed_from(outcome)

    async def find(self, delivery: Delivery) -> Finding:
        exchange = Exchange(reads=True, trace=_trace(delivery))
        _current.set(exchange)
        try:
            wanted = Wanted.of(delivery)
            found = await find_effect(wanted, self._list(wanted.kind, delivery), exchange, delivery.age + self.timeout)
            return self._credentials.removed_from(found)
        except Unlistable as why:
            return CannotTell(str(why))
        except _Refused as refused:
            return CannotTell(getattr(refused.outcome, "reason", "refused"))
        except Exception as error:
            return CannotTell(Failure.of(error, exchange).reason)

    def serves(self, operation: str) -> bool:
        """Whether the installed SDK has this operation. A newer deploy may enqueue operations of a newer SDK."""
        return operation in self._operations or _Operation.found(self._client, operation) is not None

    def nearest(self, operation: str) -> str | None:
        return nearest_operation(self._client.v1, operation)

    def sends_alike(self, pinned: str, options: Mapping[str, Any]) -> bool:
        """True if the entry's own options name everything in which the two adapters differ."""
        given = {"version": "api_version" in options, "account": "account" in options, "mode": False}
        then, now = _settings(pinned), _settings(self.pinned)
        return all(given[name] or then.get(name) == now[name] for name in now)

    async def aclose(self) -> None:
        """Close the connections. You may use the adapter again afterwards."""
        await self._transport.aclose()

    def _call(self, delivery: Delivery) -> Awaitable[Any]:
        """The coroutine of the SDK's call. Raises `_Refused` for an entry that must not be sent."""
        operation = self._operation(delivery.operation)
        params = delivery.payload
        if not isinstance(params, dict):
            raise _Refused(Rejected(f"{delivery.operation} takes an object as its payload, not a {_json_kind(params)}"))
        ids = [_taken_id(params, name, delivery.operation) for name in operation.ids]
        if operation.takes_metadata:
            _mark(params, str(delivery.id))
        return operation.method(*ids, params, self._options(delivery))

    def _list(self, kind: str, delivery: Delivery) -> Callable[[dict[str, Any]], Awaitable[Any]]:
        """The SDK's list method for the objects of this kind, with the account of the send."""
        service: Any = self._client.v1
        for word in kind.split("."):
            service = getattr(service, word)
        options = self._options(delivery)
        del options["idempotency_key"]
        return lambda params: service.list_async(params, options)

    def _operation(self, name: str) -> "_Operation":
        operation = self._operations.get(name) or _Operation.found(self._client, name)
        if operation is None:
            # A newer deploy may have enqueued the entry, so it waits for a dispatcher with the newer SDK.
            raise _Refused(Deferred(f"{name} is not in this version of the SDK (stripe {stripe.VERSION})"))
        self._operations[name] = operation
        return operation

    def _options(self, delivery: Delivery) -> dict[str, Any]:
        options = {"account": self.account, "api_version": self.api_version, **delivery.options}
        if unknown := sorted(options.keys() - OPTIONS):
            raise _Refused(Rejected(f"unknown options {unknown}: Stripe's are {sorted(OPTIONS)}"))
        for name, value in options.items():
            optional = name == "account" and value is None
            if not optional and not (isinstance(value, str) and HEADER_VALUE.fullmatch(value)):
                raise _Refused(Rejected(f"option {name!r} cannot be sent as a header"))
        return {
            "idempotency_key": delivery.key,
            "max_network_retries": 0,
            "stripe_account": options["account"],
            "stripe_version": options["api_version"],
        }


# --- what is sent


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operation of the SDK. ids: the names of its URL's ids, in order."""

    method: Callable[..., Awaitable[Any]]
    ids: tuple[str, ...]
    takes_metadata: bool

    @classmethod
    def found(cls, client: stripe.StripeClient, name: str) -> "_Operation | None":
        *services, action = name.split(".")[1:] or [""]
        if any(word.startswith("_") for word in (*services, action)):
            return None
        service: Any = client.v1
        for word in services:
            service = getattr(service, word, None)
        method = getattr(service, f"{action}_async", None)
        if not inspect.iscoroutinefunction(method):
            return None
        # Every method takes the ids of its URL, then `params`, then `options`.
        ids = tuple(takewhile(lambda argument: argument != "params", inspect.signature(method).parameters))
        # Only for `.create`: in an update, the mark would replace the one of the entry that created the object.
        return cls(method, ids, action == "create" and "metadata" in _param_names(method))


def _settings(pinned: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in pinned.split() if "=" in word)


def _param_names(method: Callable[..., Any]) -> frozenset[str]:
    """The parameters in an operation's body: the keys of the SDK's TypedDict."""
    named = re.search(r"\w+Params", str(inspect.signature(method).parameters["params"].annotation))
    # stripe.checkout._session_service has its params in stripe.params.checkout
    package = import_module(".".join(["stripe.params", *method.__module__.split(".")[1:-1]]))
    return frozenset(getattr(getattr(package, named[0], None), "__annotations__", {}) if named else ())


def _mark(params: dict[str, Any], entry_id: str) -> None:
    """Put the entry's id into the metadata. Every attempt must do the same, because Stripe compares the parameters."""
    metadata = params.get("metadata")
    if metadata is None:
        metadata = {}
    if isinstance(metadata, dict) and len(metadata) < MAX_METADATA_KEYS:
        params["metadata"] = {**metadata, MARK: metadata.get(MARK, entry_id)}


def _taken_id(params: dict[str, Any], name: str, operation: str) -> str:
    """Take the URL's id `name` out of the params. With an empty id the URL would be the collection, and a POST would create."""
    value = params.pop(name, None)
    if not isinstance(value, str) or value.strip() in {"", ".", ".."}:
        raise _Refused(Rejected(f"{operation} needs {name!r} in its payload: the id that belongs in the URL, as text"))
    return value


def _json_kind(value: object) -> str:
    return {list: "list", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")


def _everywhere(base_url: str | None) -> Any:
    """`base_url` for every host of the SDK, so that no request for a fake service reaches Stripe."""
    if base_url is None:
        return None
    if not re.match(r"https?://[^/]", base_url):
        raise ConfigurationError(f"base_url={base_url!r} must start with http:// or https://")
    return dict.fromkeys(("api", "connect", "files", "meter_events"), base_url.rstrip("/"))


class _Refused(Exception):
    """Nothing was sent. outcome: the outcome with the reason."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


# --- the transport of the SDK


def _trace(delivery: Delivery) -> dict[str, str]:
    if not delivery.headers:
        return {}
    return {name: value for name, value in of_trace(delivery.headers).items() if HEADER_VALUE.fullmatch(value)}


_current: ContextVar[Exchange] = ContextVar("exchange")


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Suppress the SDK's INFO logs of failures, because Stripe's messages quote the request."""
    return _current.get(None) is None


logging.getLogger("stripe").addFilter(_is_not_ours)


class _Client(stripe.HTTPClient):
    """Sends the SDK's requests with our transport. The SDK's own `HTTPXClient` shares one connection pool, uses the proxies of
    the environment, and asks for compression.
    """

    name = "httpx"

    def __init__(self, transport: Transport, *, echoes: bool) -> None:
        """echoes: the service repeats the key in each answer. One that has done it once does it always."""
        super().__init__()
        self._transport = transport
        self._echoes = echoes

    async def request_async(
        self, method: str, url: str, headers: Mapping[str, str], post_data: Any = None
    ) -> tuple[bytes, int, Mapping[str, str]]:
        exchange = _current.get()
        if (method == "get") != exchange.reads:
            raise _Refused(Rejected("this operation only reads: an outbox is for effects"))
        content = (post_data or "").encode() if isinstance(post_data, str | None) else post_data
        sent = [each for each in headers.items() if each[0].lower() != TELEMETRY] + [*exchange.trace.items()]
        key = headers.get(KEY_HEADER)  # a lookup has none
        echo = None if key is None else Echo(KEY_HEADER, key, self._echoes)
        request = Outgoing(method.upper(), _target(url), sent, content, echo=echo)
        exchange.started = True
        try:
            answer = await self._transport.send(request)
        except httpx.HTTPError as error:
            raise stripe.APIConnectionError(type(error).__name__) from error  # type: ignore[no-untyped-call]  # untyped in stripe
        self._echoes = self._echoes or (key is not None and KEY_HEADER in answer.headers)
        exchange.status, exchange.headers = answer.status, answer.headers
        return answer.body, answer.status, answer.headers

    async def request_stream_async(
        self, method: str, url: str, headers: Mapping[str, str], post_data: Any = None
    ) -> tuple[Any, int, Any]:
        raise _Refused(Rejected("this operation downloads: an outbox is for effects"))

    async def close_async(self) -> None:
        await self._transport.aclose()

    def close(self) -> None:
        """Do nothing: connections are closed in their event loop."""


@lru_cache(maxsize=TARGETS_REMEMBERED)
def _target(url: str) -> Target:
    return Target.of(httpx.URL(url))
