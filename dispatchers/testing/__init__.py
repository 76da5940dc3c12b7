"""Tools for tests of apps (send what was enqueued, or kill the process at a point) and for tests of adapters.

    from dispatchers.testing import drain

- `drain` sends all that was enqueued, now. `failpoint` kills the process, or calls a function, at a named point.
- pytest loads `plugin.py`, which has fixtures for these tasks. `OutboxEntries`, `AssertEnqueued`, `OutboxDrain`, `Drained`,
  `OutboxClock` and `CopiedDatabase` are what they give, for annotations.
- `temporary_postgres` starts a real PostgreSQL. `running_stripe` serves a strict imitation of Stripe's API, and `service_of`
  one of any service that has a profile.
- `AdapterSuite`, `HttpSuite`, `LookupSuite` and `HttpLookupSuite` are the test suites for adapters, `ProviderSuite` the one for
  profiles. They need pytest. The module `faulty_http` has the server that they use, and what it can do to a request.

Each name is imported at its first use, because each needs other packages. See docs/testing.md and docs/adapters.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatchers.testing.clock import OutboxClock, PassedTime
    from dispatchers.testing.conformance import AdapterSuite
    from dispatchers.testing.conformance_frame import Scenario
    from dispatchers.testing.conformance_http import HttpLookupSuite, HttpSuite
    from dispatchers.testing.conformance_lookups import LookupSuite
    from dispatchers.testing.conformance_providers import ProviderSuite
    from dispatchers.testing.copied_databases import CopiedDatabase
    from dispatchers.testing.draining import drain
    from dispatchers.testing.failpoints import failpoint
    from dispatchers.testing.faulty_http import FaultyHttp, answer
    from dispatchers.testing.outbox_under_test import (
        AssertEnqueued,
        AssertNotEnqueued,
        Drained,
        OutboxDrain,
        OutboxEntries,
    )
    from dispatchers.testing.postgres import PostgresUnavailable, temporary_postgres
    from dispatchers.testing.provider_core import FakeProvider, Refusal
    from dispatchers.testing.provider_service import RunningProvider, service_of
    from dispatchers.testing.service_faults import ServiceFault
    from dispatchers.testing.stripe_service import RunningStripe, running_stripe

__all__ = [
    "AdapterSuite",
    "AssertEnqueued",
    "AssertNotEnqueued",
    "CopiedDatabase",
    "Drained",
    "FakeProvider",
    "FaultyHttp",
    "HttpLookupSuite",
    "HttpSuite",
    "LookupSuite",
    "OutboxClock",
    "OutboxDrain",
    "OutboxEntries",
    "PassedTime",
    "PostgresUnavailable",
    "ProviderSuite",
    "Refusal",
    "RunningProvider",
    "RunningStripe",
    "Scenario",
    "ServiceFault",
    "answer",
    "drain",
    "failpoint",
    "running_stripe",
    "service_of",
    "temporary_postgres",
]

_HOMES = {
    "AdapterSuite": "conformance",
    "AssertEnqueued": "outbox_under_test",
    "AssertNotEnqueued": "outbox_under_test",
    "CopiedDatabase": "copied_databases",
    "Drained": "outbox_under_test",
    "FakeProvider": "provider_core",
    "FaultyHttp": "faulty_http",
    "HttpLookupSuite": "conformance_http",
    "HttpSuite": "conformance_http",
    "LookupSuite": "conformance_lookups",
    "OutboxClock": "clock",
    "OutboxDrain": "outbox_under_test",
    "OutboxEntries": "outbox_under_test",
    "PassedTime": "clock",
    "PostgresUnavailable": "postgres",
    "ProviderSuite": "conformance_providers",
    "Refusal": "provider_core",
    "RunningProvider": "provider_service",
    "RunningStripe": "stripe_service",
    "Scenario": "conformance_frame",
    "ServiceFault": "service_faults",
    "answer": "faulty_http",
    "drain": "draining",
    "failpoint": "failpoints",
    "running_stripe": "stripe_service",
    "service_of": "provider_service",
    "temporary_postgres": "postgres",
}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
