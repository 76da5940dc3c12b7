"""The health of the tables: sizes, dead rows, and what keeps autovacuum from removing those."""

from dispatchers.admin.read.table_health import DatabaseHealth, read_database_health
from dispatchers.dashboard.parameters import Nothing
from dispatchers.dashboard.views import Reading, View


def read(reading: Reading, query: Nothing) -> DatabaseHealth:
    """Show the sizes of the tables, their dead rows and what holds back the vacuum."""
    return read_database_health(reading.connection, reading.tables)


VIEW = View("tables", read)
