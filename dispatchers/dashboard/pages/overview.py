"""The overview: what waits, what was sent within the last hour, and what needs attention."""

from dispatchers.admin.read.summary import Summary, read_summary
from dispatchers.dashboard.parameters import Nothing
from dispatchers.dashboard.views import Reading, View


def read(reading: Reading, query: Nothing) -> Summary:
    """Show what waits, and the rates and durations of the last hour."""
    return read_summary(reading.connection, reading.tables)


VIEW = View("overview", read)
