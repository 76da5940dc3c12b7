"""The overview: what waits, what was sent within the last hour, and what needs attention."""

from dispatchers.admin.read.summary import Summary, read_summary
from dispatchers.dashboard.parameters import Nothing
from dispatchers.dashboard.views import Reading, View


def read(reading: Reading, query: Nothing) -> Summary:
    """Counts up to a limit and estimates above it; rates and durations of the last hour."""
    return read_summary(reading.connection, reading.tables)


VIEW = View(
    name="overview",
    path="/overview",
    title="Overview",
    summary="Show what waits, and the rates and durations of the last hour",
    read=read,
    result=Summary,
    template="overview.html",
)
