"""The parts of a dispatcher's pipeline that several dispatchers of one process replace by shared ones."""

from collections.abc import Callable
from typing import NamedTuple

from dispatchers.pipeline.flow_monitor import FlowMonitor
from dispatchers.pipeline.scheduler import Scheduler
from dispatchers.pipeline.send_queue import SendQueue


class Parts(NamedTuple):
    """What makes each part."""

    flow: Callable[..., FlowMonitor] = FlowMonitor
    scheduler: Callable[..., Scheduler] = Scheduler
    queue: Callable[..., SendQueue] = SendQueue
