"""The outcomes of Temporal's answers: one row for each status of gRPC. Pure."""

from typing import Final

from temporalio.api.enums.v1 import WorkflowExecutionStatus
from temporalio.api.errordetails.v1 import NotFoundFailure, WorkflowExecutionAlreadyStartedFailure
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionResponse
from temporalio.service import RPCError, RPCStatusCode

from dispatchers.delivery import Absent, CannotTell, Deferred, Delivered, Finding, Found, Outcome, Rejected, Unknown

REFUSED_FOR_ALL: Final = frozenset(
    {
        RPCStatusCode.UNAUTHENTICATED,
        RPCStatusCode.PERMISSION_DENIED,
        RPCStatusCode.RESOURCE_EXHAUSTED,
        RPCStatusCode.FAILED_PRECONDITION,
        RPCStatusCode.UNIMPLEMENTED,
    }
)
"""Credentials, limits, a namespace that is not active in this cluster, or no Temporal: nothing was executed."""
LOST: Final = frozenset({RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED})
"""After these the connection may be cut off from the others."""


def started(key: str, run_id: str) -> dict[str, str]:
    return {"workflow_id": key, "run_id": run_id}


def outcome_of_error(key: str, error: RPCError) -> Outcome:
    """The outcome of a start that was answered with an error. The reason quotes no text of it."""
    status = error.status
    if status == RPCStatusCode.ALREADY_EXISTS:
        found = WorkflowExecutionAlreadyStartedFailure()
        if _detail(error, found):
            return Delivered(started(key, found.run_id), replayed=True)
        return Unknown(status.name)
    if status == RPCStatusCode.INVALID_ARGUMENT:
        return Rejected(status.name)
    if status == RPCStatusCode.NOT_FOUND:
        return Deferred("NOT_FOUND: no such namespace")
    if status in REFUSED_FOR_ALL:
        return Deferred(status.name, cooldown=True)
    return Unknown(status.name)


def finding_of(key: str, workflow: str, answer: DescribeWorkflowExecutionResponse) -> Finding:
    about = answer.workflow_execution_info
    if about.execution.workflow_id != key or about.type.name != workflow:
        return CannotTell("another workflow has this id")
    status = WorkflowExecutionStatus.Name(about.status).removeprefix("WORKFLOW_EXECUTION_STATUS_")
    return Found({**started(key, about.execution.run_id), "status": status})


def finding_of_error(error: RPCError) -> Finding:
    """Absence is what the active cluster of the namespace says of this workflow. A missing namespace has another detail."""
    absent = NotFoundFailure()
    if error.status == RPCStatusCode.NOT_FOUND and _detail(error, absent):
        if absent.current_cluster == absent.active_cluster:
            return Absent()
        return CannotTell("the namespace is active in another cluster")
    return CannotTell(error.status.name)


def _detail(error: RPCError, found: NotFoundFailure | WorkflowExecutionAlreadyStartedFailure) -> bool:
    """Whether the error has a detail of this type, which is then read into `found`."""
    try:
        return any(detail.Unpack(found) for detail in error.grpc_status.details)
    except Exception:  # protobuf's own for bytes that are no message
        return False
