"""TemporalAdapter in the conformance suites, with a frontend made of the SDK's protobufs."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode
from support.fake_temporal import HANG, LOSE, NO_LISTENER, FakeTemporal, Refused, Run
from temporalio.api.errordetails.v1 import NotFoundFailure, WorkflowExecutionAlreadyStartedFailure
from temporalio.api.workflowservice.v1 import DescribeNamespaceResponse, StartWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from dispatchers import (
    Absent,
    Adapter,
    CannotTell,
    Deferred,
    Delivered,
    Found,
    InProgress,
    KeyConflict,
    Rejected,
    Unknown,
)
from dispatchers.adapters import TemporalAdapter
from dispatchers.testing.conformance import TAGS, AdapterSuite, Scenario
from dispatchers.testing.conformance_lookups import LookupSuite
from outbox.keys import encode_native

API_KEY = "open-sesame-5eb63bbb"
KEY = encode_native(TAGS[0])
WEEK = timedelta(days=7)


def refused(code: StatusCode, detail: Any = None, rpc: str = "StartWorkflowExecution") -> dict[str, Any]:
    return {rpc: Refused(code, f"ada@example.com {API_KEY}", detail)}


def holding(workflow: str = "orders.fulfil", request_id: str = KEY) -> dict[str, Any]:
    request = StartWorkflowExecutionRequest(workflow_id=KEY, request_id=request_id)
    request.workflow_type.name = workflow
    return {"runs": {KEY: Run(request)}}


class OfTemporal:
    operation = "orders.fulfil"
    payload: Any = {"to": "ada@example.com"}  # noqa: RUF012
    secrets = (API_KEY,)
    private = ("ada@example.com",)

    @contextmanager
    def remote(self) -> Iterator[FakeTemporal]:
        remote = FakeTemporal()
        remote.start()
        try:
            yield remote
        finally:
            remote.kill()

    def adapter(self, remote: FakeTemporal, timeout: timedelta) -> Adapter:
        return self.made(f"127.0.0.1:{remote.port}", timeout=timeout)

    def made(self, server: str, **settings: Any) -> Adapter:
        return TemporalAdapter(address=server, task_queue="orders", window=WEEK, api_key=API_KEY, tls=False, **settings)


class TestTemporal(OfTemporal, AdapterSuite):
    client_exceptions = (RPCError,)
    scenarios = (
        Scenario("started", {}, Delivered),
        Scenario("started before by the same request", holding(), Delivered),
        Scenario("continued as another run", holding(request_id="another"), Delivered),
        Scenario("in use, without a detail", refused(StatusCode.ALREADY_EXISTS), Unknown),
        Scenario("in use, with another detail", refused(StatusCode.ALREADY_EXISTS, NotFoundFailure()), Unknown),
        Scenario(
            "in use", refused(StatusCode.ALREADY_EXISTS, WorkflowExecutionAlreadyStartedFailure(run_id="1")), Delivered
        ),
        Scenario("an argument that it does not take", refused(StatusCode.INVALID_ARGUMENT), Rejected),
        Scenario("no such namespace", refused(StatusCode.NOT_FOUND), Deferred),
        Scenario("wrong key", refused(StatusCode.UNAUTHENTICATED), Deferred),
        Scenario("no permission", refused(StatusCode.PERMISSION_DENIED), Deferred),
        Scenario("limited", refused(StatusCode.RESOURCE_EXHAUSTED), Deferred),
        Scenario("active in another cluster", refused(StatusCode.FAILED_PRECONDITION), Deferred),
        Scenario("unavailable", refused(StatusCode.UNAVAILABLE), Unknown),
        Scenario("failed", refused(StatusCode.INTERNAL), Unknown),
        Scenario("aborted", refused(StatusCode.ABORTED), Unknown),
        Scenario("started, and the answer was lost", {"StartWorkflowExecution": LOSE}, Unknown),
        Scenario("hangs", {"StartWorkflowExecution": HANG}, Unknown, hangs=True),
        Scenario("connection refused", {NO_LISTENER: ""}, Deferred, requests=0),
        Scenario("hangs before the start", {"GetSystemInfo": HANG}, Deferred, requests=0, hangs=True),
        Scenario("no namespace", {"namespaces": set()}, Deferred, requests=0),
        Scenario("a namespace that forgets earlier", {"retention_seconds": 24 * 3600}, Deferred, requests=0),
        Scenario("may not read it", refused(StatusCode.PERMISSION_DENIED, rpc="DescribeNamespace"), Delivered),
    )
    never = {  # noqa: RUF012
        KeyConflict: "Temporal compares neither type nor input",
        InProgress: "a workflow that runs was started",
    }

    def exception(self, cls: type[Exception], text: str) -> Exception:
        return RPCError(text, RPCStatusCode.UNAVAILABLE, b"no message")

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        async def fail(*arguments: object, **named: object) -> None:
            raise error

        async def connected(*arguments: object, **named: object) -> Any:
            return SimpleNamespace(
                workflow_service=SimpleNamespace(start_workflow_execution=fail, describe_namespace=namespace)
            )

        async def namespace(*arguments: object, **named: object) -> Any:
            answer = DescribeNamespaceResponse()
            answer.config.workflow_execution_retention_ttl.FromTimedelta(WEEK)
            return answer

        monkeypatch.setattr(Client, "connect", connected)
        return self.made("127.0.0.1:1")


class TestTemporalLookups(OfTemporal, LookupSuite):
    scenarios = (
        Scenario("started", holding(), Found),
        Scenario("not started", {}, Absent),
        Scenario("another workflow has the id", holding("other"), CannotTell),
        Scenario("no such namespace", {"namespaces": set()}, CannotTell),
        Scenario("a standby cluster", {"active_cluster": "elsewhere"}, CannotTell),
        Scenario(
            "not found, by something else", refused(StatusCode.NOT_FOUND, rpc="DescribeWorkflowExecution"), CannotTell
        ),
        Scenario("unavailable", refused(StatusCode.UNAVAILABLE, rpc="DescribeWorkflowExecution"), CannotTell),
        Scenario("hangs", {"DescribeWorkflowExecution": HANG}, CannotTell, hangs=True),
        Scenario("connection refused", {NO_LISTENER: ""}, CannotTell),
    )
