"""How an outbox is set up: by `configure`, by the environment, once; and that importing it loads next to nothing."""

import base64
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from support.concurrency import at_once
from support.database import CHARGE, PAYLOAD

import outbox
from outbox.configuration import configuration_from_environment
from outbox.default_outbox import DefaultOutbox

ROOT = Path(__file__).parents[2]
SECRET, OTHER = bytes(range(32)), bytes(range(32, 64))
SETTINGS = {
    "keyring": outbox.Keyring({"k1": SECRET}),
    "env": "prod",
    "schema": None,
    "prefix": "outbox_",
    "options": ["region"],
    "max_payload_bytes": 1000,
    "record_retention": timedelta(days=7),
    "observe": print,
    "fair": {"stripe"},
}
CHANGES = {
    "keyring": outbox.Keyring({"k1": OTHER}),
    "env": "staging",
    "schema": "shop",
    "prefix": "shop_",
    "options": [],
    "max_payload_bytes": 1001,
    "record_retention": timedelta(days=8),
    "observe": repr,
    "fair": {"mail"},
}


@pytest.fixture
def default(monkeypatch):
    """An instance like the module functions', in an environment without settings."""
    monkeypatch.delenv("OUTBOX_SECRET", raising=False)
    monkeypatch.delenv("OUTBOX_ENV", raising=False)
    return DefaultOutbox()


@pytest.mark.parametrize("make", [outbox.Outbox, DefaultOutbox().configure], ids=["Outbox", "configure"])
def test_a_setting_that_does_not_exist_is_refused_with_those_that_do(make):
    with pytest.raises(TypeError, match=r"no setting 'shcema'; its settings are env, schema, prefix, "):
        make(outbox.Keyring({"k1": SECRET}), env="prod", shcema="shop")


@pytest.mark.parametrize("make", [outbox.Outbox, DefaultOutbox().configure], ids=["Outbox", "configure"])
def test_an_outbox_without_the_name_of_its_deployment_is_refused(make):
    with pytest.raises(TypeError, match=r"needs env=\.\.\., the deployment's name"):
        make(outbox.Keyring({"k1": SECRET}))


def test_the_same_settings_may_be_given_twice(default):
    default.configure(**SETTINGS)
    before = default.configuration

    default.configure(
        **SETTINGS | {"keyring": outbox.Keyring({"k1": SECRET}), "options": ("region",), "fair": ["stripe"]}
    )

    assert default.configuration is before


@pytest.mark.parametrize("name", CHANGES)
def test_other_settings_are_refused_and_the_first_stay(default, name):
    default.configure(**SETTINGS)
    before = default.configuration

    with pytest.raises(outbox.ConfigurationError) as caught:
        default.configure(**SETTINGS | {name: CHANGES[name]})

    assert str(caught.value) == (
        "outbox.configure was already called with other settings; for a second outbox, create an outbox.Outbox(...)"
    )
    assert default.configuration is before


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"keyring": SECRET}, outbox.ConfigurationError, "keyring must be an outbox.Keyring, not bytes"),
        (
            {"prefix": "p" * 33},
            outbox.InvalidValue,
            f"prefix {'p' * 33!r}: must be printable text of 0 to 32 bytes: give a shorter one, or put the tables into a"
            " separate schema",
        ),
        (
            {"prefix": "shop\n"},
            outbox.InvalidValue,
            "prefix 'shop\\n': must be printable text of 0 to 32 bytes: give a shorter one, or put the tables into a"
            " separate schema",
        ),
        (
            {"prefix": "%s_"},
            outbox.InvalidValue,
            "prefix '%s_': must not contain any of % : $ \\ .",
        ),
        (
            {"schema": ":shop"},
            outbox.InvalidValue,
            "schema ':shop': must not contain any of % : $ \\ .",
        ),
        (
            {"schema": ""},
            outbox.InvalidValue,
            "schema '': must be printable text of 1 to 63 bytes: name one that PostgreSQL can have, or None for the"
            " connection's own",
        ),
        (
            {"schema": "é" * 32},
            outbox.InvalidValue,
            f"schema {'é' * 32!r}: must be printable text of 1 to 63 bytes: name one that PostgreSQL can have, or None for the"
            " connection's own",
        ),
        (
            {"record_retention": 30},
            outbox.InvalidValue,
            "record_retention 30: must be a timedelta of 0 s or more, and 36525 days at most",
        ),
        ({"options": "region"}, outbox.InvalidValue, "options 'region': must be a collection of names, not one str"),
        (
            {"max_payload_bytes": 0},
            outbox.InvalidValue,
            "max_payload_bytes 0: must be a number of bytes, 1 or more",
        ),
        ({"env": ""}, outbox.InvalidValue, "env '': has 0 bytes of UTF-8; 1 to 64 are allowed"),
        (
            {"fair": "stripe"},
            outbox.ConfigurationError,
            "fair must be a set of destinations, e.g. {'stripe'}, not 'stripe'",
        ),
        ({"fair": True}, outbox.ConfigurationError, "fair must be a set of destinations, e.g. {'stripe'}, not True"),
        ({"fair": {""}}, outbox.InvalidValue, "destination '': has 0 bytes of UTF-8; 1 to 255 are allowed"),
    ],
)
def test_settings_that_cannot_work_are_refused_and_configure_nothing(default, changed, error, text):
    with pytest.raises(error) as caught:
        default.configure(**SETTINGS | changed)
    default.configure(**SETTINGS)

    assert str(caught.value) == text
    assert default.configuration.env == "prod"


def test_the_environment_configures_what_the_app_did_not(default, monkeypatch, sqlite):
    old, new = (base64.b64encode(secret).decode() for secret in (SECRET, OTHER))
    monkeypatch.setenv("OUTBOX_SECRET", f"k2:{new},k1:{old}")
    monkeypatch.setenv("OUTBOX_ENV", "staging")

    with sqlite.begin() as session:
        default.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42")

    (entry,) = sqlite.entries
    assert (entry.env, entry.kid) == ("staging", "k2")
    assert default.configuration.keyring == outbox.Keyring({"k1": SECRET, "k2": OTHER}, current="k2")


def test_configure_wins_over_the_environment(default, monkeypatch):
    monkeypatch.setenv("OUTBOX_SECRET", f"k2:{base64.b64encode(OTHER).decode()}")
    monkeypatch.setenv("OUTBOX_ENV", "staging")

    default.configure(**SETTINGS)

    assert default.configuration.env == "prod"
    assert default.child_key("invoice:42", CHARGE) == outbox.Outbox(SETTINGS["keyring"], env="prod").child_key(
        "invoice:42", CHARGE
    )


def test_the_environment_is_read_once(default, monkeypatch):
    monkeypatch.setenv("OUTBOX_SECRET", f"k1:{base64.b64encode(SECRET).decode()}")
    monkeypatch.setenv("OUTBOX_ENV", "staging")
    before = default.configuration

    monkeypatch.setenv("OUTBOX_ENV", "prod")

    assert default.configuration is before


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "OUTBOX_SECRET and OUTBOX_ENV"),
        ({"OUTBOX_ENV": "prod"}, "OUTBOX_SECRET"),
        ({"OUTBOX_SECRET": "k1:AAAA"}, "OUTBOX_ENV"),
        ({"OUTBOX_SECRET": "k1:AAAA", "OUTBOX_ENV": ""}, "OUTBOX_ENV"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda ob, session: ob.enqueue(session, CHARGE, PAYLOAD, parent="invoice:42"),
        lambda ob, session: ob.child_key("invoice:42", CHARGE),
        lambda ob, session: ob.idempotent(session, "retry-001", scope="acct_1", content={}),
        lambda ob, session: ob.run_idempotent(session, "retry-001", print, scope="acct_1", content={}),
        lambda ob, session: ob.status(session, "invoice:42"),
    ],
)
def test_without_any_settings_each_use_says_what_to_set(default, monkeypatch, sqlite, given, missing, use):
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    with sqlite.session() as session, pytest.raises(outbox.ConfigurationError) as caught:
        use(default, session)

    assert str(caught.value) == (
        "the outbox is not configured: call outbox.configure(keyring, env=...) at the app's start, or set " + missing
    )


def test_threads_that_first_use_the_default_outbox_get_one_configuration(default, monkeypatch):
    monkeypatch.setenv("OUTBOX_SECRET", f"k1:{base64.b64encode(SECRET).decode()}")
    monkeypatch.setenv("OUTBOX_ENV", "prod")
    both_read = threading.Barrier(2)

    def slowly():
        made = configuration_from_environment()
        both_read.wait(10)
        return made

    monkeypatch.setattr("outbox.default_outbox.configuration_from_environment", slowly)

    one, other = at_once(2, lambda: default.configuration)

    assert one is other is default.configuration


def test_threads_that_configure_differently_are_not_both_believed(default):
    turns = iter(["prod", "staging"] * 10)

    outcomes = at_once(20, lambda: default.configure(outbox.Keyring({"k1": SECRET}), env=next(turns)))

    assert sum(isinstance(outcome, outbox.ConfigurationError) for outcome in outcomes) == 10


def test_the_module_functions_are_those_of_the_default_instance():
    for name in ("configure", "enqueue", "child_key", "idempotent", "run_idempotent", "status", "cancel"):
        assert getattr(outbox, name).__self__ is outbox.default


def test_every_public_name_is_there():
    assert all(hasattr(outbox, name) for name in outbox.__all__)


@pytest.mark.parametrize("installed", ["httpx", "stripe", "apscheduler", "alembic", "click", "psycopg"])
def test_importing_outbox_does_not_load(installed, modules_of_outbox):
    assert installed not in modules_of_outbox


def test_importing_outbox_loads_only_sqlalchemy_and_the_standard_library(modules_of_outbox):
    known = {*sys.stdlib_module_names, "outbox", "sqlalchemy", "typing_extensions", "greenlet", "cython_runtime"}
    # What site.py loads before anything else: an editable install, coverage and the like.
    bare = set(loaded_by("pass"))

    assert {name for name in modules_of_outbox if not name.startswith("_")} - known - bare == set()


@pytest.fixture(scope="module")
def modules_of_outbox():
    return loaded_by("import outbox")


def loaded_by(statement):
    """The top-level modules that a fresh interpreter has after the statement."""
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_outboxes_of_one_schema_and_prefix_share_their_tables():
    one, other, elsewhere = (
        outbox.Outbox(outbox.Keyring({"k1": SECRET}), env=env, prefix=prefix).configuration
        for env, prefix in (("prod", "outbox_"), ("staging", "outbox_"), ("prod", "shop_"))
    )

    assert one.tables is other.tables
    assert elsewhere.tables.entry.name == "shop_entry"
