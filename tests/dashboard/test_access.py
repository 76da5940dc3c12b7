"""Who may use the dashboard, and what protects it in a browser."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.responses import RedirectResponse
from support.cli_runner import put_uncertain, refused
from support.dashboard import SITE, Browser, by_header, dashboard, signed_in
from support.database import Database
from support.entries import put_one, queue_row

import outbox
from dispatchers.dashboard import Dashboard, Identity
from dispatchers.dashboard.protection import LocalHostsOnly
from dispatchers.dashboard.rendering import STAMP
from outbox.errors import ConfigurationError


def test_a_request_without_an_identity_gets_nothing(sqlite: Database) -> None:
    with dashboard(sqlite, authenticate=by_header) as app:
        page, document = Browser(app).get("/"), Browser(app).api("/entries")

    assert (page.status_code, document.status_code) == (401, 401)
    assert "You are not signed in" in page.text
    assert document.json()["code"] == "not_signed_in"


def test_an_authenticator_may_be_async_or_send_to_a_login(sqlite: Database) -> None:
    async def soon(request: Any) -> Any:
        await asyncio.sleep(0)
        return Identity("ada", ["viewer"])

    with (
        dashboard(sqlite, authenticate=soon) as app,
        dashboard(sqlite, authenticate=lambda request: RedirectResponse("/login")) as closed,
    ):
        assert "ada" in Browser(app).text("/")
        assert Browser(closed).get("/").headers["location"] == "/login"
        assert Browser(closed).api("/entries").status_code == 401


def test_a_refresh_after_the_session_ended_leads_the_page_to_the_login(sqlite: Database) -> None:
    def ended(request: Any) -> Any:
        answer = RedirectResponse("/login?next=/ops/")
        answer.set_cookie("session", "")
        return answer

    with dashboard(sqlite, authenticate=ended) as app:
        answer = Browser(app).client.get("/", headers={"HX-Request": "true"})

    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/login?next=/ops/")
    assert "location" not in answer.headers
    assert answer.headers["set-cookie"].startswith("session=")


@pytest.mark.parametrize(("name", "roles"), [("ada", ["admin"]), ("ada", "viewer"), ("", ["viewer"]), ("a" * 256, [])])
def test_an_identity_of_unknown_roles_or_without_a_name_is_refused(name: str, roles: Any) -> None:
    with pytest.raises(ConfigurationError):
        Identity(name, roles)


def test_a_viewer_sees_no_form_and_cannot_decide(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)

    with dashboard(database, authenticate=signed_in("viewer")) as app:
        browser = Browser(app)
        page = browser.text(f"/entries/{id}")
        refusal = browser.api(f"/entries/{id}/decide", {"decision": "retry", "reason": "now"}, Authorization="Bearer t")

    assert "<form" not in page
    assert (refusal.status_code, refusal.json()["code"]) == (403, "role")


@pytest.mark.parametrize(
    ("origin", "fields", "code"),
    [
        ("https://evil.example", {}, "cross_origin"),
        ("null", {}, "cross_origin"),
        (SITE, {"csrf_token": "x" * 43}, "csrf"),
        (SITE, {"csrf_token": ""}, "csrf"),
        (None, {"csrf_token": ""}, "csrf"),
    ],
)
def test_a_form_from_elsewhere_decides_nothing(
    database: Database, ob: outbox.Outbox, origin: str | None, fields: dict[str, str], code: str
) -> None:
    id = put_uncertain(database, ob)
    before = queue_row(database, id)

    with dashboard(database) as app:
        browser = Browser(app)
        browser.text(f"/entries/{id}")
        answer = browser.send(
            f"/entries/{id}/decide", origin=origin, **{"decision": "happened", "reason": "x", **fields}
        )

    assert answer.status_code == 403
    assert {"cross_origin": "another origin", "csrf": "reload the page"}[code] in answer.text
    assert queue_row(database, id) == before


def test_the_api_needs_a_token_unless_a_header_authenticates(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    path, body = f"/entries/{id}/decide", {"decision": "retry", "reason": "now"}

    with dashboard(database) as app:
        browser = Browser(app)
        browser.text("/")
        token = browser.client.cookies["outbox_csrf"]
        without = browser.api(path, body)
        with_basic = browser.api(path, body, Authorization="Basic YTpi")
        from_elsewhere = browser.api(path, body, Authorization="Bearer t", Origin="https://evil.example")
        with_token = browser.api(path, body, **{"X-CSRF-Token": token})

    assert [each.json()["code"] for each in (without, with_basic, from_elsewhere)] == ["csrf", "csrf", "cross_origin"]
    assert with_token.status_code == 200


def test_every_answer_carries_the_protecting_headers(sqlite: Database) -> None:
    with dashboard(sqlite) as app:
        browser = Browser(app)
        answers = [
            browser.get(path)
            for path in ("/", "/entries", "/nothing", "/api/entries", "/static/dashboard.css", "/static/no")
        ]

    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
    assert answers[0].headers["cache-control"] == "no-store"


def test_pages_have_no_inline_script_or_style_and_load_nothing_foreign(database: Database, ob: outbox.Outbox) -> None:
    id = put_uncertain(database, ob)

    with dashboard(database) as app:
        browser = Browser(app)
        for path in ("/", "/entries", f"/entries/{id}", "/nothing"):
            page = browser.get(path).text
            assert "style=" not in page
            assert "<style" not in page
            assert "<script>" not in page
            assert " on" + "click" not in page
            assert all(link.startswith("/") or link.startswith("#") for link in browser.links())


def test_the_cookie_of_the_token_has_every_flag(sqlite: Database) -> None:
    with dashboard(sqlite) as app:
        browser = Browser(app)
        browser.client.base_url = SITE.replace("http:", "https:")
        cookie = browser.get("/").headers["set-cookie"]

    assert {"HttpOnly", "SameSite=strict", "Secure"} <= {each.strip() for each in cookie.split(";")}


def test_a_value_from_outside_is_shown_as_text(database: Database, ob: outbox.Outbox) -> None:
    put_uncertain(database, ob, parent="<script>alert(1)</script>")

    with dashboard(database) as app:
        page = Browser(app).text("/")

    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_the_back_address_cannot_lead_to_another_site(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)

    with dashboard(database) as app:
        browser = Browser(app)
        browser.text(f"/entries/{id}")
        answer = browser.send(f"/entries/{id}/decide", decision="retry", reason="now", back="//evil.example/")

    assert answer.headers["location"] == "/?done=decide"


def test_a_dashboard_on_loopback_serves_no_foreign_host_name(sqlite: Database) -> None:
    with dashboard(sqlite, authenticate=signed_in("viewer")) as app:
        local = Browser(LocalHostsOnly(app))
        local.client.base_url = "http://127.0.0.1:8460"

        assert local.get("/").status_code == 200
        assert local.client.get("/", headers={"Host": "evil.example"}).status_code == 421


def test_outbox_web_needs_an_authenticator_off_loopback(sqlite: Database) -> None:
    status, text = refused("web", "--host", "0.0.0.0", database=sqlite)

    assert status == 2
    assert "give --authenticate MODULE:FUNCTION or --users FILE, or listen on 127.0.0.1" in " ".join(text.split())


@pytest.mark.parametrize("kind", ["postgresql", "portable"])
def test_a_slow_statement_is_cancelled_and_explained(
    request: pytest.FixtureRequest, ob: outbox.Outbox, kind: str
) -> None:
    database: Database = request.getfixturevalue(kind)
    limit = timedelta(milliseconds=100)

    with dashboard(database, statement_timeout=limit) as app, database.owner() as connection:
        connection.exec_driver_sql("LOCK TABLE outbox_queue IN ACCESS EXCLUSIVE MODE")
        answer = Browser(app).api("/entries")

    assert (answer.status_code, answer.json()["code"]) == (503, "too_slow")


def test_a_database_that_is_down_has_a_page() -> None:
    url = sa.make_url("postgresql+psycopg://nobody@127.0.0.1:1/none")
    app = Dashboard(url, authenticate=signed_in("viewer"))

    page, document = Browser(app).get("/"), Browser(app).api("/entries")

    assert (page.status_code, document.status_code) == (503, 503)
    assert "the database is unavailable: the connection is refused" in page.text
    assert document.json()["code"] == "database_down"


def test_an_async_engine_is_refused_with_the_way_out(sqlite: Database) -> None:
    with pytest.raises(ConfigurationError, match=r"not AsyncEngine: for an AsyncEngine give its `\.url`"):
        Dashboard(sqlite.async_engine(), authenticate=signed_in("viewer"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "settings", "text"),
    [
        (
            "hunter2",
            {},
            "needs a SQLAlchemy URL of a known driver, such as postgresql+psycopg://user@host/name, not this text",
        ),
        (
            "oracle://ada:hunter2@host/shop",
            {},
            "the outbox runs on postgresql, sqlite, mariadb and mysql, not on 'oracle'",
        ),
        ("sqlite://", {}, "another, empty database in memory"),
        ("sqlite:///shop.db", {"statement_timeout": timedelta(days=25)}, "give a timedelta of 1 ms to 24 days"),
        ("sqlite:///shop.db", {"statement_timeout": 5}, "give a timedelta of 1 ms to 24 days"),
        ("postgresql://ada:hunter2@s3cret@host/shop", {}, "write an @ in a password as %40"),
        ("sqlite:///shop.db", {"authenticate": None}, "give a function"),
        ("sqlite:///shop.db", {"trusted_origins": "https://ops.example.com"}, "give a list of origins"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(url: str, settings: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Dashboard(url, **{"authenticate": signed_in("viewer"), **settings})

    assert text in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_an_engine_in_autocommit_decides_in_one_transaction(postgresql: Database, ob: outbox.Outbox) -> None:
    """The decision and its audit row commit together, or neither: here the event cannot be written."""
    id = put_one(postgresql, ob)
    engine = postgresql.new_engine(isolation_level="AUTOCOMMIT")
    postgresql.execute(sa.text("ALTER TABLE outbox_event ADD CONSTRAINT refuse CHECK (actor <> 'ada')"))
    app = Dashboard(engine, authenticate=signed_in("operator"))

    answer = Browser(app).api(f"/entries/{id}/decide", {"decision": "cancel", "reason": "x"}, Authorization="Bearer t")

    assert answer.status_code == 500
    assert queue_row(postgresql, id).outcome is None


def test_a_script_has_another_address_once_its_contents_change(sqlite: Database) -> None:
    with dashboard(sqlite) as app:
        browser = Browser(app)
        browser.text("/")
        assets = [link for link in browser.links() if "/static/" in link]
        answers = [browser.client.get(link) for link in assets]

    assert len(assets) >= 4
    assert all(f"?v={STAMP}" in link for link in assets)
    assert all("immutable" in answer.headers["cache-control"] for answer in answers)


# --- behind a proxy


def test_a_form_for_the_host_of_a_proxy_is_explained_and_can_be_trusted(database: Database, ob: outbox.Outbox) -> None:
    id = put_one(database, ob)
    origin = "https://ops.example.com"

    def decided(app: Dashboard) -> Any:
        browser = Browser(app)
        browser.text(f"/entries/{id}")
        return browser.send(f"/entries/{id}/decide", origin=origin, decision="retry", reason="now")

    with dashboard(database) as app, dashboard(database, trusted_origins=["HTTPS://ops.example.com:443"]) as trusting:
        refused, accepted = decided(app), decided(trusting)

    assert (refused.status_code, accepted.status_code) == (403, 303)
    assert "outbox web --trusted-origin" in refused.text
    assert "ops.example" in refused.text


@pytest.mark.parametrize("origin", ["ops.example.com", "https://ops.example.com/", "https://ops/x", "*", "https://a@b"])
def test_a_trusted_origin_that_no_browser_sends_is_refused(sqlite: Database, origin: str) -> None:
    with pytest.raises(ConfigurationError, match="must be a scheme and a host"):
        Dashboard(sqlite.engine, authenticate=signed_in("viewer"), trusted_origins=[origin])


@pytest.mark.parametrize("header", ["Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "Via", "X-Real-IP"])
def test_without_a_sign_in_what_a_proxy_passed_on_is_refused(sqlite: Database, header: str) -> None:
    with dashboard(sqlite, authenticate=signed_in("viewer")) as app:
        local = Browser(LocalHostsOnly(app))
        local.client.base_url = "http://127.0.0.1:8460"
        answer = local.client.get("/", headers={header: "for=192.0.2.1"})

    assert answer.status_code == 403
    assert f"it has the header {header.lower()}" in answer.text
    assert "--users or --authenticate" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


# --- what exists


def test_a_slash_at_the_end_leads_on_only_after_the_sign_in(sqlite: Database) -> None:
    with dashboard(sqlite, authenticate=by_header) as app:
        browser = Browser(app)
        signed = {"X-User": "ada=viewer", "Host": "evil.example"}
        unknown = [
            browser.client.get(path).status_code for path in ("/entries/", "/nothing", "/api/nothing", "/bulk/decide")
        ]
        answers = [
            browser.client.get(path, headers=signed) for path in ("/entries/", "/a//evil.example/", "/api/entries/")
        ]

    assert unknown == [401] * 4
    assert [answer.headers["location"] for answer in answers] == ["../entries", "../evil.example", "../entries"]
