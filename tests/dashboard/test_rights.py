"""What an identity may not read is not compared for it either: a right guess and a wrong one get the same answer."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_args, get_type_hints
from urllib.parse import quote_plus
from uuid import UUID, uuid4

import click
import pytest
import sqlalchemy as sa
from support.cli_runner import command, put_uncertain
from support.dashboard import Browser, dashboard, put_heartbeat, signed_in
from support.database import TABLES, Database
from support.entries import change, put_one, run_once

import outbox
from dispatchers import Delivered, Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.read.compared import COMPARED, missing_rights
from dispatchers.cli import main
from dispatchers.dashboard.access import Authenticator, Identity, local_viewer, rights_of
from dispatchers.dashboard.pages import ACTIONS, VIEWS
from outbox.keys import Tag, encode_hex, encode_native
from outbox.sql.schema.rights import READ_WITH, Right
from outbox.sql.schema.tables import tables_of

CONTENT, PROPOSED = "canary_content_7f3a", "canary_proposed_7f3a"
VIEWER, OPERATOR = signed_in("viewer"), signed_in("operator")
READERS = {"viewer": VIEWER, "operator": OPERATOR, "reader": signed_in("payload_reader")}
BEARER = {"Authorization": "Bearer t"}


@dataclass(frozen=True)
class Hidden:
    """Entries with a value in every place that needs a right. keys: their child keys, in both forms."""

    id: UUID
    keys: Sequence[str]

    def of(self, name: str) -> Iterator[tuple[str, str]]:
        """Right guesses of what this reader may not read, each with a wrong one that has the same form."""
        unread = {"viewer": [CONTENT, PROPOSED], "operator": [CONTENT], "reader": [PROPOSED]}[name]
        for secret in unread:
            yield secret, secret.replace("7f3a", "7f3b")
        if name == "viewer":
            for key in self.keys:
                yield key, key[:-1] + ("1" if key[-1] == "0" else "0")


@pytest.fixture
def hidden(request: pytest.FixtureRequest, ob: outbox.Outbox) -> Hidden:
    kind = "postgresql" if "postgresql" in request.fixturenames else "sqlite"
    database: Database = request.getfixturevalue(kind)
    sent: Any = {"payload": {"a": CONTENT}}
    ids = [put_one(database, ob, **sent)]
    answer = {"reason": CONTENT, "type": "card_error"}
    run_once(database, ob, adapters={"crm": MemoryAdapter([Delivered(answer)])})
    ids.append(put_one(database, ob, **sent))
    refused = {"code": CONTENT, "http_status": 402}
    run_once(database, ob, adapters={"crm": MemoryAdapter([Rejected("status 402", result=refused)])})
    ids.append(put_uncertain(database, ob, payload=sent["payload"]))
    database.execute(sa.update(TABLES.entry).values(headers=json.dumps({"baggage": CONTENT})))
    known = {"state": "delivered", "attempts": 1, "result": {"reason": CONTENT}}
    change(database, ids[2], outcome=json.dumps({"reason": "its callback failed", "known": known}))
    with dashboard(database) as app:
        body = {"decision": "happened", "reason": "seen", "result": {"id": PROPOSED}}
        made = Browser(app).api(f"/entries/{ids[2]}/propose", body, **BEARER)
    assert made.status_code == 200, made.text
    tag = Tag(bytes(database.entries[0].tag))
    return Hidden(ids[2], [encode_native(tag), encode_hex(tag)])


def answer_of(response: Any, guess: str) -> tuple[int, str]:
    """What the response says, beside the guess itself and the time."""
    text = response.text
    for written in {guess, quote_plus(guess), json.dumps(guess)[1:-1]}:
        text = text.replace(written, "GUESS")
    text = re.sub(r"<time.*?</time>|\d{4}-\d\d-\d\d[T ][\d:.]+(Z|\+00:00)?", "TIME", text)
    return response.status_code, re.sub(r'value="[\w-]{43}"', "TOKEN", text)


def guessable(kind: type) -> list[str]:
    """The parameters of a view or an action that take a text, and compare it."""
    hints = get_type_hints(kind)
    texts = [each.name for each in fields(kind) if str in (hints[each.name], *get_args(hints[each.name]))]
    return [name for name in texts if COMPARED[name]]


@pytest.mark.parametrize("name", READERS)
def test_no_parameter_of_a_page_reveals_what_its_reader_may_not_read(
    sqlite: Database, hidden: Hidden, name: str
) -> None:
    with dashboard(sqlite, authenticate=READERS[name]) as app:
        browser = Browser(app)
        browser.get("/")
        for view in VIEWS:
            path = view.path.replace("{id}", str(hidden.id))
            states = [{"state": state} for state in ("uncertain", "delivered", "failed")]
            for parameter in guessable(view.query):
                for number, (right, wrong) in enumerate(hidden.of(name)):
                    where = path if number == 0 else f"/api{view.api_path}"
                    for given in states if view.name == "entries" else [{}]:
                        asked = [{**given, parameter: guess} for guess in (right, wrong)]
                        answers = [answer_of(browser.get(where, **each), each[parameter]) for each in asked]
                        assert answers[0] == answers[1], (view.name, parameter, right)


@pytest.mark.parametrize("name", ["operator", "reader"])
def test_no_parameter_of_an_action_reveals_a_hidden_value(sqlite: Database, hidden: Hidden, name: str) -> None:
    base = {"decision": "cancel", "reason": "asked", "entries": [str(hidden.id)], "key": "none", "name": "crm"}
    with dashboard(sqlite, authenticate=READERS[name]) as app:
        browser = Browser(app)
        for action in ACTIONS:
            path = action.path.replace("{id}", str(uuid4()))
            required = [each.name for each in fields(action.form) if each.default is MISSING]
            body = {each: value for each, value in base.items() if each in required}
            for parameter in guessable(action.form):
                for right, wrong in hidden.of(name):
                    asked = [{**body, parameter: guess} for guess in (right, wrong)]
                    answers = [answer_of(browser.api(path, each, **BEARER), str(each[parameter])) for each in asked]
                    assert answers[0] == answers[1], (action.name, parameter, right)


@pytest.mark.parametrize("name", READERS)
def test_no_page_shows_what_its_reader_may_not_read(sqlite: Database, hidden: Hidden, name: str) -> None:
    with dashboard(sqlite, authenticate=READERS[name]) as app:
        browser = Browser(app)
        ids = [row.id for row in sqlite.entries]
        paths = [view.path for view in VIEWS if "{" not in view.path and view.name not in ("group", "bulk")]
        shown = ""
        for path in [*paths, "/entries?state=delivered", "/entries?state=failed", *(f"/entries/{id}" for id in ids)]:
            shown += (
                browser.get(path).text + browser.client.get(f"/api{path}" if path != "/" else "/api/uncertain").text
            )

    assert [right for right, _ in hidden.of(name) if right in shown] == []


@pytest.mark.parametrize(
    ("authenticate", "finds"),
    [(VIEWER, []), (local_viewer, []), (OPERATOR, ["keys"]), (READERS["reader"], ["keys", "answers"])],
    ids=["viewer", "local viewer", "operator", "reader"],
)
def test_a_search_compares_with_what_its_reader_may_read(
    sqlite: Database, hidden: Hidden, authenticate: Authenticator, finds: list[str]
) -> None:
    texts = {"keys": hidden.keys[0], "answers": CONTENT}

    with dashboard(sqlite, authenticate=authenticate) as app:
        found = {name: Browser(app).api(f"/search?text={text}").json()["found"] for name, text in texts.items()}

    assert [name for name, each in found.items() if each["entries"]] == finds
    withheld = {"keys": "child keys", "answers": "services' answers"}
    assert found["keys"]["withheld"] == [text for name, text in withheld.items() if name not in finds]


def test_a_reason_is_not_searched_in_an_answer(sqlite: Database, hidden: Hidden) -> None:
    with dashboard(sqlite) as app:
        found = [
            Browser(app).api(f"/entries?reason_contains={part}").json()["entries"] for part in ("callback", CONTENT)
        ]

    assert [len(each) for each in found] == [1, 0]


# --- the table


def test_every_parameter_has_a_line_in_the_table_of_what_is_compared() -> None:
    of_dashboard = [
        each.name for kind in (*(v.query for v in VIEWS), *(a.form for a in ACTIONS)) for each in fields(kind)
    ]

    assert sorted({name for name in of_dashboard if name not in COMPARED}) == []


OPTIONS = {
    *("database", "databases", "schema", "prefix", "json", "exit_code", "dry_run", "yes", "most", "rate", "payload"),
    *(
        "retention",
        "windows",
        "nothing_lost",
        "after_restore",
        "adopt_from",
        "undo",
        "factory",
        "send_again",
        "happened",
    ),
    *("did_not_happen", "kid", "host", "port", "authenticate", "users", "read_database", "root_path", "second_person"),
    *("plain", "http", "log_level", "trusted_origins", "is_whole"),
}
"""Of commands: what compares nothing."""


def test_every_option_has_a_line_in_the_table_of_what_is_compared() -> None:
    names = {option.name for each in commands(main) for option in each.params if takes_database(each)}

    assert sorted(str(name) for name in names - OPTIONS - {"states"} if name not in COMPARED) == []


def commands(group: click.Command) -> Iterator[click.Command]:
    if not isinstance(group, click.Group):
        yield group
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield from commands(found)


def takes_database(each: click.Command) -> bool:
    return any(option.name == "database" for option in each.params)


def test_the_tables_name_columns_that_exist() -> None:
    tables = tables_of(None, "outbox_")
    named = {f"{table}.{column}" for table, columns in READ_WITH.items() for column in columns}

    for each in {*named, *(column for columns in COMPARED.values() for column in columns)}:
        table, _, column = each.partition(".")
        assert column in getattr(tables, table).c, each


def test_a_parameter_of_what_an_identity_may_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPARED, "operation", ("entry.payload",))  # type: ignore[misc]
    viewer, reader = Identity("ada", ["viewer"]), Identity("ada", ["payload_reader"])

    assert missing_rights(["operation", "limit"], rights_of(viewer)) == {"operation": Right.CONTENT}
    assert missing_rights(["operation", "limit"], rights_of(reader)) == {}


def test_a_view_refuses_a_parameter_of_what_its_reader_may_not_read(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMPARED, "operation", ("entry.payload",))  # type: ignore[misc]

    with dashboard(sqlite, authenticate=VIEWER) as app:
        page, document = Browser(app).get("/entries?operation=crm"), Browser(app).api("/entries?operation=crm")
        without = Browser(app).api("/entries")

    assert (page.status_code, document.status_code, without.status_code) == (403, 403, 200)
    assert document.json()["field"] == "operation"


# --- the command line, with the rights of a database's role


def test_no_option_reveals_what_the_dashboards_role_may_not_read(postgresql: Database, hidden: Hidden) -> None:
    with postgresql.observer.connect() as connection:
        names = sa.text("SELECT rolname FROM pg_roles WHERE rolname LIKE 'dashboard%' AND NOT rolsuper")
        role = connection.execute(names).scalars().first()
    url = postgresql.owners_url.update_query_dict({"options": f"-c role={role}"})
    environment = {"DATABASE_URL": url.render_as_string(hide_password=False)}
    listing = next(each for each in commands(main) if each.name == "list")
    options = [option for option in listing.params if isinstance(option, click.Option) and option.name in COMPARED]
    texts = [option.opts[0] for option in options if isinstance(option.type, click.types.StringParamType)]

    for right, wrong in hidden.of("viewer"):
        for given in [[], *([option] for option in (*texts, "--state=failed --reason-contains"))]:
            asked = [[*" ".join(["list", *given]).split(), guess] for guess in (right, wrong)]
            results = [command(*each, **environment) for each in asked]
            outputs = [re.sub(r"since [\d:TZ.-]+", "", each.output) for each in results]
            answers = [output.replace(each[-1], "GUESS") for output, each in zip(outputs, asked, strict=True)]
            assert answers[0] == answers[1], (given, right)


def test_a_viewer_sees_of_a_failure_what_every_live_adapter_declares(sqlite: Database, hidden: Hidden) -> None:
    failed = next(row.id for row in sqlite.rows(TABLES.settlement) if row.state == "failed")
    shown = []
    with dashboard(sqlite, authenticate=VIEWER) as app:
        for declared in (None, {"failure_fields": ["code", "absent"]}, {"failure_fields": ["http_status"]}):
            if declared is not None:
                put_heartbeat(sqlite, "crm", **declared)
            shown.append(Browser(app).api(f"/entries/{failed}").json()["failure"])

    assert shown == [None, {"code": CONTENT}, None]
