"""The requests: lists of their records with filters, and one request with the entries that it caused."""

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from dispatchers.admin.read.plain_values import Place
from dispatchers.admin.read.requests import RequestDetails, RequestFilter, RequestPage, list_requests, read_request
from dispatchers.dashboard.parameters import parameter
from dispatchers.dashboard.views import Reading, View

REQUESTS_DEFAULT = 50
MAX_REQUESTS = 500
MAX_ROWS = 20_000
"""How many records are compared with a filter for one page: some 50 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsQuery:
    """Which requests, and from where."""

    state: Literal["answered", "accepted", "leased", "mismatched"] = parameter(
        "Answered requests, open ones, or those whose key came with another request.", "answered"
    )
    key: str | None = parameter("Only this key, for example an Idempotency-Key.", None)
    scope: str | None = parameter("Only of this caller.", None)
    source: str | None = parameter("Only from this source: http, app, inbox:...", None)
    env: str | None = parameter("Only of this deployment.", None)
    status: int | None = parameter("Only answers with this HTTP status.", None, minimum=100, maximum=599)
    after: Place[UUID] | None = parameter("The position where the previous page ended.", None)
    limit: int = parameter("How many requests at most.", REQUESTS_DEFAULT, minimum=1, maximum=MAX_REQUESTS)


def read(reading: Reading, query: RequestsQuery) -> RequestPage:
    """List the records of requests by state, key, caller, source or status."""
    wanted = RequestFilter(
        state=None if query.state == "answered" else query.state,
        key=query.key,
        env=query.env,
        scope=query.scope,
        source=query.source,
        status=query.status,
    )
    connection, tables = reading.connection, reading.tables
    return list_requests(connection, tables, wanted, max_requests=query.limit, after=query.after, max_rows=MAX_ROWS)


VIEW = View("requests", read)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestQuery:
    """Which request."""

    id: UUID = parameter("The request's id.")


def read_one(reading: Reading, query: RequestQuery) -> RequestDetails:
    """Show one request with the entries that it caused."""
    return read_request(reading.connection, reading.tables, query.id)


REQUEST = View("request", read_one, path="/requests/{id}", in_navigation=False)
