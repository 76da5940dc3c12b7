"""Braintree: payments, by its GraphQL API."""

from datetime import date, timedelta

from dispatchers.adapters.providers.auth import basic
from dispatchers.adapters.providers.key_places import GraphQLArgument
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal
from dispatchers.delivery import KeyFormat

braintree = Profile(
    name="braintree",
    title="Braintree GraphQL",
    as_of=date(2026, 11, 22),
    sources=(
        "https://developer.paypal.com/braintree/graphql/integration_guides/idempotency",
        "https://developer.paypal.com/braintree/graphql/guides/making_api_calls",
        "https://github.com/braintree/braintree_python",
    ),
    base_url="https://payments.braintree-api.com/graphql",
    auth=basic("{public_key}", "{private_key}"),
    headers={"Braintree-Version": "{version}"},
    key=GraphQLArgument("input.apiRequestKey", KeyFormat(encoding="uuid"), used_as="(input: $input)"),
    window=timedelta(days=30),
    window_from="first_finished",
    stores="current_state",
    compares="parameters",
    operations={"mutation": Post("", answer={"data": {"mutation": {"id": "{id}"}}})},
    errors=(
        # Executed, although an error may say that a member of the answer could not be read: GraphQL's specification, 7.1.
        (Signal(200, body={"data": {"*": {}}}), "delivered"),
        (Signal(200, body={"errors": [{"extensions": {"errorClass": "VALIDATION"}}]}), "rejected"),
        (Signal(200, body={"errors": [{"extensions": {"errorClass": "NOT_FOUND"}}]}), "rejected"),
        (Signal(200, body={"errors": [{"extensions": {"errorClass": "UNSUPPORTED_CLIENT"}}]}), "rejected"),
        (Signal(200, body={"errors": [{"extensions": {"errorClass": "AUTHENTICATION"}}]}), "deferred"),
        (Signal(200, body={"errors": [{"extensions": {"errorClass": "AUTHORIZATION"}}]}), "rejected"),
        (Signal(200, body={"errors": [{"extensions": {"errorClass": "RESOURCE_LIMIT"}}]}), "deferred"),
        (Signal(200), "unknown"),
    ),
    error=("errors[].extensions.errorClass", "errors[].extensions.legacyCode"),
    notes=(
        "Write one mutation in a query: the key and the outcome are those of the whole query.",
        "Braintree opens these keys to selected merchants: ask it before you rely on them.",
        "The mutation's input must have apiRequestKey, and the query must pass it on: `(input: $input)`.",
        "A request still executing, another request under the key, and a wrong request all answer VALIDATION.",
    ),
)
