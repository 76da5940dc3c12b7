"""`outbox docs idempotency`: the page comes from the app's own objects, and says so where it cannot."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import openapi_spec_validator
import pytest
from support.cli_runner import document, error_of, succeeded
from support.python_processes import run_python

APP = '''
from datetime import timedelta

import outbox
from dispatchers import Dispatcher
from dispatchers.adapters import MemoryAdapter
from outbox.http import Policy

ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test")
policy = Policy(outbox=ob, keep=timedelta(hours=KEEP))
settings = {}


def customer():
    """the customer of the access token"""


def content():
    pass


def make_dispatcher():
    adapters = {"mail": MemoryAdapter(window=timedelta(days=1))}
    return Dispatcher("sqlite:///none.db", adapters=adapters, outbox=ob, keep=timedelta(days=60))
'''


@pytest.fixture(autouse=True)
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the module `published_app`, and in it the test."""
    file = tmp_path / "published_app.py"
    file.write_text(APP.replace("KEEP", "24"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file that is written again in one second looks the same
    yield file
    sys.modules.pop("published_app", None)


def page(*arguments: str) -> str:
    sys.modules.pop("published_app", None)
    return succeeded("docs", "idempotency", "published_app:policy", *arguments)


def test_the_page_says_what_the_apps_policy_says(app: Path) -> None:
    before = page()
    app.write_text(APP.replace("KEEP", "48"))
    after = page()

    assert "| a retry gets the first answer | for 24 hours |" in before
    assert after == before.replace("for 24 hours", "for 2 days")


def test_what_the_policy_lacks_comes_from_the_app_and_its_dispatcher() -> None:
    text = page(
        *("--route", "POST /orders", "--scope", "published_app:customer", "--content", "published_app:customer"),
        *("--body-bytes-max", "4096", "--dispatcher", "published_app:make_dispatcher"),
    )

    assert "- `POST /orders`" in text
    assert "the authenticated caller: the customer of the access token. If two" in text
    assert "\n- the customer of the access token\n" in text
    assert "have 4 KiB at most" in text
    assert (
        "until 67 days after the last of these effects has ended" in text
    )  # its keep, and a week in which maintenance may lag


def test_the_fragment_of_openapi_is_a_valid_document_with_the_routes() -> None:
    fragment = json.loads(page("--openapi", "--route", "POST /orders"))

    openapi_spec_validator.validate(fragment)
    assert fragment["paths"].keys() == {"/orders"}
    assert document("docs", "idempotency", "published_app:policy", "--openapi", "--route", "POST /orders") == fragment


def test_the_facts_are_one_json_document() -> None:
    facts = document("docs", "idempotency", "published_app:policy", "--route", "POST /orders")

    assert facts["retry_seconds"] == 86400
    assert facts["routes"] == [{"method": "POST", "path": "/orders"}]
    assert facts["refusals"][0]["name"] == "key-missing"


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["published_app"], 2, "'published_app' is not MODULE:POLICY, e.g. app.api:policy"),
        (["nowhere:policy"], 2, "module 'nowhere' is neither in the working directory nor installed"),
        (["published_app:absent"], 2, "module 'published_app' has no policy 'absent'"),
        (
            ["published_app:settings"],
            2,
            "published_app:settings is of type 'dict', not an outbox.http.Policy: name the object that the app passes to its"
            " integration as policy=",
        ),
        (
            ["published_app:policy", "--scope", "published_app:policy"],
            2,
            "'published_app:policy' must be a function, e.g. app.api:customer, but is of type Policy",
        ),
        (
            ["published_app:policy", "--scope", "published_app"],
            2,
            "'published_app' is not MODULE:FUNCTION, e.g. app.api:customer",
        ),
        (
            ["published_app:policy", "--content", "published_app:content"],
            1,
            "content 'content': has no docstring, which the page quotes: write one",
        ),
        (
            ["published_app:policy", "--route", "orders"],
            1,
            "route 'orders': must be a method and a path, 'POST /orders/{id}', with one of the methods"
            " GET, PUT, POST, DELETE, OPTIONS, HEAD, PATCH, TRACE",
        ),
        (
            ["published_app:policy", "--dispatcher", "published_app:customer"],
            2,
            "must return a dispatchers.Dispatcher or a dispatchers.Fleet, but returned None: is its `return` missing?",
        ),
    ],
)
def test_what_cannot_be_published_is_refused_with_what_to_do(arguments: list[str], status: int, text: str) -> None:
    ended, _, printed = error_of("docs", "idempotency", *arguments)

    assert ended == status
    assert printed.endswith(text)


def test_an_app_that_sets_its_outbox_up_elsewhere_learns_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("from outbox.http import Policy\npolicy = Policy()\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}

    run = run_python("-m", "dispatchers", "docs", "idempotency", "bare:policy", cwd=tmp_path, env=environment)

    assert run.returncode == 1
    assert run.stderr == (
        "outbox: the outbox is not configured: call outbox.configure(keyring, env=...) at the app's start, or set"
        " OUTBOX_SECRET and OUTBOX_ENV\n"
    )
