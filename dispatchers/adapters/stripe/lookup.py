"""The status lookup at Stripe. It reads lists, which are current, and never uses search, which lags.

An object made by `.create` has the entry's id in its metadata. A list begins with the newest object. So the lookup reads until
the time when the entry was enqueued, and has then seen every possible effect. Source: docs.stripe.com/api/pagination;
docs.stripe.com/search, "Data freshness": search is "eventually consistent", so it proves nothing.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import stripe

from dispatchers.adapters.retry_after import date
from dispatchers.adapters.stripe.outcomes import Exchange, remembered
from dispatchers.delivery import Absent, CannotTell, Delivery, Finding, Found

MARK: Final = "outbox_id"
MAX_METADATA_KEYS: Final = 50  # docs.stripe.com/metadata
MAX_PAGE_OBJECTS: Final = 100  # docs.stripe.com/api/pagination, "limit"
MAX_PAGES: Final = 50  # 5,000 objects take about 20 s; a send's timeout does not allow more
SLACK: Final = timedelta(minutes=5)  # between the clocks of Stripe's own machines
RATES_APART: Final = 0.01  # the difference between the rates of two clocks

LISTED: Final[Mapping[str, tuple[str, ...]]] = {
    "payment_intents": ("customer",),
    "setup_intents": ("customer",),
    "charges": ("customer",),
    "refunds": ("payment_intent", "charge"),
    "transfers": ("destination",),
    "payouts": (),
    "topups": (),
    "customers": (),
    "checkout.sessions": ("customer",),
}
"""The objects with a lookup, and the parameters that narrow their lists. Two kinds are missing: objects that can leave their list
(a deleted draft invoice, a cancelled subscription), and objects without a list by time. Source: docs.stripe.com/api, "List all
..."."""

ListPage = Callable[[dict[str, Any]], Awaitable[Any]]


class Unlistable(Exception):
    """No list can prove anything about this entry. The text has the reason."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted object: one with `mark` in its metadata, in the list of `kind` with these filters."""

    kind: str
    mark: str
    filters: Mapping[str, str]
    confirmed: bool

    @classmethod
    def of(cls, delivery: Delivery) -> "Wanted":
        """Raises `Unlistable`."""
        kind, _, action = delivery.operation.partition(".")[2].rpartition(".")
        if action != "create" or kind not in LISTED:
            raise Unlistable(f"Stripe has no list that could prove the outcome of {delivery.operation}")
        payload = delivery.payload
        if not isinstance(payload, dict) or not bears_mark(payload):
            raise Unlistable(f"its payload left no room for metadata.{MARK}, or sets it itself")
        filters = {name: payload[name] for name in LISTED[kind] if isinstance(payload.get(name), str)}
        return cls(kind, str(delivery.id), filters, payload.get("confirm") in (True, "true"))

    def finding(self, found: Any) -> Finding:
        """The finding, given that `found` has the entry's id."""
        result = remembered(found, Exchange())
        status = result.get("status")
        refused = (
            status == "failed" if self.kind == "charges" else self.confirmed and status == "requires_payment_method"
        )
        if refused:  # Stripe keeps a declined object
            return CannotTell(f"found {result.get('id')}, but declined: its status is {status}")
        return Found(result)


def bears_mark(payload: Mapping[str, Any]) -> bool:
    """Whether the object made from `payload` gets the entry's id."""
    metadata = payload.get("metadata") or {}
    return isinstance(metadata, dict) and len(metadata) < MAX_METADATA_KEYS and MARK not in metadata


async def find_effect(wanted: Wanted, list_page: ListPage, exchange: Exchange, age: timedelta) -> Finding:
    """Read the list from the newest object on, until the effect is found or the objects are older than `age`.

    The age of an object counts by Stripe's clock, because ours and the database's may be wrong by years.
    """
    params: dict[str, Any] = {"limit": MAX_PAGE_OBJECTS, **wanted.filters}
    since: datetime | None = None
    for _ in range(MAX_PAGES):
        page = await list_page(params)
        since = since or _stripes_now(exchange) - age * (1 + RATES_APART) - SLACK
        for each in page.data:
            if _mark_of(each) == wanted.mark:
                return wanted.finding(each)
        if not page.has_more or not page.data or page.data[-1].created < since.timestamp():
            return Absent()
        params |= {"starting_after": page.data[-1].id, "created": {"gte": int(since.timestamp())}}
    return CannotTell(f"Stripe lists more than {MAX_PAGES * MAX_PAGE_OBJECTS} {wanted.kind} since then")


def _stripes_now(exchange: Exchange) -> datetime:
    now = date(exchange.headers.get("date", ""))
    if now is None:
        raise Unlistable("Stripe's answer has no valid Date header")
    return now


def _mark_of(found: stripe.StripeObject) -> str | None:
    metadata = getattr(found, "metadata", None)
    if not isinstance(metadata, stripe.StripeObject):
        raise Unlistable("Stripe lists an object without metadata")
    mark: str | None = metadata.to_dict().get(MARK)
    return mark
