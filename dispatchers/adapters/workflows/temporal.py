"""Temporal: starts one workflow for each entry, with the child key as its id.

    orders = TemporalAdapter(address="temporal.example.com:7233", task_queue="orders", window=timedelta(days=3))
    Dispatcher(..., adapters={"orders": orders})

    outbox.enqueue(session, "orders.fulfil", {"number": "C-1"}, parent="order:C-1")     # the workflow `orders.fulfil`

The workflow gets the payload as its only argument. While Temporal has a workflow with this id, running or ended, it starts no
other.
"""

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from temporalio.api.common.v1 import Payload, Payloads, WorkflowExecution, WorkflowType
from temporalio.api.enums.v1 import WorkflowIdConflictPolicy, WorkflowIdReusePolicy
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import (
    DescribeNamespaceRequest,
    DescribeWorkflowExecutionRequest,
    StartWorkflowExecutionRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode, TLSConfig

from dispatchers.adapters.one_connection import NotReady, OneConnection
from dispatchers.adapters.places import OPERATION, Places, PlacesAdapter, Unsendable
from dispatchers.adapters.workflows.temporal_answers import (
    LOST,
    finding_of,
    finding_of_error,
    outcome_of_error,
    started,
)
from dispatchers.delivery import Absent, CannotTell, Deferred, Delivered, Delivery, Finding, Outcome, Rejected
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy
from outbox.errors import ConfigurationError

IDENTITY: Final = "sqlalchemy-outbox"
MAX_PAYLOAD_BYTES: Final = 4_000_000  # a frontend takes 4 MiB, and answers a larger request as if it were overloaded
UNREADABLE: Final = frozenset({RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNIMPLEMENTED})
FAILURES: Final = (RPCError, RuntimeError, OSError)  # RuntimeError: the SDK cannot connect; OSError: a TimeoutError too


class TemporalAdapter(PlacesAdapter):
    """Starts workflows. A worker of yours runs them. It needs `temporalio`.

    address: "host:port" of Temporal's frontend. namespace: of all workflows.
    task_queue: the queue of all workflows.
    window: how long the namespace keeps a workflow after its end: at most its retention. When the adapter connects, it compares
        the two, if it may read the namespace; while the retention is shorter, it sends nothing.
    workflow: the type of each operation's workflow: a template with `{operation}`, or a mapping from operations to types. An
        entry's `options={"workflow": ...}` replaces it.
    api_key: of Temporal Cloud. tls: True, or a `temporalio.service.TLSConfig`, because the SDK takes no `ssl.SSLContext`.
        Neither is ever shown.
    """

    def __init__(
        self,
        *,
        address: str,
        task_queue: str,
        window: timedelta,
        namespace: str = "default",
        workflow: str | Mapping[str, str] = OPERATION,
        api_key: str | None = None,
        tls: bool | TLSConfig = False,
        timeout: timedelta = timedelta(seconds=10),
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        for name, value in (("task_queue", task_queue), ("namespace", namespace)):
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"{name}={value!r} must be a text that is not empty")
        if not isinstance(address, str) or "/" in address or ":" not in address:
            raise ConfigurationError("address must be host:port, such as 'temporal.example.com:7233' (it is not shown)")
        if not isinstance(window, timedelta) or window <= timedelta(0):
            raise ConfigurationError(f"window={window!r} must be a positive timedelta: Temporal forgets what has ended")
        self.window = self._window = window
        self.timeout = timeout
        self.retry = retry
        self.pinned = f"temporal {namespace}"
        self._address = address
        self._namespace = namespace
        self._queue = TaskQueue(name=task_queue)
        self._places = Places("workflow", workflow)
        self._api_key = api_key
        self._tls = tls
        self._connection = OneConnection(self._open)

    def __repr__(self) -> str:
        return f"TemporalAdapter(namespace={self._namespace!r}, window={self._window!r})"

    async def send(self, delivery: Delivery) -> Outcome:
        try:
            request = self._start(delivery)
        except Unsendable as problem:
            return Rejected(str(problem))
        connection = await self._connection.ready_or_refusal(self._latest(delivery), FAILURES)
        if isinstance(connection, Deferred):
            return connection
        try:
            async with connection:
                answer = await connection.service.start_workflow_execution(request, timeout=_left(delivery))
        except RPCError as error:
            return outcome_of_error(delivery.key, error)
        return Delivered(started(delivery.key, answer.run_id))

    async def find(self, delivery: Delivery) -> Finding:
        """Describe the workflow with this id."""
        execution = WorkflowExecution(workflow_id=delivery.key)
        request = DescribeWorkflowExecutionRequest(namespace=self._namespace, execution=execution)
        try:
            workflow = self._places.of(delivery)
            connection = self._connection.present() or await self._connection.ready(self._latest(delivery))
            async with connection:
                answer = await connection.service.describe_workflow_execution(request, timeout=_left(delivery))
        except RPCError as error:
            finding = finding_of_error(error)
        except Unsendable as problem:
            return CannotTell(str(problem))
        except (NotReady, *FAILURES) as error:
            return CannotTell(f"no connection: {type(error).__name__}")
        else:
            return finding_of(delivery.key, workflow, answer)
        if finding == Absent() and delivery.age > self._window:
            return CannotTell(f"Temporal has no such workflow, and may have deleted one after {self._window}")
        return finding

    async def aclose(self) -> None:
        """Drop the connection. You may use the adapter again afterwards."""
        await self._connection.aclose()

    def _start(self, delivery: Delivery) -> StartWorkflowExecutionRequest:
        """Equal for each attempt: Temporal answers a request id that it knows with the run that it has started."""
        if len(delivery.payload_json) > MAX_PAYLOAD_BYTES:
            raise Unsendable(f"the payload is larger than {MAX_PAYLOAD_BYTES} bytes")
        argument = Payload(metadata={"encoding": b"json/plain"}, data=delivery.payload_json)
        return StartWorkflowExecutionRequest(
            namespace=self._namespace,
            workflow_id=delivery.key,
            workflow_type=WorkflowType(name=self._places.of(delivery)),
            task_queue=self._queue,
            input=Payloads(payloads=[argument]),
            identity=IDENTITY,
            request_id=delivery.key,
            workflow_id_reuse_policy=WorkflowIdReusePolicy.WORKFLOW_ID_REUSE_POLICY_REJECT_DUPLICATE,
            workflow_id_conflict_policy=WorkflowIdConflictPolicy.WORKFLOW_ID_CONFLICT_POLICY_FAIL,
        )

    def _latest(self, delivery: Delivery) -> float:
        """When a connection must be there, by the event loop's clock."""
        return delivery.deadline - self.timeout.total_seconds() / 2

    async def _open(self) -> "_Connection":
        client = await Client.connect(
            self._address,
            namespace=self._namespace,
            api_key=self._api_key,
            tls=self._tls,
            identity=IDENTITY,
            connect_timeout=self.timeout / 3,
        )
        connection = _Connection(client)
        await self._check(connection)
        return connection

    async def _check(self, connection: "_Connection") -> None:
        """Raises `NotReady` if the namespace forgets workflows earlier than declared."""
        request = DescribeNamespaceRequest(namespace=self._namespace)
        try:
            answer = await connection.service.describe_namespace(request, timeout=self.timeout / 3)
        except RPCError as error:
            if error.status in UNREADABLE:
                return
            raise NotReady(f"nothing was sent, the namespace: {error.status.name}") from None
        retention = answer.config.workflow_execution_retention_ttl.ToTimedelta()
        if retention < self._window:
            raise NotReady(
                f"the namespace keeps workflows for {retention}, and the adapter declares {self._window}", cooldown=True
            )


class _Connection:
    """A client of the SDK, which repeats nothing. After a call without an answer the next send opens another one."""

    def __init__(self, client: Client) -> None:
        self.service = client.workflow_service
        self._calls = 0
        self._is_lost = False

    @property
    def is_usable(self) -> bool:
        return not self._is_lost

    @property
    def is_awaited(self) -> bool:
        return self._calls > 0

    async def aclose(self) -> None:
        """The SDK closes the socket when nothing refers to the client."""
        self._is_lost = True

    async def __aenter__(self) -> None:
        self._calls += 1

    async def __aexit__(self, cls: object, error: BaseException | None, traceback: object) -> None:
        self._calls -= 1
        if isinstance(error, asyncio.CancelledError) or (isinstance(error, RPCError) and error.status in LOST):
            self._is_lost = True


def _left(delivery: Delivery) -> timedelta:
    """The time for an answer. A call is sent even if there is hardly any: it is recognised if it is sent again."""
    return timedelta(seconds=max(0.01, delivery.deadline - asyncio.get_running_loop().time()))
