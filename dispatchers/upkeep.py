"""What the timetable calls, beside the sending."""

import logging

from dispatchers.claims import Store

log = logging.getLogger("outbox.upkeep")


async def report_gauges(store: Store) -> dict[str, dict[str, int]]:
    """Log how many entries each destination holds, by state; uncertain ones as a warning, since they need a look."""
    gauges = await store.gauges()
    for destination, states in sorted(gauges.items()):
        level = logging.WARNING if states.get("uncertain") else logging.INFO
        log.log(level, "%s: %s", destination, ", ".join(f"{count} {state}" for state, count in sorted(states.items())))
    return gauges
