"""The dispatcher: the process that sends entries to outside services under their child keys.

    effects = Operations()

    @effects.operation("crm.contacts.upsert", window=timedelta(days=7))
    async def upsert(delivery): ...

    Dispatcher(engine, include=[effects], adapters={"stripe": StripeAdapter(api_key=...)}).run()

If you write an adapter, read `delivery.py`. The main modules are `process/dispatcher_work.py` and
`pipeline/claim_loops.py`; `decide.py` decides the state transitions of an entry. Each name is imported at its first use,
because `outbox --help` must not wait for SQLAlchemy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatchers.callbacks import Completed, SettledEntry, Settlement
    from dispatchers.delivery import (
        NATIVE,
        Absent,
        Adapter,
        CannotTell,
        Deferred,
        Delivered,
        Delivery,
        Finding,
        Found,
        InProgress,
        KeyConflict,
        KeyFormat,
        Outcome,
        Rejected,
        Unknown,
    )
    from dispatchers.errors import CallbackError, DecisionRefused, EntryNotFound, Suspended
    from dispatchers.flow_control.state import Breaker, Limits
    from dispatchers.operations import Operations
    from dispatchers.periodic.schedules import Tick
    from dispatchers.process.dispatcher import Dispatcher
    from dispatchers.process.fleet import Fleet
    from dispatchers.time_limits import FOREVER, RetryPolicy

__all__ = [
    "FOREVER",
    "NATIVE",
    "Absent",
    "Adapter",
    "Breaker",
    "CallbackError",
    "CannotTell",
    "Completed",
    "DecisionRefused",
    "Deferred",
    "Delivered",
    "Delivery",
    "Dispatcher",
    "EntryNotFound",
    "Finding",
    "Fleet",
    "Found",
    "InProgress",
    "KeyConflict",
    "KeyFormat",
    "Limits",
    "Operations",
    "Outcome",
    "Rejected",
    "RetryPolicy",
    "SettledEntry",
    "Settlement",
    "Suspended",
    "Tick",
    "Unknown",
]

_HOMES = dict.fromkeys(__all__, "delivery") | {
    "Breaker": "flow_control.state",
    "CallbackError": "errors",
    "Completed": "callbacks",
    "DecisionRefused": "errors",
    "Dispatcher": "process.dispatcher",
    "EntryNotFound": "errors",
    "FOREVER": "time_limits",
    "Fleet": "process.fleet",
    "Limits": "flow_control.state",
    "Operations": "operations",
    "RetryPolicy": "time_limits",
    "SettledEntry": "callbacks",
    "Settlement": "callbacks",
    "Suspended": "errors",
    "Tick": "periodic.schedules",
}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
