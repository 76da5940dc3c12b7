"""The dashboard inside an app: under a prefix, with the app's own sign-in, middleware and proxy."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Mount
from support.cli_runner import put_uncertain
from support.dashboard import SITE, Browser, dashboard, signed_in
from support.database import Database
from support.entries import put_one, queue_row
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

import outbox
from dispatchers.stored_outcome import read_outcome


def in_fastapi(app: Any) -> Any:
    host = FastAPI()
    host.mount("/ops/outbox", app)
    return host


def in_starlette(app: Any) -> Any:
    return Starlette(routes=[Mount("/ops", routes=[Mount("/outbox", app)])])


def beside_django(app: Any) -> Any:
    from django.conf import settings

    if not settings.configured:  # as `http_requests.use_django` needs them, whose tests may come later in this process
        databases = {"default": {"ENGINE": "django.db.backends.postgresql"}}
        settings.configure(
            DATABASES=databases, USE_TZ=True, ALLOWED_HOSTS=["*"], LOGGING_CONFIG=None, ROOT_URLCONF=__name__
        )
    from django.core.asgi import get_asgi_application

    return Starlette(routes=[Mount("/ops/outbox", app), Mount("/", get_asgi_application())])


urlpatterns: list[Any] = []
HOSTS = pytest.mark.parametrize("host", [in_fastapi, in_starlette, beside_django])


@HOSTS
def test_every_link_of_a_mounted_dashboard_leads_to_it(
    database: Database, ob: outbox.Outbox, host: Callable[[Any], Any]
) -> None:
    id = put_uncertain(database, ob)

    with dashboard(database) as app:
        browser = Browser(host(app), "/ops/outbox")
        links = set()
        for path in ("/", "/entries", f"/entries/{id}"):
            browser.text(path)
            links |= {link.replace("&amp;", "&") for link in browser.links() if not link.startswith("#")}
        for link in links:
            assert link.startswith("/ops/outbox/"), link
            if "decide" not in link and "reveal" not in link:
                assert browser.client.get(link).status_code == 200, link


@HOSTS
def test_a_form_of_a_mounted_dashboard_decides_and_leads_back(
    database: Database, ob: outbox.Outbox, host: Callable[[Any], Any]
) -> None:
    id = put_uncertain(database, ob)

    with dashboard(database) as app:
        browser = Browser(host(app), "/ops/outbox")
        browser.text(f"/entries/{id}")
        action = re.search(r'action="([^"]+/decide)"', browser.page)
        assert action is not None
        answer = browser.send(f"/entries/{id}/decide", decision="happened", reason="seen")
        cookies = [cookie.path for cookie in browser.client.cookies.jar]

    assert action[1] == f"/ops/outbox/entries/{id}/decide"
    assert answer.headers["location"] == f"/ops/outbox/entries/{id}?done=decide"
    assert cookies == ["/ops/outbox"]
    known = read_outcome(queue_row(database, id).outcome).known
    assert known is not None
    assert known.state == "delivered"


def test_a_mounted_dashboard_names_its_own_path_in_the_api(sqlite: Database) -> None:
    with dashboard(sqlite) as app:
        document = Browser(in_fastapi(app), "/ops/outbox").api("/openapi.json").json()

    assert document["servers"] == [{"url": "/ops/outbox/api"}]


def test_a_middleware_that_reads_the_body_first_does_no_harm(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)

    class Reads(BaseHTTPMiddleware):
        async def dispatch(self, request: Any, call_next: Any) -> Any:
            await request.body()
            return await call_next(request)

    with dashboard(database) as app:
        host = in_fastapi(app)
        host.add_middleware(Reads)
        browser = Browser(host, "/ops/outbox")
        browser.text(f"/entries/{id}")
        answer = browser.send(f"/entries/{id}/decide", decision="cancel", reason="wrong")

    assert answer.status_code == 303


def test_a_proxy_that_ends_tls_needs_no_setting(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)

    with dashboard(database) as app:
        host = ProxyHeadersMiddleware(app, trusted_hosts="*")
        browser = Browser(host, **{"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.1", "Host": "ops.example"})
        page = browser.get(f"/entries/{id}")
        browser.client.cookies.set("outbox_csrf", page.cookies.get("outbox_csrf") or _cookie(page))
        answer = browser.send(f"/entries/{id}/decide", origin="https://ops.example", decision="cancel", reason="wrong")

    assert "Secure" in page.headers["set-cookie"]
    assert answer.status_code == 303


def test_a_proxy_that_changes_the_host_needs_its_origin(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    answers = []

    for trusted in ([], ["https://ops.example"]):
        with dashboard(database, trusted_origins=trusted) as app:
            browser = Browser(app, Host="10.0.0.7:8460")
            browser.text(f"/entries/{id}")
            answers.append(
                browser.send(
                    f"/entries/{id}/decide", origin="https://ops.example", decision="cancel", reason="wrong"
                ).status_code
            )

    assert answers == [403, 303]


def test_a_proxy_that_removes_a_prefix_is_named_by_the_root_path(sqlite: Database) -> None:
    with dashboard(sqlite, authenticate=signed_in("viewer")) as app:

        async def proxied(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                scope = {**scope, "root_path": "/tools", "path": "/tools" + scope["path"]}
            await app(scope, receive, send)

        browser = Browser(proxied)
        browser.text("/")

    assert all(link.startswith(("/tools/", "#")) for link in browser.links())


def _cookie(page: Any) -> str:
    found = re.search(r"outbox_csrf=([\w-]+)", page.headers["set-cookie"])
    assert found is not None
    assert SITE.startswith("http:")
    return found[1]
