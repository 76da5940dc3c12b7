"""A frontend of Temporal, made of the SDK's own protobufs: it loses answers and fails as the real server does on no request.

It checks what the real one checks of a start, and decides as it does: it answers a known request id with the run that was started
under it; for an id in use, `REJECT_DUPLICATE` with `FAIL` starts nothing; details name the failure. Nothing runs a workflow here.
Source: temporalio/temporal, service/history/api/startworkflow/api.go, handleConflict, and service/frontend/workflow_handler.go.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any
from uuid import uuid4

import grpc
from google.protobuf.any_pb2 import Any as Detail
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from temporalio.api.common.v1 import GrpcStatus
from temporalio.api.enums.v1 import WorkflowExecutionStatus, WorkflowIdConflictPolicy, WorkflowIdReusePolicy
from temporalio.api.errordetails.v1 import (
    NamespaceNotFoundFailure,
    NotFoundFailure,
    WorkflowExecutionAlreadyStartedFailure,
)
from temporalio.api.workflowservice import v1 as service

RPCS = ("GetSystemInfo", "DescribeNamespace", "StartWorkflowExecution", "DescribeWorkflowExecution")
MAX_ID_CHARS = 1000
MAX_BLOB_BYTES = 2 * 1024 * 1024
LOSE, HANG, NO_LISTENER = "lose", "hang", "no listener"


class Refused(Exception):
    """An answer with an error. detail: as the real server adds it."""

    def __init__(self, code: grpc.StatusCode, text: str, detail: Message | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.detail = detail


class Run:
    """A workflow that was started."""

    def __init__(self, request: Any) -> None:
        self.id = str(uuid4())
        self.request = request
        self.status = WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_RUNNING


class FakeTemporal:
    """In threads of its own. `behave` takes a mapping from an rpc to `Refused`, `HANG` or `LOSE`: to do it and lose the answer.

    The mapping may also have new values of attributes.
    """

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[bytes] = []
        self.runs: dict[str, Run] = {}
        self.namespaces = {"default"}
        self.retention_seconds = 7 * 24 * 3600
        self.active_cluster = "active"
        self.api_keys: list[str] = []
        self._at: Mapping[str, Any] = {}
        self._thawed = threading.Event()
        self._server: Any = None

    def behave(self, behaviour: Mapping[str, Any]) -> None:
        self._at = behaviour
        for name, value in behaviour.items():
            if name == NO_LISTENER:
                self.kill()
            elif name not in RPCS:
                setattr(self, name, value)

    def start(self) -> None:
        self._thawed.clear()
        self._server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._answering(name), getattr(service, f"{name}Request").FromString, _serialized
            )
            for name in RPCS
        }
        named = "temporal.api.workflowservice.v1.WorkflowService"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(named, handlers),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def kill(self) -> None:
        """Calls in flight get no answer of the handler. What was started remains, as in Temporal's database."""
        self._thawed.set()
        self._server.stop(0).wait()

    def _answering(self, name: str) -> Callable[[Any, Any], Message]:
        does: Callable[[Any], Message] = {
            "GetSystemInfo": self._get_system_info,
            "DescribeNamespace": self._describe_namespace,
            "StartWorkflowExecution": self._start_workflow,
            "DescribeWorkflowExecution": self._describe_workflow,
        }[name]

        def answer(request: Any, context: Any) -> Message:
            self.api_keys += [value for key, value in context.invocation_metadata() if key == "authorization"]
            how = self._at.get(name)
            try:
                if isinstance(how, Refused):
                    if name == "StartWorkflowExecution":
                        self.requests.append(request.SerializeToString())
                    raise how
                if how == HANG and name != "StartWorkflowExecution":  # a start is done, and its answer hangs
                    self._thawed.wait(60)
                answer: Message = does(request)
            except Refused as refused:
                _abort(context, refused)
            if how == HANG:
                self._thawed.wait(60)
            if how in (HANG, LOSE):
                context.abort(grpc.StatusCode.UNAVAILABLE, "ada@example.com")
            return answer

        return answer

    def _get_system_info(self, request: Any) -> Message:
        return service.GetSystemInfoResponse(server_version="1.29.0")

    def _describe_namespace(self, request: Any) -> Message:
        self._check_namespace(request)
        answer = service.DescribeNamespaceResponse()
        answer.config.workflow_execution_retention_ttl.CopyFrom(Duration(seconds=self.retention_seconds))
        return answer

    def _start_workflow(self, request: Any) -> Message:
        self.requests.append(request.SerializeToString())
        self._check_namespace(request)
        for field in ("workflow_id", "request_id"):
            if not 0 < len(getattr(request, field)) <= MAX_ID_CHARS:
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{field} is not set or exceeds length limit")
        if not request.workflow_type.name or not request.task_queue.name:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "WorkflowType or TaskQueue is not set on request.")
        if sum(len(each.data) for each in request.input.payloads) > MAX_BLOB_BYTES:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "Blob data size exceeds limit.")
        run = self.runs.get(request.workflow_id)
        if run is None:
            run = self.runs[request.workflow_id] = Run(request)
        elif run.request.request_id != request.request_id:
            self._resolve_duplicate(request, run)
        return service.StartWorkflowExecutionResponse(run_id=run.id, started=True, status=run.status)

    def _resolve_duplicate(self, request: Any, run: Run) -> None:
        policies = request.workflow_id_reuse_policy, request.workflow_id_conflict_policy
        assert policies == (
            WorkflowIdReusePolicy.WORKFLOW_ID_REUSE_POLICY_REJECT_DUPLICATE,
            WorkflowIdConflictPolicy.WORKFLOW_ID_CONFLICT_POLICY_FAIL,
        ), "with any other policies the real server could start a second workflow"
        detail = WorkflowExecutionAlreadyStartedFailure(start_request_id=run.request.request_id, run_id=run.id)
        raise Refused(grpc.StatusCode.ALREADY_EXISTS, "Workflow execution already finished.", detail)

    def _describe_workflow(self, request: Any) -> Message:
        self._check_namespace(request)
        run = self.runs.get(request.execution.workflow_id)
        if run is None:
            detail = NotFoundFailure(current_cluster="active", active_cluster=self.active_cluster)
            raise Refused(grpc.StatusCode.NOT_FOUND, "workflow not found for ID", detail)
        answer = service.DescribeWorkflowExecutionResponse()
        about = answer.workflow_execution_info
        about.execution.workflow_id, about.execution.run_id = request.execution.workflow_id, run.id
        about.type.CopyFrom(run.request.workflow_type)
        about.status = run.status
        return answer

    def _check_namespace(self, request: Any) -> None:
        if request.namespace not in self.namespaces:
            detail = NamespaceNotFoundFailure(namespace=request.namespace)
            raise Refused(grpc.StatusCode.NOT_FOUND, "Namespace is not found.", detail)


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def _abort(context: Any, refused: Refused) -> None:
    status = GrpcStatus(code=refused.code.value[0], message=str(refused))
    if refused.detail is not None:
        detail = Detail()
        detail.Pack(refused.detail)
        status.details.append(detail)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(refused.code, str(refused))
