"""Any operation of AWS with an idempotency token: the child key is the token, and botocore's model says where it goes.

    volumes = AwsAdapter("ec2", "create_volume", window=timedelta(hours=24))
    Dispatcher(..., adapters={"ec2.create_volume": volumes})

    outbox.enqueue(session, "ec2.create_volume", {"AvailabilityZone": "eu-central-1a", "Size": 10}, parent="order:42")

The payload has the parameters of boto3's method. Without a token of its own, boto3 makes up a random one for each call: a job
that is repeated would then make a second volume.
"""

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from botocore import exceptions as botocore_errors

from dispatchers.adapters.brokers.aws.answers import outcome_of_error, readable
from dispatchers.adapters.brokers.aws.client import AwsClient
from dispatchers.adapters.brokers.aws.publisher import TIMEOUT
from dispatchers.adapters.providers.json_paths import put
from dispatchers.adapters.providers.key_places import NoKey, with_key
from dispatchers.adapters.providers.operations import Post, problem_of
from dispatchers.delivery import (
    NATIVE,
    Adapter,
    Delivered,
    Delivery,
    InProgress,
    KeyConflict,
    KeyFormat,
    Outcome,
    Rejected,
)
from dispatchers.names import did_you_mean
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy, Window
from outbox.errors import ConfigurationError

TOKEN: Final = KeyFormat(encoding="uuid", uuid_version=4, max_chars=36)
"""The form of boto3's own tokens, so each operation takes it. Source: botocore/handlers.py, generate_idempotent_uuid."""

MISMATCH: Final = re.compile(r"Idempoten(t|cy)(Parameter|Token)?Mismatch")
IN_PROGRESS: Final = re.compile(r"TransactionInProgress|IdempotentRequestInProgress|RequestInProgress")
ID: Final = re.compile(r"\w*(Id|ID|Arn|ARN|Identifier)|id|arn|identifier")

WINDOWS: Final[Mapping[tuple[str, str], timedelta]] = {
    # "valid for 10 minutes after the first request that uses it is completed": botocore 1.44.5, dynamodb, ClientRequestToken
    ("dynamodb", "transact_write_items"): timedelta(minutes=10),
}
"""How long AWS remembers a token, where botocore's model states it."""


class AwsAdapter(Adapter):
    """Calls one operation of one service of AWS. It needs `boto3`.

    service, operation: as in `boto3.client(service).operation(...)`.
    window: how long the service remembers a token: see the operation's page. You must give it, unless `WINDOWS` has it.
    key: `NoKey(...)` for an operation without a token, to say that you know it: an entry is then sent at most once. Its mark puts
        the child key into the parameters.
    at_least_once: as in `Adapter`, for an operation without a token.
    remember: a function of boto3's answer that returns the entry's result; by default the ids and ARNs at its top. Answers may
        contain secrets.
    timeout: how long one send may take. A request leaves within its first quarter or not at all.
    boto3_session: a `boto3.Session`. By default boto3 finds the region and the credentials as it always does.
    endpoint_url: as for `boto3.client`. max_threads: how many requests run at the same time.
    pinned: what else must not change between two attempts, such as the account.

    boto3's own retries are off. Raises `ConfigurationError` for an operation that does not exist, or has no token.
    """

    def __init__(
        self,
        service: str,
        operation: str,
        *,
        window: Window = None,
        key: NoKey | None = None,
        at_least_once: bool = False,
        remember: Callable[[Mapping[str, Any]], Any] | None = None,
        timeout: timedelta = TIMEOUT,
        retry: RetryPolicy = DEFAULT_RETRY,
        boto3_session: Any = None,
        endpoint_url: str | None = None,
        max_threads: int = 10,
        pinned: str = "",
    ) -> None:
        self._client = AwsClient(
            service, timeout=timeout, boto3_session=boto3_session, endpoint_url=endpoint_url, max_threads=max_threads
        )
        self._operation = operation
        self._token = _token_of(self._client, service, operation, key)
        self._mark = None if key is None else key.mark
        self._remember = remember or _ids
        self.timeout = timeout
        self.retry = retry
        self.at_least_once = at_least_once
        self.search = None if key is None else key.search
        self.window = None if self._token is None else window or WINDOWS.get((service, operation))
        if self._token is not None and self.window is None:
            raise ConfigurationError(
                f"AwsAdapter({service!r}, {operation!r}) needs window=timedelta(...): how long {service} remembers"
                f" {self._token}. Its API reference states it"
            )
        self.key_format = NATIVE if self._token is None else TOKEN
        self.pinned = f"{service} {self._client.region} {pinned}".rstrip()

    def __repr__(self) -> str:
        return f"AwsAdapter({self._operation!r}, token={self._token!r}, window={self.window!r})"

    async def send(self, delivery: Delivery) -> Outcome:
        if delivery.options:
            return Rejected("an entry of AwsAdapter takes no options: put the parameters into its payload")
        parameters = delivery.payload
        if (problem := self._problem_of(parameters)) is not None:
            return Rejected(f"the payload of {delivery.operation} {problem}")
        if self._token is not None:
            parameters[self._token] = delivery.key
        elif self._mark is not None:
            put(parameters, self._mark.path, with_key(self._mark.value, delivery.key))
        try:
            answer = await self._client.call(self._operation, delivery.deadline, parameters)
        except Exception as error:  # botocore raises not only its own errors for an unusual answer
            return _outcome_of(error)
        return Delivered(self._remember(answer))

    async def aclose(self) -> None:
        """Close the connections. You may use the adapter again afterwards."""
        self._client.close()

    def _problem_of(self, parameters: Any) -> str | None:
        if (problem := problem_of(parameters, _CALL, NoKey(mark=self._mark), ())) is not None:
            return problem
        taken = self._token is not None and self._token in parameters
        return f"must not set {self._token!r}: the adapter puts the key there" if taken else None


_CALL: Final = Post("/")  # the parameters are an object, whatever the protocol makes of them


def _token_of(client: AwsClient, service: str, operation: str, key: NoKey | None) -> str | None:
    """The parameter that is the operation's token; None if the user knows that it has none."""
    names = client.operations
    if operation not in names:
        raise ConfigurationError(f"boto3's {service} has no operation {operation!r}{did_you_mean(operation, names)}")
    model = client.model_of(operation)
    tokens = list(model.idempotent_members)
    if key is not None:
        if tokens:
            raise ConfigurationError(f"{service}.{operation} has a token, {tokens[0]}: leave key= out")
        return None
    if not tokens:
        raise ConfigurationError(
            f"{service}.{operation} has no idempotency token, so a repeated call is executed again: give key=NoKey(...)"
            " to send each entry at most once"
        )
    _require_fit(service, operation, tokens[0], model.input_shape.members[tokens[0]].metadata)
    return str(tokens[0])


def _require_fit(service: str, operation: str, token: str, limits: Mapping[str, Any]) -> None:
    """The limits of the model allow a UUID, as they do for all operations of botocore 1.44."""
    chars = TOKEN.max_chars
    if not limits.get("min", 0) <= chars <= limits.get("max", chars):
        raise ConfigurationError(f"{service}.{operation}: {token} takes no key of {chars} characters")


def _outcome_of(error: Exception) -> Outcome:
    if isinstance(error, botocore_errors.ClientError):
        code = readable(error.response.get("Error", {}).get("Code"))
        if MISMATCH.search(code):
            return KeyConflict(code)
        if IN_PROGRESS.search(code):
            return InProgress()
    return outcome_of_error(error)


def _ids(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The ids and ARNs at the top of an answer."""
    return {name: value for name, value in answer.items() if ID.fullmatch(name) and isinstance(value, str)}
