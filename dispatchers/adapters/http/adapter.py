"""Any service over HTTP: the payload says what to send, and a header carries the entry's child key.

    crm = HttpAdapter(
        base_url="https://crm.example.com/v2",
        headers={"Authorization": f"Bearer {os.environ['CRM_TOKEN']}"},
        window=timedelta(days=7),                      # where the service's documentation says so
        statuses={409: "in_progress", 422: "key_conflict"},
    )
    Dispatcher(..., adapters={"crm": crm})

    outbox.enqueue(session, "crm.contacts.create", {"url": "/contacts", "json": {"email": "ada@example.com"}}, ...)
    outbox.enqueue(session, "crm.contacts.delete", {"method": "DELETE", "url": "/contacts/7"}, ...)
    outbox.enqueue(session, "crm.notes.add", {"url": "/notes", "text": "<note/>", "content_type": "application/xml"}, ...)

A payload's fields, all optional:

    method        POST (default), PUT, PATCH or DELETE
    url           a path below `base_url`, with its query, percent-encoded; or an absolute URL to one of `origins`
    json, text, base64    the body, in one of these forms
    content_type  of the body; by default application/json, text/plain in UTF-8 or application/octet-stream
    headers       headers of this request: names and texts

Any other payload is rejected before anything is sent. The reason names the field.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal

import httpx

from dispatchers.adapters.credentials import credentials_of
from dispatchers.adapters.http.meanings import MEANINGS
from dispatchers.adapters.http.outcomes import (
    FOREIGN,
    Reading,
    is_replayed,
    meaning_of,
    outcome_of,
    outcome_of_error,
    remembered,
)
from dispatchers.adapters.http.request import Malformed, Service
from dispatchers.adapters.http_client.belonging import without_answer
from dispatchers.adapters.http_client.request_writer import Outgoing
from dispatchers.adapters.http_client.transport import Answer, Transport
from dispatchers.adapters.trust import Tls, for_http
from dispatchers.delivery import NATIVE, Adapter, CannotTell, Delivery, KeyFormat, Outcome, Rejected
from dispatchers.threads import as_async, is_async
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy, Window
from outbox.errors import ConfigurationError

log = logging.getLogger("outbox.dispatcher")


class HttpAdapter(Adapter):
    """Sends one request for each send. It never repeats a request and follows no redirect.

    base_url: the beginning of every URL.
    origins: without `base_url`: the origins that absolute URLs may have ("https://crm.example.com", with the port if it is
        not the default). So no payload can send the credentials to another host.
    headers: sent with each request, credentials for example. They are never shown, and no payload may set them.
    key_header: the header for the child key; None for a service without keys.
    window: how long the service certainly remembers a key. FOREVER also fits requests that overwrite, such as an upsert or a
        PUT. None, the default: the service keeps no keys, so an entry that may have been executed is never sent again.
    statuses: what a status means if the service's documentation differs from `outcomes.STATUSES`: "delivered", "rejected",
        "conclusive", "key_conflict", "deferred", "in_progress", "unknown" or "final"; or a function of the `Answer` that
        returns an outcome.
    remember: a function of the `Answer` of a success. It returns the entry's result; by default the status, and the body if
        it is JSON of at most 8 KiB. Give your own if answers contain secrets.
    pinned: what else must not change between two attempts, such as the account of the credentials.
    max_answer_bytes: how many bytes of an answer's body are read.
    find: the status lookup: a function of the delivery and of `get`, which reads a URL of the service with the adapter's
        credentials and returns an `Answer` (`await get("/contacts?made_by=7")`). It returns a `Finding`. In a sync function,
        call `get` without `await`.
    proxy: the URL of a proxy, http:// or https://; by default HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY decide.
    tls: an `ssl.SSLContext`, or the path of a file or directory of authorities; by default SSL_CERT_FILE, SSL_CERT_DIR, or
        httpx's authorities.
    reuse: False for a connection of its own for each send: then no answer can belong to another send.
    transport: replaces real connections in tests.
    timeout, key_format, replays_errors, at_least_once, retry: as in `Adapter`. Connecting and TLS get up to a
        third of the timeout each.

    The adapter sends the delivery's headers too, which are those of the trace: `traceparent` and `tracestate`. If the payload's
    `headers` or the adapter's own contain one of these, they replace both. An entry takes no options. The adapter obeys
    Retry-After. `Idempotent-Replayed: true` marks a repeated answer, and `replays` counts them.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        origins: Iterable[str] = (),
        headers: Mapping[str, str] | None = None,
        key_header: str | None = "Idempotency-Key",
        window: Window = None,
        timeout: timedelta = Adapter.timeout,
        key_format: KeyFormat = NATIVE,
        replays_errors: Literal["all", "2xx", "none"] = "none",
        at_least_once: bool = False,
        retry: RetryPolicy = DEFAULT_RETRY,
        pinned: str = "",
        statuses: Mapping[int, Reading] | None = None,
        remember: Callable[[Answer], Any] = remembered,
        max_answer_bytes: int = 1024 * 1024,
        find: Callable[[Delivery, Any], Any] | None = None,
        proxy: str | None = None,
        tls: Tls = None,
        reuse: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if isinstance(window, timedelta) and key_header is None:
            raise ConfigurationError(f"window={window!r} needs a key_header: without one the service remembers no key")
        if find is not None and not callable(find):
            raise ConfigurationError(f"find={find!r} must be a function of the delivery and of `get`, or None")
        self._service = Service.configured(
            base_url=base_url, origins=origins, headers=headers or {}, key_header=key_header
        )
        self._readings = _checked_readings(statuses or {})
        self._remember = remember
        self._credentials = credentials_of(headers or {}, [base_url])
        self._transport = Transport(
            timeout=timeout,
            max_answer_bytes=max_answer_bytes,
            tls=for_http(tls),
            proxy=proxy,
            reuse=reuse,
            origins=self._service.origins,
            transport=transport,
        )
        self.window = window
        self.timeout = timeout
        self.key_format = key_format
        self.replays_errors = replays_errors
        self.at_least_once = at_least_once
        self.retry = retry
        self.pinned = pinned if window is None else f"{self._service.place} {pinned}".rstrip()
        self.find = None if find is None else self._finding_by(find)
        self.replays = 0

    def __repr__(self) -> str:
        return f"HttpAdapter({self._service.place}, window={self.window!r})"

    async def send(self, delivery: Delivery) -> Outcome:
        try:
            request = self._request(delivery)
        except Malformed as refusal:
            return Rejected(str(refusal))
        try:
            answer = await self._transport.send(request)
        except FOREIGN as error:
            return outcome_of_error(error)
        self.replays += self._is_replayed(answer)
        return self._credentials.removed_from(self._outcome(answer, delivery))

    async def aclose(self) -> None:
        """Close the connections. You may use the adapter again afterwards."""
        await self._transport.aclose()

    def _finding_by(self, find: Callable[[Delivery, Any], Any]) -> Callable[[Delivery], Awaitable[Any]]:
        """The user's function. If it could not read, it is inconclusive."""
        ask = as_async(find, "outbox-find")

        async def finding(delivery: Delivery) -> Any:
            loop = asyncio.get_running_loop()

            async def get(url: str) -> Answer:
                return await self._transport.send(self._reading(url, delivery))

            def get_blocking(url: str) -> Answer:
                return asyncio.run_coroutine_threadsafe(get(url), loop).result()

            try:
                return self._credentials.removed_from(await ask(delivery, get if is_async(find) else get_blocking))
            except Malformed as error:
                return CannotTell(str(error))
            except FOREIGN as error:
                return CannotTell(without_answer(error))

        return finding

    def _reading(self, url: str, delivery: Delivery) -> Outgoing:
        return self._service.reading(url, passed_on=delivery.headers)

    def _request(self, delivery: Delivery) -> Outgoing:
        if delivery.options:
            raise Malformed("an HTTP entry takes no options: put everything that the request needs into its payload")
        try:
            payload = delivery.payload
        except (ValueError, RecursionError):
            raise Malformed("the payload cannot be read as JSON") from None
        return self._service.request(payload, key=delivery.key, passed_on=delivery.headers)

    def _outcome(self, answer: Answer, delivery: Delivery) -> Outcome:
        reading = self._readings.get(answer.status) or meaning_of(answer.status)
        if callable(reading):
            return reading(answer)
        result = self._result(answer, delivery) if reading == "delivered" else None
        repeated, errors_are_stored = self._is_replayed(answer), self.replays_errors == "all"
        return outcome_of(answer, reading, result=result, repeated=repeated, errors_are_stored=errors_are_stored)

    def _is_replayed(self, answer: Answer) -> bool:
        return is_replayed(answer)

    def _result(self, answer: Answer, delivery: Delivery) -> Any:
        """The result that is stored. The effect has happened, even if `remember` fails."""
        try:
            return self._remember(answer)
        except Exception as error:  # its text may quote the answer
            log.warning(
                "entry %s was delivered, but `remember` raised %s; its result is not stored",
                delivery.id,
                type(error).__name__,
            )
            return {"status": answer.status, "unparsed": True}


def _checked_readings(statuses: Mapping[int, Reading]) -> dict[int, Reading]:
    for status, reading in statuses.items():
        if not isinstance(status, int) or not 200 <= status <= 599:
            raise ConfigurationError(f"statuses: {status!r} is not an HTTP status from 200 to 599")
        known = reading in MEANINGS if isinstance(reading, str) else callable(reading)
        if not known or inspect.iscoroutinefunction(reading):
            raise ConfigurationError(
                f"statuses: {status} must be one of {', '.join(sorted(MEANINGS))}, or a plain function of the answer,"
                f" not {reading!r}"
            )
    return dict(statuses)
