"""Reads the state of the pipeline's parts, for the dispatcher's observer."""

from dispatchers.pipeline.failover_guard import FailoverGuard
from dispatchers.pipeline.flow_monitor import FlowMonitor
from dispatchers.pipeline.outcome_collector import OutcomeCollector
from dispatchers.pipeline.scheduler import Scheduler
from dispatchers.pipeline.workers import Workers
from dispatchers.telemetry.events import Levels


def read_levels(
    workers: Workers, scheduler: Scheduler, flow: FlowMonitor, collector: OutcomeCollector, guard: FailoverGuard
) -> Levels:
    return Levels(
        in_flight=workers.in_flight,
        claimed_ahead=workers.claimed_ahead,
        permits={name: scheduler.permits_of(name) for name in scheduler.destinations},
        callbacks_waiting=len(collector.with_callbacks),
        unsettled=len(collector.in_batches),
        throttled=flow.throttled,
        suspended=guard.suspended is not None,
        served=guard.is_current,
    )
