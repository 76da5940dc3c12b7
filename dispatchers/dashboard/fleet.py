"""The dashboard of several databases: one page over all of them, and below it the pages of each."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from sqlalchemy.engine import URL
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from dispatchers.admin.read.summary import Summary
from dispatchers.dashboard import protection, rendering
from dispatchers.dashboard.access import Authenticator, Identity, identify
from dispatchers.dashboard.app import API, Dashboard, as_json_response
from dispatchers.dashboard.asgi import AsgiApp
from dispatchers.dashboard.failures import failure_of
from dispatchers.dashboard.pages import overview
from dispatchers.dashboard.parameters import Nothing
from dispatchers.dashboard.views import Reading, View
from dispatchers.dashboard.waiting import on_thread
from outbox.errors import ConfigurationError

ANSWER_SECONDS = 3.0  # a database that takes longer is shown as one that did not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSummary:
    """name: of the database. error: why it could not be read. Else its summary."""

    name: str
    summary: Summary | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSummaries:
    """The summaries of all databases, in the order in which they were named."""

    databases: list[DatabaseSummary]


class FleetDashboard(AsgiApp):
    """The dashboard of several databases, an ASGI app; mount it under any prefix.

    databases: the URL of each database by its name. authenticate, settings: those of a `Dashboard`, for all of them.
    Each database has its own pages below its name. Raises `ConfigurationError` as a `Dashboard`.
    """

    def __init__(self, databases: Mapping[str, str | URL], *, authenticate: Authenticator, **settings: Any) -> None:
        if not databases:
            raise ConfigurationError("a dashboard needs a database")
        self._authenticate = authenticate
        self._members = {
            name: _Member(self, name, url, authenticate=authenticate, **settings) for name, url in databases.items()
        }
        mounts = [Mount(f"/{name}", member) for name, member in self._members.items()]
        routes = [Route("/", self._begin), *mounts]
        super().__init__(routes, self._missing)

    def close(self) -> None:
        for member in self._members.values():
            member.close()

    async def _begin(self, request: Request) -> Response:
        first = f"{rendering.prefix_of(request)}/{next(iter(self._members))}{ALL.path}"
        return await self._to_signed_in(request, RedirectResponse(first))

    async def _missing(self, request: Request, error: Exception) -> Response:
        name = protection.path_of(request.scope).removeprefix("/")
        if name in self._members:
            return await self._to_signed_in(request, RedirectResponse(f"{quote(name)}/"))
        return await self._to_signed_in(request, PlainTextResponse("there is no page at this address\n", 404))

    async def _to_signed_in(self, request: Request, answer: Response) -> Response:
        """The answer for an identity. Others get what the authenticator answers."""
        try:
            found = await identify(self._authenticate, request)
        except Exception as error:
            return PlainTextResponse(f"{failure_of(error).detail}\n", 500)
        if found is None:
            return PlainTextResponse("sign in to the app that hosts this dashboard\n", 401)
        return answer if isinstance(found, Identity) else protection.for_script(request, found)

    async def _summaries(self, identity: Identity) -> DatabaseSummaries:
        """The summaries of all databases, read at the same time."""
        return DatabaseSummaries(
            databases=await asyncio.gather(*(member.summary(identity) for member in self._members.values()))
        )


def _read_none(reading: Reading, query: Nothing) -> DatabaseSummaries:
    """Show what waits in every database of the fleet."""
    raise NotImplementedError  # `_summaries` reads all of them


ALL = View("databases", _read_none)


class _Member(Dashboard):
    """The pages of one database, and with them the page over all, which shares their sign-in and their look."""

    def __init__(self, fleet: FleetDashboard, name: str, url: str | URL, **settings: Any) -> None:
        self._fleet = fleet
        self._name = name
        super().__init__(url, **settings)

    def _routes(self) -> list[BaseRoute]:
        page, document = self._endpoint(self._all, as_json=False), self._endpoint(self._all_document, as_json=True)
        return [*super()._routes(), Route(ALL.path, page), Route(API + ALL.path, document)]

    def _rendered(self, request: Request, identity: Identity | None, template: str, **values: Any) -> str:
        above = rendering.prefix_of(request).removesuffix(f"/{self._name}")
        links = {name: f"{above}/{name}{overview.VIEW.path}" for name in self._fleet._members} if identity else {}
        return super()._rendered(request, identity, template, databases=links, database=self._name, **values)

    async def _all(self, request: Request, identity: Identity) -> Response:
        result = await self._fleet._summaries(identity)
        values = {"view": ALL, "title": ALL.title, "result": result, "csrf_token": protection.token_of(request)}
        values["views"] = []  # the pages are of one database
        return HTMLResponse(await run_in_threadpool(self._rendered, request, identity, ALL.template, **values))

    async def _all_document(self, request: Request, identity: Identity) -> Response:
        return as_json_response(await self._fleet._summaries(identity))

    async def summary(self, identity: Identity) -> DatabaseSummary:
        """What the overview of this database shows, or why it cannot."""
        try:
            found = await on_thread(ANSWER_SECONDS, "it is not shown", self._read, overview.VIEW, identity, Nothing())
        except Exception as error:
            return DatabaseSummary(name=self._name, error=failure_of(error).detail)
        return DatabaseSummary(name=self._name, summary=found)
