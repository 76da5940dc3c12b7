"""The guards of destinations that are paused or have a rate, each removed by itself."""

from dataclasses import replace
from typing import Any

from dispatchers.flow_control import state as flow_state
from dispatchers.pipeline.flow_monitor import FlowMonitor
from simulation.mutants import Patch, around, without
from simulation.reference import ReferenceStore
from simulation.trace import LEASE


def unpaused(original: Any, row: Any, *rest: Any) -> Any:
    return original(replace(row, paused=False), *rest)


def pauses_are_for_the_sweep(original: Any, store: ReferenceStore, quota: Any, now: Any) -> bool:
    row = store.flow.get(quota.destination)
    is_shut: bool = (row is None or not row.paused) and original(store, quota, now)
    return is_shut


def without_a_rate(original: Any, row: Any, limits: Any, *rest: Any) -> Any:
    return original(row, replace(limits, rate=None, burst=None), *rest)


def alone(original: Any, row: Any, *rest: Any) -> Any:
    """As if no other dispatcher had taken a permit."""
    return original(replace(row, permits_taken=()), *rest)


def none_taken(original: Any, row: Any, *rest: Any) -> Any:
    return replace(original(row, *rest), permits_taken=row.permits_taken)


def free_before_the_lease_ends(original: Any, taken: Any, now: Any, *rest: Any) -> Any:
    return original(taken, now + LEASE / 2, *rest)


FLOW_CONTROL_MUTANTS: dict[str, Patch] = {
    "a pause is not heeded": around(flow_state, "closed_until", unpaused),
    "a pause is heeded only by who has heard of it": around(ReferenceStore, "_is_shut", pauses_are_for_the_sweep),
    "what is paused grows older": without(FlowMonitor, "memory", lambda self, entry, memory: memory),
    "what a claim takes does not use the rate up": around(flow_state, "claimed", without_a_rate),
    "a claim takes more than the rate leaves": around(flow_state, "admitted", without_a_rate),
    "the permits that others have taken are not counted": around(flow_state, "admitted", alone),
    "a claim does not take its permits": around(flow_state, "claimed", none_taken),
    "permits are free before their lease ends": around(flow_state, "still_taken", free_before_the_lease_ends),
}
