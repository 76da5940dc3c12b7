"""Klarna: captures and refunds, by the Order Management API."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import basic
from dispatchers.adapters.providers.key_places import Header
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal
from dispatchers.delivery import KeyFormat

ORDER = "/ordermanagement/v1/orders/{order_id}"

klarna = Profile(
    name="klarna",
    title="Klarna",
    as_of=date(2026, 11, 22),
    sources=(
        "https://docs.klarna.com/api/escalation-and-retry-policy/",
        "https://docs.klarna.com/api/ordermanagement/",
        "https://docs.klarna.com/resources/error-details/errors-in-order-management/",
    ),
    base_url="https://api.klarna.com",
    auth=basic("{username}", "{password}"),
    key=Header("Klarna-Idempotency-Key", KeyFormat(encoding="uuid", uuid_version=5)),
    window=timedelta(hours=24),
    stores="success",
    operations={
        "orders.capture": Post(f"{ORDER}/captures", success=201),
        "orders.refund": Post(f"{ORDER}/refunds", success=201),
        "orders.cancel": Post(f"{ORDER}/cancel", success=204),
        "orders.acknowledge": Post(f"{ORDER}/acknowledge", success=204),
        "orders.extend_authorization": Post(f"{ORDER}/extend-authorization-time", success=204),
        "orders.release_authorization": Post(f"{ORDER}/release-remaining-authorization", success=204),
        "captures.add_shipping_info": Post(f"{ORDER}/captures/{{capture_id}}/shipping-info", success=204),
    },
    errors=(
        # "This operation is not allowed based on business rules": the page of errors.
        (Signal(403, body={"error_code": "CAPTURE_NOT_ALLOWED"}), "rejected"),
        (Signal(403, body={"error_code": "REFUND_NOT_ALLOWED"}), "rejected"),
        (Signal(403, body={"error_code": "CANCEL_NOT_ALLOWED"}), "rejected"),
        (Signal(403, body={"error_code": "NOT_ALLOWED"}), "rejected"),
    ),
    error=("error_code",),
    error_answer={"error_code": "UNEXPECTED_ERROR", "error_messages": ["An error"], "correlation_id": "1"},
    notes=(
        "Klarna documents keys for Order Management only.",
        "Outside Europe base_url is https://api-na.klarna.com or https://api-oc.klarna.com.",
    ),
)
