"""One Chromium and one seeded database for all tests of this folder in one process of the run.

The database is that of the demo's shop, after `demo --stay` has served its first customers. Each module has a copy of it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from playwright.sync_api import Browser, Page
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from support.asgi_server import serving_asgi
from support.browser import NEEDED, browsing, find_chromium, running_chromium
from support.open_demo import open_demo
from support.pictures import addresses

from dispatchers.dashboard import Dashboard, Identity

Browse = Callable[..., AbstractContextManager[Page]]


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip(NEEDED)
    with running_chromium(program) as browser:
        yield browser


@contextmanager
def new_database(server_url: sa.URL, template: str = "template1") -> Iterator[sa.URL]:
    admin = sa.create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    name = f"outbox_browser_{uuid4().hex[:8]}"
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield server_url.set(database=name)
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="package")
def seeded(server_url: sa.URL, tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[str]:
    """The name of a database in which the shop of the demo has been open."""
    with new_database(server_url) as url:
        with open_demo(tmp_path_factory.mktemp("demo"), "--database", url.render_as_string(hide_password=False)):
            pass
        yield str(url.database)


@pytest.fixture(scope="module")
def outbox_url(server_url: sa.URL, seeded: str) -> Iterator[sa.URL]:
    """This module's copy of the seeded database."""
    with new_database(server_url, seeded) as url:
        yield url


@pytest.fixture(scope="module")
def engine(outbox_url: sa.URL) -> Iterator[sa.Engine]:
    made = sa.create_engine(outbox_url)
    yield made
    made.dispose()


@pytest.fixture(scope="module")
def home(outbox_url: sa.URL) -> Iterator[str]:
    """The address of this module's dashboard, under a prefix as a host app mounts it."""
    dashboard = Dashboard(outbox_url, authenticate=by_header)
    with serving_asgi(Starlette(routes=[Mount("/ops/outbox", dashboard)])) as address:
        yield f"{address}/ops/outbox"
    dashboard.databases.close()


def by_header(request: Request) -> Identity | None:
    """As a proxy names who has signed in: by headers that only it can set."""
    name = request.headers.get("x-name")
    return None if name is None else Identity(name, request.headers.get("x-roles", "").split())


@pytest.fixture
def browse(chromium: Browser, home: str) -> Browse:
    """Opens a page for `ada`, with the roles that are given: `with browse("viewer") as page`."""

    def opened(*roles: str, **settings: Any) -> AbstractContextManager[Page]:
        headers = {"X-Name": "ada", "X-Roles": " ".join(roles)}
        return browsing(chromium, home, extra_http_headers=headers, **settings)

    return opened


@pytest.fixture(scope="module")
def pages(chromium: Browser, home: str) -> dict[str, str]:
    """The address of each page, by the name of its view."""
    headers = {"X-Name": "ada", "X-Roles": "operator"}  # some pages are for operators only
    with browsing(chromium, home, extra_http_headers=headers) as page:
        return addresses(page, home)
