"""The dashboard as an ASGI app: its routes, and the steps of each request: who asks, whether they may, what the answer is."""

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from dispatchers.admin.read.compared import missing_rights
from dispatchers.admin.read.plain_values import plain
from dispatchers.dashboard import alerts, protection, rendering
from dispatchers.dashboard.access import Authenticator, Identity, identify, rights_of
from dispatchers.dashboard.actions import Action, Deciding, DecidingInBatches
from dispatchers.dashboard.asgi import AsgiApp
from dispatchers.dashboard.database import Databases
from dispatchers.dashboard.decision_texts import BulkName, checked_second_person
from dispatchers.dashboard.failures import PROBLEM, Failure, failure_of
from dispatchers.dashboard.incoming import form_of, json_of, path_of, query_of
from dispatchers.dashboard.openapi import document
from dispatchers.dashboard.pages import ACTIONS, VIEWS
from dispatchers.dashboard.parameters import parse
from dispatchers.dashboard.views import Reading, View, without_keys
from dispatchers.dashboard.waiting import on_thread
from outbox.configuration import Configuration
from outbox.errors import ConfigurationError
from outbox.instance import Outbox
from outbox.sql.schema.rights import Right

API = "/api"
SPECIFICATION = f"{API}/openapi.json"
RELOAD = "reload the page to try again"
LOOK_FIRST = "whether this was recorded is unknown, so look at the audit log before you try again"
Answering = Callable[[Request, Identity], Awaitable[Response]]


class Dashboard(AsgiApp):
    """The dashboard, an ASGI app; mount it under any prefix.

    url: of the outbox's database, or an Engine (not an AsyncEngine). authenticate: `(request) -> Identity | None`, sync or async;
    there is no default. read_url: where pages are read, by default `url`. schema, prefix: of the tables. statement_timeout: the
    limit of each statement. trusted_origins: origins such as `https://ops.example.com` whose forms are accepted, for a proxy that
    changes the Host header. second_person: decisions, such as `cancel` or `did_not_happen`, that another operator must confirm.
    sign_out: the address of the app's own page, to which the pages link.
    outbox: the app's, with its secret and env; with it operators may ask again, which derives keys. None by default.
    Raises `ConfigurationError` for a database or a setting that cannot work.
    """

    def __init__(
        self,
        url: str | URL | Engine,
        *,
        authenticate: Authenticator,
        read_url: str | URL | Engine | None = None,
        schema: str | None = None,
        prefix: str = "outbox_",
        statement_timeout: timedelta = timedelta(seconds=5),
        trusted_origins: Collection[str] = (),
        second_person: Collection[BulkName] = (),
        outbox: Outbox | None = None,
        sign_out: str | None = None,
    ) -> None:
        if not callable(authenticate):
            raise ConfigurationError(
                f"authenticate={authenticate!r}: give a function (request) -> Identity | None: the dashboard has no users"
            )
        self._databases = Databases(url, read_url, schema, prefix, statement_timeout)
        self._authenticate = authenticate
        self._second_person = checked_second_person(second_person)
        self._configuration = _checked(outbox, schema, prefix)
        self._trusted = protection.checked_origins(trusted_origins)
        self._sign_out = sign_out
        self._templates = rendering.environment()
        self._incidents = alerts.RecentIncidents()
        super().__init__(self._routes(), self._missing)

    def close(self) -> None:
        self._databases.close()

    def _routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = [Mount("/static", _Static(directory=rendering.STATIC))]
        routes.append(Route(SPECIFICATION, self._endpoint(self._specification, as_json=True)))
        for view in VIEWS:
            routes.append(Route(view.path, self._endpoint(self._page(view), as_json=False)))
            routes.append(Route(API + view.api_path, self._endpoint(self._document(view), as_json=True)))
        for action in ACTIONS:
            routes.append(Route(action.path, self._endpoint(self._form(action), as_json=False), methods=["POST"]))
            routes.append(Route(API + action.path, self._endpoint(self._call(action), as_json=True), methods=["POST"]))
        return routes

    # --- the steps that every request has

    def _endpoint(self, answer: Answering, *, as_json: bool) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            identity = None
            try:
                found = await identify(self._authenticate, request)
                if isinstance(found, Response) and (not as_json or found.status_code >= 400):
                    return protection.for_script(request, found)
                if not isinstance(found, Identity):
                    raise Failure(401, "not_signed_in", "sign in to the app that hosts this dashboard")
                identity = found
                if request.method not in protection.SAFE_METHODS:
                    protection.require_same_origin(request, self._trusted)
                return await answer(request, identity)
            except Exception as error:
                return self._failed(request, failure_of(error), identity, as_json=as_json)

        return endpoint

    async def _missing(self, request: Request, error: Exception) -> Response:
        """The answer for a missing page. Only signed-in users learn which pages exist."""
        path = protection.path_of(request.scope)
        as_json = path.startswith(f"{API}/")

        async def answer(request: Request, identity: Identity) -> Response:
            if path.endswith("/") and path.strip("/") and request.method in protection.SAFE_METHODS:
                return without_slash(path)
            missing = self._failed(request, failure_of(error), identity, as_json=as_json)
            missing.headers.update(getattr(error, "headers", None) or {})  # `Allow`
            return missing

        return await self._endpoint(answer, as_json=as_json)(request)

    def _failed(self, request: Request, failure: Failure, identity: Identity | None, *, as_json: bool) -> Response:
        headers = {"Retry-After": "5"} if failure.status == 503 else {}
        if as_json:
            problem = json.dumps(failure.problem())
            return Response(problem, failure.status, headers=headers, media_type=PROBLEM)
        back = rendering.back_of(request) if request.method == "POST" else None
        text = self._rendered(request, identity, "failure.html", title=failure.title, failure=failure, back=back)
        return HTMLResponse(text, failure.status, headers=headers)

    def _rendered(self, request: Request, identity: Identity | None, template: str, **values: Any) -> str:
        prefix = rendering.prefix_of(request)
        common: dict[str, Any] = {
            "identity": identity,
            "views": [view for view in VIEWS if view.in_navigation and identity.may(view.role)] if identity else [],
            "alerts": [],
            "badges": {},
            "view": None,
            "csrf_token": "",
            "sign_out": self._sign_out,
            "done": None,
            "second_person": self._second_person,
            "databases": {},
            "database": None,
            "url": lambda path, **query: rendering.address(prefix, path, query),
            "static": lambda path: rendering.address(prefix, f"/static/{path}", {"v": rendering.STAMP}),
            "here": request.url.path.removeprefix(prefix) + (f"?{request.url.query}" if request.url.query else ""),
        }
        return self._templates.get_template(template).render(common | values)

    async def _on_thread(self, unknown: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return await on_thread(self._databases.answer_seconds, unknown, function, *arguments)

    # --- views

    def _page(self, view: View) -> Answering:
        async def answer(request: Request, identity: Identity) -> Response:
            _require(identity, view)
            given = query_of(request)
            query: Any = self._query(view, identity, given)
            result, shared = await self._on_thread(RELOAD, self._read_page, view, identity, query)
            token = protection.token_of(request)
            values = {"view": view, "title": view.title, "query": query, "result": result, "csrf_token": token} | shared
            values["query_values"] = {name: each for name, each in given.items() if name not in request.path_params}
            done = next((action.done for action in ACTIONS if action.name == request.query_params.get("done")), None)
            text = await run_in_threadpool(self._rendered, request, identity, view.template, **values, done=done)
            response = HTMLResponse(text)
            protection.keep_token(request, response, token)
            return response

        return answer

    def _document(self, view: View) -> Answering:
        async def answer(request: Request, identity: Identity) -> Response:
            _require(identity, view)
            query: Any = self._query(view, identity, query_of(request))
            return as_json_response(await self._on_thread(RELOAD, self._read, view, identity, query))

        return answer

    def _query(self, view: View, identity: Identity, given: Mapping[str, Sequence[Any]]) -> Any:
        query: Any = parse(view.query, given)
        _require_rights(identity, query)
        return query

    def _read(self, view: View, identity: Identity, query: Any) -> Any:
        with self._reading(view, identity) as connection:
            return self._read_with(connection, view, identity, query)

    def _read_page(self, view: View, identity: Identity, query: Any) -> tuple[Any, dict[str, Any]]:
        """What the page shows, and what every page shows, read with one connection."""
        with self._reading(view, identity) as connection:
            found = self._read_with(connection, view, identity, query)
            return found, alerts.shown(self._incidents.read(connection, self._databases.tables))

    def _reading(self, view: View, identity: Identity) -> AbstractContextManager[Connection]:
        as_operator = view.decides and rights_of(identity)
        return self._databases.reading_as_operator() if as_operator else self._databases.reading()

    def _read_with(self, connection: Connection, view: View, identity: Identity, query: Any) -> Any:
        found = view.read(Reading(connection=connection, **self._given(identity)), query)
        return found if Right.KEYS in rights_of(identity) else without_keys(found)

    def _read_shared(self) -> dict[str, Any]:
        """What every page shows. A page that reports a decision is shown also without."""
        with suppress(SQLAlchemyError, Failure), self._databases.reading() as connection:
            return alerts.shown(self._incidents.read(connection, self._databases.tables))
        return {}

    async def _specification(self, request: Request, identity: Identity) -> Response:
        return as_json_response(document(VIEWS, ACTIONS, server=rendering.prefix_of(request) + API))

    # --- actions

    def _form(self, action: Action) -> Answering:
        async def answer(request: Request, identity: Identity) -> Response:
            given = await form_of(request)
            protection.require_token(request, next(iter(given.pop(protection.FIELD, [])), None))
            _require(identity, action)
            back = next(iter(given.pop("back", [])), "/")
            form: Any = parse(action.form, {**given, **path_of(request)})
            _require_rights(identity, form)
            result = await self._on_thread(LOOK_FIRST, self._run, action, identity, form)
            if action.template is not None:
                token = protection.token_of(request)
                values = {"title": action.summary, "result": result, "csrf_token": token, "back": rendering.local(back)}
                values |= await self._on_thread(LOOK_FIRST, self._read_shared)
                return HTMLResponse(self._rendered(request, identity, action.template, **values))
            target = rendering.with_done(rendering.prefix_of(request), back, action.name)
            return RedirectResponse(target, 303)

        return answer

    def _call(self, action: Action) -> Answering:
        async def answer(request: Request, identity: Identity) -> Response:
            if not protection.is_without_cookies(request):
                protection.require_token(request, request.headers.get(protection.HEADER))
            _require(identity, action)
            parameters = {**await json_of(request), **path_of(request)}
            form: Any = parse(action.form, parameters, as_json=True)
            _require_rights(identity, form)
            return as_json_response(await self._on_thread(LOOK_FIRST, self._run, action, identity, form))

        return answer

    def _run(self, action: Action, identity: Identity, form: Any) -> Any:
        try:
            return self._decide(action, identity, form)
        finally:
            self._incidents.forget()

    def _decide(self, action: Action, identity: Identity, form: Any) -> Any:
        if action.in_batches:
            with self._databases.deciding_in_batches() as engine:
                return action.run(DecidingInBatches(engine=engine, **self._given(identity)), form)
        with self._databases.deciding() as connection:
            return action.run(Deciding(connection=connection, **self._given(identity)), form)

    def _given(self, identity: Identity) -> dict[str, Any]:
        return {
            "tables": self._databases.tables,
            "identity": identity,
            "second_person": self._second_person,
            "configuration": self._configuration,
        }


class _Static(StaticFiles):
    """The scripts and styles. Their addresses on the pages change with their contents, so a browser may keep them."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        try:
            return await super().get_response(path, scope)
        except HTTPException as error:  # a page would have the links of a dashboard that is mounted here
            return PlainTextResponse("there is no such file\n", error.status_code, error.headers)

    def file_response(self, *args: Any, **settings: Any) -> Response:
        response = super().file_response(*args, **settings)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def _checked(outbox: Outbox | None, schema: str | None, prefix: str) -> Configuration | None:
    if outbox is None:
        return None
    if not isinstance(outbox, Outbox):
        raise ConfigurationError(f"outbox= must be an outbox.Outbox, not {type(outbox).__name__}")
    found = outbox.configuration
    if (found.schema, found.prefix) != (schema, prefix):
        raise ConfigurationError(
            f"outbox= has schema {found.schema!r} and prefix {found.prefix!r}, and the dashboard {schema!r} and {prefix!r}:"
            " give both the same"
        )
    return found


def _require(identity: Identity, wanted: View | Action) -> None:
    if not identity.may(wanted.role):
        raise Failure(403, "role", f"{identity.name!r} does not have the role {wanted.role}, which this request needs")


def _require_rights(identity: Identity, query: Any) -> None:
    """Refuse a parameter that compares with what the identity may not read."""
    given = [each.name for each in fields(query) if getattr(query, each.name) not in (None, (), False)]
    for name, right in missing_rights(given, rights_of(identity)).items():
        raise Failure(403, "role", f"{name}: {identity.name!r} may not read what this compares with ({right})", name)


def without_slash(path: str) -> Response:
    """A redirect to the same page without the final slash, by a relative address: a proxy may use another prefix."""
    return RedirectResponse(f"../{quote(path.rstrip('/').rpartition('/')[2])}")


def as_json_response(value: Any) -> Response:
    """The JSON answer of a value that `plain` knows."""
    return JSONResponse(plain(value))
