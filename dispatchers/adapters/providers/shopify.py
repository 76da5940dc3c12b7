"""Shopify: the Admin GraphQL API, for mutations with the directive @idempotent."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import in_header
from dispatchers.adapters.providers.key_places import GraphQLArgument
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal
from dispatchers.delivery import KeyFormat

shopify = Profile(
    name="shopify",
    title="Shopify",
    as_of=date(2026, 11, 22),
    sources=(
        "https://shopify.dev/docs/api/usage/implementing-idempotency",
        "https://shopify.dev/docs/api/usage/idempotent-requests",
    ),
    base_url="https://{shop}.myshopify.com/admin/api/{version}/graphql.json",
    auth=in_header("X-Shopify-Access-Token", "access_token"),
    key=GraphQLArgument("key", KeyFormat(encoding="uuid"), used_as="@idempotent(key: $key)"),
    window=timedelta(hours=24),
    stores="current_state",
    compares="parameters",
    in_flight=Signal(200, body={"data": {"*": {"userErrors": [{"code": "IDEMPOTENCY_CONCURRENT_REQUEST"}]}}}),
    mismatch=Signal(200, body={"data": {"*": {"userErrors": [{"code": "IDEMPOTENCY_KEY_PARAMETER_MISMATCH"}]}}}),
    operations={"mutation": Post("", answer={"data": {"mutation": {"id": "{id}", "userErrors": []}}})},
    errors=(
        (Signal(200, body={"data": {"*": {"userErrors": [{}]}}}), "rejected"),
        # Executed, although an error may say that a member of the answer could not be read: GraphQL's specification, 7.1.
        (Signal(200, body={"data": {"*": {}}}), "delivered"),
        (Signal(200, body={"errors": [{"extensions": {"code": "THROTTLED"}}]}), "deferred"),
        (Signal(200, body={"errors": [{"extensions": {"code": "ACCESS_DENIED"}}]}), "rejected"),
        (Signal(200), "unknown"),
    ),
    error=("errors[].extensions.code",),
    notes=(
        "Write one mutation in a query: the key and the outcome are those of the whole query.",
        "Only some mutations take the directive: those of inventories, and refundCreate.",
        "The query must declare $key: String!, and ask for userErrors { code }, or a refusal looks like a success.",
    ),
)
