"""One Chromium and one seeded database for all tests of this folder in one process of the run.

The database is that of the demo's shop, after `demo --stay` has served its first customers. Each module has a copy of it.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import sqlalchemy as sa
from playwright.sync_api import Browser, Page
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from support.asgi_server import serving_asgi
from support.browser import NEEDED, WIDE, browsing, find_chromium, running_chromium, watching
from support.open_demo import open_demo
from support.pictures import addresses

import outbox
from dispatchers.admin.decide import proposals
from dispatchers.admin.decide.bulk import BulkDecision
from dispatchers.admin.read.entry_filter import Filter
from dispatchers.dashboard import Dashboard, Identity
from dispatchers.periodic.schedules import parent_of
from outbox.keys import parent_id
from outbox.sql.schema.tables import tables_of

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


class Seeded(NamedTuple):
    """The name of a database in which the shop of the demo has been open, and the shop's secret."""

    name: str
    secret: str


@pytest.fixture(scope="package")
def seeded(server_url: sa.URL, chromium: Browser) -> Iterator[Seeded]:
    with new_database(server_url) as url:
        shown = url.render_as_string(hide_password=False)
        with open_demo("--database", shown) as printed:
            (secret,) = re.findall(r"export OUTBOX_SECRET=(\S+)", printed)
        yield Seeded(str(url.database), secret)


@pytest.fixture(scope="module")
def outbox_url(server_url: sa.URL, seeded: Seeded) -> Iterator[sa.URL]:
    """This module's copy of the seeded database."""
    with new_database(server_url, seeded.name) as url:
        yield url


@pytest.fixture(scope="module")
def engine(outbox_url: sa.URL) -> Iterator[sa.Engine]:
    made = sa.create_engine(outbox_url)
    yield made
    made.dispose()


@pytest.fixture(scope="module")
def home(outbox_url: sa.URL, seeded: Seeded) -> Iterator[str]:
    """The address of this module's dashboard, under a prefix as a host app mounts it. It has the shop's secret."""
    shop = outbox.Outbox(outbox.Keyring.from_text(seeded.secret), env="demo")
    dashboard = Dashboard(outbox_url, authenticate=by_header, outbox=shop)
    with serving_asgi(Starlette(routes=[Mount("/ops/outbox", dashboard)])) as address:
        yield f"{address}/ops/outbox"
    dashboard.close()


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
def kept_page(chromium: Browser, home: str) -> Iterator[Page]:
    headers = {"X-Name": "ada", "X-Roles": "operator payload_reader"}
    with browsing(chromium, home, extra_http_headers=headers) as page:
        yield page


@pytest.fixture
def page(kept_page: Page, home: str) -> Iterator[Page]:
    """A page of `ada`, operator and payload reader. A module has one: a new page costs more than most tests do with it."""
    kept_page.set_viewport_size(WIDE)
    kept_page.emulate_media(color_scheme="light")
    with watching(kept_page, home):
        yield kept_page


def put_schedule(engine: sa.Engine, shop: outbox.Outbox) -> None:
    """A schedule that an operator has paused, after an instant with an entry and one without."""
    now = datetime.now(UTC)
    instants = [now - timedelta(days=days) for days in (1, 8)]
    parents = [parent_of("weekly_report", at) for at in instants]
    recent = [
        {"at": at.isoformat(), "actor": None, "parent_id": parent_id("demo", parent).hex}
        for at, parent in zip(instants, parents, strict=True)
    ]
    row = {
        **{"name": "weekly_report", "expression": "0 3 * * 1 UTC", "recent": json.dumps(recent)},
        **{"since": instants[1], "enqueued_to": instants[0], "next_at": now + timedelta(days=6)},
        **{"paused": True, "paused_reason": "audit", "decided_by": "mara", "decided_at": now},
    }
    with Session(engine) as session, session.begin():
        session.execute(sa.insert(tables_of(None, "outbox_").schedule).values(row))
        shop.enqueue(session, "mail.report", {"week": 1}, parent=parents[0])


@pytest.fixture(scope="module")
def pages(chromium: Browser, home: str, engine: sa.Engine, seeded: Seeded) -> dict[str, str]:
    """The address of each page, by the name of its view. There are a proposal and a schedule to look at."""
    decision = BulkDecision(action="cancel", actor="mara", reason="ordered twice")
    with engine.begin() as connection:
        proposals.propose(connection, tables_of(None, "outbox_"), Filter(states=("pending", "retry")), decision)
    put_schedule(engine, outbox.Outbox(outbox.Keyring.from_text(seeded.secret), env="demo"))
    headers = {"X-Name": "ada", "X-Roles": "operator"}  # some pages are for operators only
    with browsing(chromium, home, extra_http_headers=headers, java_script_enabled=False) as page:
        return addresses(page, home)
