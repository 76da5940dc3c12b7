"""The databases: every test that asks for one gets its own copy of a template, on a real PostgreSQL and on SQLite."""

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import pytest
import sqlalchemy as sa
from support.cases import DATABASES, each_value_once, fewer_on_sqlite, one_case_each
from support.database import TABLES, Base, Client, Database
from support.mariadb_copies import MariaDBCopies
from support.mariadb_server import missing_program, temporary_mariadb, with_driver
from support.portable import SENT, refused_in
from support.postgresql_copies import PostgreSQLCopies

import outbox
from dispatchers.testing.postgres import temporary_postgres
from outbox.hint_sender import HintSender

pytest.register_assert_rewrite("support.store_agreement", "support.roles")  # their assertions are a test's

# No example is a failure because the machine was busy. A search for bugs sets another number.
EXAMPLES = int(os.environ.get("OUTBOX_TEST_EXAMPLES", "25"))
hypothesis.settings.register_profile("outbox", deadline=None, max_examples=EXAMPLES)
hypothesis.settings.load_profile("outbox")

GARBAGE_MIN = 10_000  # objects; with 50,000 the tests took more time

# A shell's background job ignores Ctrl-C, and so would the processes that tests stop with it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-case", action="store_true", help="run one case of each test, another for each next one")
    for kind, where in (("portable", "in the portable mode"), ("mariadb", "on MariaDB")):
        parser.addoption(f"--{kind}", action="store_true", help=f"run all tests of a database {where}, and no others")
    parser.addoption("--every-case", action="store_true", help="run each value on each database")


def pytest_sessionstart() -> None:
    """Collecting the tests makes no garbage to speak of."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was collected stays until the end: the garbage collector need not look at it again and again.

    Python collects garbage after 700 new objects, which took a seventh of the tests' own time. A test that needs it calls it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_MIN, 10, 10)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if kind := _only_kind(config):
        chosen = [item for item in items if kind in item.name.partition("[")[2].rstrip("]").split("-")]
        chosen = [item for item in chosen if item.name.partition("[")[0] not in DIFFERENT[kind]]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
        return
    if config.getoption("--one-case"):
        chosen = one_case_each(items)
    elif config.getoption("--every-case"):
        return
    else:
        chosen = each_value_once(items)
        above = [item for item in chosen if _is_above_store(item)]
        repeated = set(above).difference(fewer_on_sqlite(above))
        chosen = [item for item in chosen if item not in repeated]
    left_out = set(items).difference(chosen)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _only_kind(config: pytest.Config) -> str | None:
    return next((kind for kind in DIFFERENT if config.getoption(f"--{kind}")), None)


def _is_above_store(item: pytest.Item) -> bool:
    """Whether it tests what does the same on each database, as it does not touch the store's own statements."""
    return item.path.parent.name in ("dispatchers", "cli", "dashboard") and item.path.stem not in ON_MARIADB


@pytest.fixture(scope="session")
def server_url() -> Iterator[sa.URL]:
    """A server: the one that OUTBOX_TEST_DATABASE_URL names, else one started for this process and gone with it.

    There is no skipping: without a PostgreSQL the tests that need it are errors.
    """
    given = os.environ.get("OUTBOX_TEST_DATABASE_URL")
    if given:
        yield sa.make_url(given)
        return
    with temporary_postgres(durable=False) as server:
        yield sa.make_url(server.url)


APP_SIDE = frozenset(
    f"test_{name}"
    for name in (
        *("enqueue", "enqueue_duplicates", "enqueue_transactions", "enqueue_savepoints", "enqueue_listeners"),
        *("due", "cancel", "races", "direct_statements"),
        *("idempotent", "idempotent_blocks", "idempotent_refusals", "idempotent_replay", "run_idempotent"),
        *("body_key", "mismatches"),
        *("leases", "leases_races", "leases_refusals", "leases_renewal", "leases_taken_over", "accept", "status_route"),
        *("inbox", "inbox_retention", "inbox_cloudevents", "inbox_stripe", "isolation"),
        *("asgi", "asgi_claims", "fastapi", "django", "flask", "requests", "transactions"),
        *("completion", "completion_failing"),
    )
)
"""The modules whose tests run with the rights of `outbox db roles`, the app's and the dispatchers': `Database.roles`. Not those
that are marked `owner`: they change the schema, or have a dispatcher on an engine of their own.
"""


IN_PORTABLE_MODE = frozenset({"test_enqueue_duplicates", "test_ordering_races", "test_leases_races", "test_run_once"})
"""The modules whose tests run in the portable mode too. With `--portable` all tests of a database do, and no others run."""


ON_MARIADB = frozenset(
    f"test_{name}"
    for name in (
        *("enqueue", "enqueue_duplicates", "enqueue_transactions", "enqueue_savepoints", "enqueue_listeners"),
        *("due", "cancel", "positions"),
        *("idempotent", "idempotent_blocks", "idempotent_refusals", "idempotent_replay", "run_idempotent", "body_key"),
        *("leases", "leases_races", "leases_refusals", "leases_renewal", "leases_taken_over", "accept"),
        *("inbox", "inbox_retention", "inbox_batches", "inbox_duplicates"),
        *("run_once", "ordering", "ordering_races", "lookups", "fair_share_claims", "fair_share_races"),
        *("ordering_blocked", "flow_control_shared", "breaker_shared", "pause_shared"),
        *("callbacks", "callbacks_concurrency", "completion", "completion_failing"),
        *("retention", "retention_races", "unserved_log", "bad_rows"),
        *("failover_guard", "admin_groups", "entry_filter", "proposals", "audit", "maintenance", "pages"),
    )
)
"""The modules whose tests run on MariaDB too: what the store does. What is above the store does the same on each database."""


NOT_PORTABLE: dict[str, str] = {
    "test_two_dispatchers_run_each_callback_once": "a callback is called again after 40001, and commits once",
    "test_one_dispatcher_works_in_one_event_loop_after_the_other": "a callback is called again after 40001",
    "test_an_older_dispatcher_leaves_its_outcome_to_one_with_the_callback": "a callback is called again after 40001",
    "test_prometheus_reads_the_database_at_each_scrape": "the sizes of the tables are not read",
    "test_observing_sends_not_one_statement_more": "the first transaction of a connection asks for its level",
    "test_the_first_check_writes_an_identity_and_the_next_ones_leave_it": "the identity has no place and no timeline",
    "test_the_apps_start_refuses_an_engine_in_autocommit_mode": "the start refuses its level instead",
    "test_of_two_who_confirm_at_once_one_carries_it_out": "the second operator gets 40001, and confirms again",
    "test_an_async_callback_that_is_overdue_is_cancelled": "no other connection can end its transaction, as on SQLite",
    "test_a_request_without_the_tables_learns_how_they_are_made": "a table is missing first, because there is no function",
    "test_an_autocommit_connection_is_refused_and_nothing_is_written": "its engine cannot be in autocommit by the driver",
}
"""The tests of a database that are left out of `--portable`, each with what is different in that mode."""

NOT_ON_MARIADB: dict[str, str] = {
    "test_every_table_has_a_size": "its ANALYZE of the whole database is PostgreSQL's; the sizes are the server's estimates",
    "test_observing_sends_not_one_statement_more": "the first transaction of a connection asks for the server's settings",
    "test_without_the_tables_it_finds_that_and_leaves_out_what_needs_them": "a missing table counts as one without rights",
    "test_a_request_without_the_tables_learns_how_they_are_made": "a table is missing first, because there is no function",
    "test_an_autocommit_connection_is_refused_and_nothing_is_written": "its engine cannot be in autocommit by the driver",
}
"""The tests of a database that are left out of `--mariadb`, each with what is different there."""

DIFFERENT = {"portable": NOT_PORTABLE, "mariadb": NOT_ON_MARIADB}

HINTED = frozenset(
    {
        "test_hints",
        "test_hint_sender",
        "test_mismatches",
        "test_wakeup",
        "test_hinted_claims",
        "test_dispatcher",
        "test_dispatcher_keys",
        "test_daemon",
        "test_daemon_outages",
        "test_many_processes",
    }
)
"""The modules whose tests send hints to other engines and processes, as an app does. In the others no sender has a thread and a
connection, which cost a test several times what it does itself; dispatchers of the process are woken all the same.
"""


@pytest.fixture(scope="session")
def copies(server_url: sa.URL) -> Iterator[PostgreSQLCopies]:
    copies = PostgreSQLCopies(server_url, _create_tables)
    yield copies
    copies.close()
    if os.environ.get("OUTBOX_TEST_DATABASE_URL"):  # a server of our own goes with all that is in it
        copies.drop()


@pytest.fixture(scope="session")
def portable_copies(server_url: sa.URL) -> Iterator[PostgreSQLCopies]:
    copies = PostgreSQLCopies(server_url.set(drivername="portable+psycopg"), _create_tables, has_roles=False)
    yield copies
    copies.close()
    if os.environ.get("OUTBOX_TEST_DATABASE_URL"):
        copies.drop()


@pytest.fixture
def portable(portable_copies: PostgreSQLCopies, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database of the test's own, on PostgreSQL in the portable mode. With `--portable` each statement is audited."""
    database = portable_copies.take()
    with SENT.recorded() if request.config.getoption("--portable") else nullcontext([]) as sent:
        yield database
    portable_copies.give_back(database)
    assert [found for statement in sent for found in refused_in(statement)] == []


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "shop.db"
    _create_tables(sa.URL.create("sqlite", database=str(path)))
    return path


@pytest.fixture
def postgresql(copies: PostgreSQLCopies, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database of the test's own, on PostgreSQL."""
    is_apps = request.module.__name__ in APP_SIDE and request.node.get_closest_marker("owner") is None
    database = copies.take(as_roles=is_apps)
    yield database
    copies.give_back(database)


@pytest.fixture
def sqlite(sqlite_template: Path, tmp_path: Path) -> Iterator[Database]:
    """A database of the test's own, on SQLite, with a prepared engine. It outwaits other writers on a busy machine, too."""
    path = shutil.copy(sqlite_template, tmp_path / "shop.db")
    database = Database(sa.URL.create("sqlite", database=str(path), query={"timeout": "30"}))
    yield database
    database.dispose()


@pytest.fixture(scope="session")
def mariadb_copies() -> Iterator[MariaDBCopies]:
    """Those of the server that OUTBOX_TEST_MARIADB_URL names, else of one started for this process and gone with it.

    OUTBOX_TEST_MARIADB_DRIVER may name another driver than PyMySQL: `mysqldb`.
    """
    given = os.environ.get("OUTBOX_TEST_MARIADB_URL")
    driver = os.environ.get("OUTBOX_TEST_MARIADB_DRIVER")
    if not given and (missing := missing_program()):
        pytest.skip(f"{missing} is not installed, and OUTBOX_TEST_MARIADB_URL names no server")
    with nullcontext(sa.make_url(given)) if given else temporary_mariadb() as url:
        copies = MariaDBCopies(with_driver(url, driver) if driver else url, _create_tables)
        yield copies
        if given:
            copies.drop()


@pytest.fixture
def mariadb(mariadb_copies: MariaDBCopies, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database of the test's own, on MariaDB."""
    is_apps = request.module.__name__ in APP_SIDE and request.node.get_closest_marker("owner") is None
    database = mariadb_copies.take(as_roles=is_apps)
    yield database
    mariadb_copies.give_back(database, is_changed=request.node.get_closest_marker("owner") is not None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `database` runs on each kind; on MariaDB those of the modules that show what differs there."""
    if "database" in metafunc.fixturenames and not _is_given(metafunc, "database"):
        kinds = DATABASES[:3] if metafunc.module.__name__ in ON_MARIADB else DATABASES[:2]
        if metafunc.module.__name__ in IN_PORTABLE_MODE:
            kinds = DATABASES
        if kind := _only_kind(metafunc.config):
            kinds = (kind,)
        metafunc.parametrize("database", kinds, indirect=True)


def _is_given(metafunc: pytest.Metafunc, fixture: str) -> bool:
    """Whether the test has its own values for it, or its module another fixture of this name."""
    names = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    return fixture in names or hasattr(metafunc.module, fixture)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Database:
    """A database of the test's own: `pytest_generate_tests`."""
    made: Database = request.getfixturevalue(request.param)
    return made


@pytest.fixture(autouse=True)
def hints_to_other_engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.module.__name__ not in HINTED:
        for what in ("send", "count"):
            monkeypatch.setattr(HintSender, what, lambda *given, **settings: None)


@pytest.fixture
def ob() -> outbox.Outbox:
    return outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}, current="k1"), env="test")


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, database: Database, ob: outbox.Outbox) -> Client:
    """Sends requests to the shop, whose handler uses a Session, or an AsyncSession."""
    return Client(database, ob, is_async=request.param == "async")


def _create_tables(url: sa.URL) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    TABLES.metadata.create_all(engine)
    Base.metadata.create_all(engine)
