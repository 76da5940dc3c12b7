"""The effects of requests at the fake Stripe: payment intents, refunds, customers, and a stand-in for the rest.

Pure: ids and instants are handed in, effects are returned. Payment intents, refunds and customers refuse what Stripe
refuses: an unknown parameter, a missing amount. Any other path under /v1/ is taken as "create one of these".

One simplification: creating a payment intent charges at once, with or without `confirm`. That is what a test of
"charged once" is about.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

Parameters: TypeAlias = dict[str, Any]
Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """An effect, before the ledger says who asked for it."""

    id: str
    object: str
    amount: int | None = None
    currency: str | None = None
    customer: str | None = None
    parent: str | None = None
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class Result:
    """What the first execution under a key answered: this is what Stripe remembers.

    changed: the objects that it created or changed, by id; None for an object that it deleted.
    """

    status: int
    body: Json
    happened: tuple[Happened, ...] = ()
    changed: Mapping[str, Json | None] = field(default_factory=dict)


class Refused(Exception):
    """Refused before anything executed: Stripe remembers nothing of it."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error("invalid_request_error", message, code=code, param=param)


def error(kind: str, message: str, **details: Any) -> Json:
    """A body as Stripe writes its errors."""
    return {"error": {"type": kind, "message": message} | {k: v for k, v in details.items() if v is not None}}


DECLINES = {
    "pm_card_chargeDeclined": "generic_decline",
    "pm_card_visa_chargeDeclined": "generic_decline",
    "pm_card_chargeDeclinedInsufficientFunds": "insufficient_funds",
    "pm_card_chargeDeclinedExpiredCard": "expired_card",
}
"""Test cards that are declined, and how. Source: docs.stripe.com/testing, "Declined payments"."""

MAX_AMOUNT = 99_999_999  # eight digits: docs.stripe.com/api/payment_intents/create, "amount"

# docs.stripe.com/api/metadata
MAX_METADATA_ENTRIES = 50
MAX_METADATA_KEY_CHARS = 40
MAX_METADATA_VALUE_CHARS = 500


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# stripe-python 16.1.0, stripe/params/_{payment_intent,refund,customer}_create_params.py
KNOWN: Mapping[str, frozenset[str]] = {
    "payment_intents": words(
        "allowed_payment_method_types amount amount_details application_fee_amount automatic_payment_methods"
        " capture_method confirm confirmation_method confirmation_token currency customer customer_account description"
        " error_on_requires_action excluded_payment_method_types expand hooks mandate mandate_data metadata off_session"
        " on_behalf_of payment_details payment_method payment_method_configuration payment_method_data"
        " payment_method_options payment_method_types radar_options receipt_email return_url setup_future_usage"
        " shipping statement_descriptor statement_descriptor_suffix transfer_data transfer_group use_stripe_sdk"
    ),
    "refunds": words(
        "amount charge currency customer expand instructions_email metadata origin payment_intent reason"
        " refund_application_fee reverse_transfer"
    ),
    "customers": words(
        "address balance business_name cash_balance description email expand individual_name invoice_prefix"
        " invoice_settings metadata name next_invoice_sequence payment_method phone preferred_locales shipping source"
        " tax tax_exempt tax_id_data test_clock validate"
    ),
}
LISTED_BY = frozenset({"customer", "payment_intent", "charge", "destination"})
PREFIXES = {"payment_intents": "pi", "refunds": "re", "customers": "cus", "charges": "ch"}
SEGMENT = re.compile(r"[A-Za-z0-9_-]+")


class StripeObjects:
    """One account's objects, by id.

    new_id: makes an id that starts with a prefix.
    """

    def __init__(self, new_id: Callable[[str], str]) -> None:
        self._new_id = new_id
        self._objects: dict[str, Json] = {}

    def restore(self, stored: Json) -> None:
        """Take back an object of an earlier process. The objects are restored in the order of their creation."""
        self._objects[stored["id"]] = stored

    def prepare(self, method: str, path: str, parameters: Parameters) -> Callable[[datetime], Result]:
        """Check a POST or DELETE and answer with what executes it. Nothing changes until that is called.

        Raises `Refused` for what fails validation.
        """
        segments = path.removeprefix("/v1/").split("/")
        if not path.startswith("/v1/") or not all(SEGMENT.fullmatch(segment) for segment in segments):
            raise Refused(404, f"Unrecognized request URL ({method}: {path}).")
        check_metadata(parameters)
        resource = segments[0]
        if method == "DELETE":
            target = self._known(segments[-1])
            return lambda now: self._delete(target)
        if len(segments) > 1:
            target = self._known(segments[1])
            return lambda now: self._change(target, parameters)
        if resource in KNOWN:
            check_names(parameters, KNOWN[resource])
        match resource:
            case "payment_intents":
                check_payment_intent(parameters)
                return lambda now: self._charge(parameters, now)
            case "refunds":
                intent = self._refundable(parameters)
                return lambda now: self._refund(intent, parameters, now)
            case _:
                return lambda now: self._create(resource, parameters, now)

    def read(self, path: str, parameters: Parameters) -> Json:
        """Answer a GET: one object by its id, or a list, newest first. Always up to date, as Stripe's List is."""
        segments = path.removeprefix("/v1/").split("/")
        if not path.startswith("/v1/") or not 1 <= len(segments) <= 2:
            raise Refused(404, f"Unrecognized request URL (GET: {path}).")
        if len(segments) == 2:
            return self._known(segments[1])
        check_names(parameters, LISTED_BY | {"created", "limit", "starting_after", "ending_before", "expand"})
        kind = singular(segments[0])
        matching = [
            each
            for each in reversed(self._objects.values())
            if each["object"] == kind
            and all(each.get(name) == value for name, value in parameters.items() if name in LISTED_BY)
            and created_within(each, parameters.get("created"))
        ]
        return page(matching, parameters) | {"url": path}

    # --- executing

    def _charge(self, parameters: Parameters, now: datetime) -> Result:
        intent_id = self._new_id("pi")
        decline_code = DECLINES.get(parameters.get("payment_method", ""))
        intent: Json = {
            "id": intent_id,
            "object": "payment_intent",
            "amount": int(parameters["amount"]),
            "amount_received": 0 if decline_code else int(parameters["amount"]),
            "client_secret": f"{intent_id}_secret_fake",
            "created": int(now.timestamp()),
            "currency": parameters["currency"].lower(),
            "customer": parameters.get("customer"),
            "description": parameters.get("description"),
            "latest_charge": self._new_id("ch"),
            "livemode": False,
            "metadata": parameters.get("metadata") or {},
            "payment_method": None if decline_code else parameters.get("payment_method"),
            "status": "requires_payment_method" if decline_code else "succeeded",
        }
        self._objects[intent_id] = intent
        if decline_code:
            code = "expired_card" if decline_code == "expired_card" else "card_declined"
            details = {"code": code, "decline_code": decline_code, "charge": intent["latest_charge"]}
            declined = error("card_error", "Your card was declined.", **details, payment_intent=dict(intent))
            return Result(402, declined, changed={intent_id: intent})
        charge = happened(intent, id=intent["latest_charge"], object="charge", parent=intent_id)
        return Result(200, dict(intent), (charge,), {intent_id: intent})

    def _refund(self, intent: Json, parameters: Parameters, now: datetime) -> Result:
        refunded = sum(
            each["amount"]
            for each in self._objects.values()
            if each["object"] == "refund" and each["payment_intent"] == intent["id"]
        )
        left = intent["amount_received"] - refunded
        amount = int(parameters.get("amount", left))
        # Refused while executing, not while validating: like a declined card, this answer is remembered.
        if left == 0:
            message = f"Charge {intent['latest_charge']} has already been refunded."
            return Result(400, error("invalid_request_error", message, code="charge_already_refunded"))
        if amount > left:
            message = f"Refund amount ({amount}) is greater than unrefunded amount on charge ({left})"
            return Result(400, error("invalid_request_error", message, code="amount_too_large", param="amount"))
        refund: Json = {
            "id": self._new_id("re"),
            "object": "refund",
            "amount": amount,
            "charge": intent["latest_charge"],
            "created": int(now.timestamp()),
            "currency": intent["currency"],
            "metadata": parameters.get("metadata") or {},
            "payment_intent": intent["id"],
            "reason": parameters.get("reason"),
            "status": "succeeded",
        }
        self._objects[refund["id"]] = refund
        return Result(200, dict(refund), (happened(refund, parent=intent["id"]),), {refund["id"]: refund})

    def _create(self, resource: str, parameters: Parameters, now: datetime) -> Result:
        kind = singular(resource)
        made: Json = {
            "id": self._new_id(PREFIXES.get(resource, kind)),
            "object": kind,
            "created": int(now.timestamp()),
            "livemode": False,
            "metadata": {},
        } | parameters
        self._objects[made["id"]] = made
        return Result(200, dict(made), (happened(made),), {made["id"]: made})

    def _change(self, target: Json, parameters: Parameters) -> Result:
        target.update(parameters)
        return Result(200, dict(target), changed={target["id"]: target})

    def _delete(self, target: Json) -> Result:
        self._objects.pop(target["id"], None)
        answer = {"id": target["id"], "object": target["object"], "deleted": True}
        return Result(200, answer, changed={target["id"]: None})

    # --- looking up

    def _known(self, id: str) -> Json:
        if id not in self._objects:
            raise Refused(404, f"No such object: '{id}'", code="resource_missing", param="id")
        return self._objects[id]

    def _refundable(self, parameters: Parameters) -> Json:
        if "amount" in parameters:
            check_amount(parameters["amount"])
        for name, points_to in (("payment_intent", "id"), ("charge", "latest_charge")):
            if name in parameters:
                for each in self._objects.values():
                    if each["object"] == "payment_intent" and each[points_to] == parameters[name]:
                        return each
                message = f"No such {name}: '{parameters[name]}'"
                raise Refused(404, message, code="resource_missing", param=name)
        raise Refused(400, "One of the following params should be provided for this request: payment_intent or charge.")


def happened(made: Json, *, id: str = "", object: str = "", parent: str | None = None) -> Happened:
    """The effect that an object's creation is, or the given one. What has an unexpected shape is left out."""
    return Happened(
        id=id or made["id"],
        object=object or made["object"],
        amount=int(made["amount"]) if str(made.get("amount", "")).isdecimal() else None,
        currency=text_or_none(made.get("currency")),
        customer=text_or_none(made.get("customer")),
        parent=parent,
        metadata=made.get("metadata") or {},
    )


def text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def singular(resource: str) -> str:
    return resource.removesuffix("s")


# --- form encoding


def nested(pairs: Iterable[tuple[str, str]]) -> Parameters:
    """`metadata[order]=1` and `types[0]=card` as the dictionaries and lists that the client began with."""
    tree: Parameters = {}
    for name, value in pairs:
        head, *rest = re.findall(r"[^\[\]]+", name) or [name]
        node = tree
        for step, following in zip([head, *rest], rest, strict=False):
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                raise Refused(400, f"Invalid parameter name: {name}", param=name)
            head = following
        node[head] = value
    return {name: _with_lists(value) for name, value in tree.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if list(value) == [str(index) for index in range(len(value))]:
        return [_with_lists(each) for each in value.values()]
    return {name: _with_lists(each) for name, each in value.items()}


# --- validation


def check_names(parameters: Parameters, known: frozenset[str]) -> None:
    for name in parameters:
        if name not in known:
            raise Refused(400, f"Received unknown parameter: {name}", code="parameter_unknown", param=name)


def check_payment_intent(parameters: Parameters) -> None:
    for name in ("amount", "currency"):
        if not parameters.get(name):
            raise Refused(400, f"Missing required param: {name}.", code="parameter_missing", param=name)
    check_amount(parameters["amount"])
    if not re.fullmatch(r"[A-Za-z]{3}", str(parameters["currency"])):
        raise Refused(400, f"Invalid currency: {parameters['currency']}.", param="currency")


def check_amount(amount: Any) -> None:
    if not re.fullmatch(r"-?\d{1,18}", str(amount)):
        raise Refused(400, f"Invalid integer: {amount}", code="parameter_invalid_integer", param="amount")
    if not 1 <= int(amount) <= MAX_AMOUNT:
        raise Refused(
            400, f"Amount must be between 1 and {MAX_AMOUNT}", code="parameter_invalid_integer", param="amount"
        )


def check_metadata(parameters: Parameters) -> None:
    metadata = parameters.get("metadata") or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Refused(400, "Invalid metadata: must be a flat set of names and values.", param="metadata")
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise Refused(400, f"You cannot have more than {MAX_METADATA_ENTRIES} metadata entries.", param="metadata")
    for name, value in metadata.items():
        if len(name) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            message = f"Metadata allows {MAX_METADATA_KEY_CHARS} characters a key, {MAX_METADATA_VALUE_CHARS} a value."
            raise Refused(400, message, param=f"metadata[{name}]")


# --- lists


def created_within(each: Json, wanted: Any) -> bool:
    """`created=5`, or any of `created[gt|gte|lt|lte]`: instants in whole seconds."""
    bounds = wanted if isinstance(wanted, dict) else {} if wanted is None else {"gte": wanted, "lte": wanted}
    created = int(each["created"])
    for bound, value in bounds.items():
        if bound not in ("gt", "gte", "lt", "lte") or not str(value).isdigit():
            raise Refused(400, f"Invalid created[{bound}]: {json.dumps(value)}", param="created")
        instant = int(value)
        held = {"gt": created > instant, "gte": created >= instant, "lt": created < instant, "lte": created <= instant}
        if not held[bound]:
            return False
    return True


def page(matching: list[Json], parameters: Parameters) -> Json:
    """Up to `limit` of them (default 10, at most 100), after `starting_after` or before `ending_before`."""
    limit = str(parameters.get("limit", "10"))
    if not limit.isdigit() or not 1 <= int(limit) <= 100:
        raise Refused(400, f"Invalid limit: {limit}; 1 to 100 are allowed", param="limit")
    ids = [each["id"] for each in matching]
    rest = matching
    for name in ("starting_after", "ending_before"):
        if name in parameters:
            if parameters[name] not in ids:
                raise Refused(400, f"No such object: '{parameters[name]}'", code="resource_missing", param=name)
            at = ids.index(parameters[name])
            rest = matching[at + 1 :] if name == "starting_after" else matching[:at]
    shown = rest[-int(limit) :] if "ending_before" in parameters else rest[: int(limit)]
    return {"object": "list", "data": shown, "has_more": len(rest) > len(shown)}
