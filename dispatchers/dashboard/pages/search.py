"""Finding by what a customer or a service quotes: one field, for every kind of key and id."""

from dataclasses import dataclass

from dispatchers.admin.read.search import MAX_ROWS, Found, find
from dispatchers.dashboard.access import rights_of
from dispatchers.dashboard.parameters import parameter
from dispatchers.dashboard.views import Reading, View

ROWS_LIMIT = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuery:
    """What to find, and how far to search where no index helps."""

    text: str | None = parameter(
        "The beginning of an id, a parent key such as an Idempotency-Key, an ordering key, a child key, or a part of a service's"
        " answer such as pi_...",
        None,
    )
    rows: int = parameter("So many rows of each list are compared.", MAX_ROWS, minimum=1, maximum=ROWS_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPage:
    """found: None if nothing was asked for."""

    found: Found | None


def read(reading: Reading, query: SearchQuery) -> SearchPage:
    """Find entries and requests by what a customer or a service quotes."""
    if query.text is None:
        return SearchPage(found=None)
    rights = rights_of(reading.identity)
    found = find(reading.connection, reading.tables, query.text, max_rows=query.rows, rights=rights)
    return SearchPage(found=found)


VIEW = View("search", read, title="Find", is_live=False)
