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
from support.cases import MARKED, each_value_once, fewer_on_sqlite, one_case_each, without_case
from support.database import TABLES, Base, Client, Database
from support.event_loops import LOOP, LOOPS, loops_of, set_loop
from support.mariadb_copies import MariaDBCopies
from support.mariadb_server import missing_program, temporary_mariadb, with_driver
from support.mysql_server import NotHere, temporary_mysql
from support.portable import SENT, refused_in
from support.postgresql_copies import PostgreSQLCopies

import outbox
from dispatchers.testing.postgres import temporary_postgres
from outbox.sessions.hint_sender import HintSender

pytest.register_assert_rewrite("support.store_agreement", "support.roles")  # their assertions are a test's

# No example is a failure because the machine was busy. A search for bugs sets another number.
EXAMPLES = int(os.environ.get("OUTBOX_TEST_EXAMPLES", "25"))
hypothesis.settings.register_profile("outbox", deadline=None, max_examples=EXAMPLES)
hypothesis.settings.load_profile("outbox")

TESTS = Path(__file__).parent
GARBAGE_MIN = 10_000  # objects; with 50,000 the tests took more time

# A shell's background job ignores Ctrl-C, and so would the processes that tests stop with it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-case", action="store_true", help="run one case of each test, another for each next one")
    for kind, where in (("portable", "in the portable mode"), ("mariadb", "on MariaDB"), ("mysql", "on MySQL")):
        parser.addoption(f"--{kind}", action="store_true", help=f"run all tests of a database {where}, and no others")
    parser.addoption("--every-case", action="store_true", help="run each value on each database")
    which = "the event loop of the tests; mixed: each on one of both; other: each on the other one"
    parser.addoption("--loop", choices=LOOPS, default="mixed", help=which)


def pytest_sessionstart() -> None:
    """Disable the garbage collector: collecting the tests makes little garbage."""
    gc.disable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("loop")
    loop = marker.args[0] if marker else item.stash[LOOP]
    item.add_report_section("setup", "event loop", loop)  # shown with a failure: `--loop` repeats it
    set_loop(loop)


def pytest_collection_finish() -> None:
    """Freeze the collected tests, which stay until the end: the garbage collector need not look at them again and again.

    Python collects garbage after 700 new objects, which took a seventh of the tests' own time. A test that needs it calls it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_MIN, 10, 10)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _choose(config, items)
    for item, loop in loops_of(items, config.getoption("--loop")):
        item.stash[LOOP] = loop
    if _is_whole(config) and (missed := without_case(items)):
        raise pytest.UsageError(f"markers without effect, remove or mend them: {', '.join(missed)}")


def _is_whole(config: pytest.Config) -> bool:
    """Whether the run collects every test. `--last-failed` collects those tests only."""
    has_all = config.args == config.getini("testpaths") or [Path(path) for path in config.args] == [TESTS]
    return has_all and not (_only_kind(config) or config.getoption("--one-case") or config.getoption("--last-failed"))


def _choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what repeats others, and what the options leave out."""
    if kind := _only_kind(config):
        chosen = [item for item in items if kind in item.name.partition("[")[2].rstrip("]").split("-")]
        if config.getoption("--mysql"):
            chosen = [item for item in items if item in set(chosen) or kind in getattr(item, "fixturenames", ())]
            chosen = [item for item in chosen if "mysql" not in _different_on(item)]
        chosen = [item for item in chosen if kind not in _different_on(item)]
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
    """MySQL is tested by the tests of MariaDB, whose fixtures then have a MySQL."""
    options = {"portable": "portable", "mariadb": "mariadb", "mysql": "mariadb"}
    return next((kind for option, kind in options.items() if config.getoption(f"--{option}")), None)


def _different_on(item: pytest.Item) -> set[str]:
    return {mark.args[0] for mark in item.iter_markers("differs")}


def _is_above_store(item: pytest.Item) -> bool:
    """Whether the test is of code that is equal on each database, because it does not touch the store's own statements."""
    folder = item.path.relative_to(TESTS).parts[0]
    return folder in ("dispatchers", "cli", "dashboard") and item.get_closest_marker("on_mariadb") is None


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


def _has_apps_rights(node: pytest.Item) -> bool:
    return node.get_closest_marker("as_app") is not None and node.get_closest_marker("owner") is None


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
    database = copies.take(as_roles=_has_apps_rights(request.node))
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
def mariadb_copies(request: pytest.FixtureRequest) -> Iterator[MariaDBCopies]:
    """The databases of the server that OUTBOX_TEST_MARIADB_URL names, else of one started for this process and gone with it.

    OUTBOX_TEST_MARIADB_DRIVER may name another driver than PyMySQL: `mysqldb`. With `--mysql` the server is a MySQL.
    """
    if request.config.getoption("--mysql"):
        yield from _mysql_copies()
        return
    given = os.environ.get("OUTBOX_TEST_MARIADB_URL")
    driver = os.environ.get("OUTBOX_TEST_MARIADB_DRIVER")
    if not given and (missing := missing_program()):
        pytest.skip(f"{missing} is not installed, and OUTBOX_TEST_MARIADB_URL names no server")
    with nullcontext(sa.make_url(given)) if given else temporary_mariadb() as url:
        copies = MariaDBCopies(with_driver(url, driver) if driver else url, _create_tables)
        yield copies
        if given:
            copies.drop()


def _mysql_copies() -> Iterator[MariaDBCopies]:
    """OUTBOX_TEST_MYSQL_URL may name a server."""
    given = os.environ.get("OUTBOX_TEST_MYSQL_URL")
    try:
        with nullcontext(sa.make_url(given)) if given else temporary_mysql() as url:
            copies = MariaDBCopies(url, _create_tables)
            yield copies
            if given:
                copies.drop()
    except NotHere as reason:
        pytest.skip(f"MySQL cannot run here, and OUTBOX_TEST_MYSQL_URL names no server: {reason}")


@pytest.fixture
def mariadb(mariadb_copies: MariaDBCopies, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database of the test's own, on MariaDB."""
    database = mariadb_copies.take(as_roles=_has_apps_rights(request.node))
    yield database
    mariadb_copies.give_back(database, is_changed=request.node.get_closest_marker("owner") is not None)


@pytest.fixture
def mysql(mariadb: Database) -> Database:
    """A database of the test's own, on MySQL, with `--mysql` only."""
    if mariadb.server != "mysql":
        pytest.skip("it runs with --mysql only")
    return mariadb


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `database` runs on PostgreSQL and SQLite, and on the others for which its module has a marker."""
    if "database" in metafunc.fixturenames and not _is_given(metafunc, "database"):
        others = [kind for mark, kind in MARKED.items() if metafunc.definition.get_closest_marker(mark)]
        kinds = ("postgresql", "sqlite", *others)
        if kind := _only_kind(metafunc.config):
            kinds = (kind,)
        metafunc.parametrize("database", kinds, indirect=True)


def _is_given(metafunc: pytest.Metafunc, fixture: str) -> bool:
    """Whether the test has its own values for the fixture, or its module another fixture of this name."""
    names = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    return fixture in names or hasattr(metafunc.module, fixture)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Database:
    """A database of the test's own: `pytest_generate_tests`."""
    made: Database = request.getfixturevalue(request.param)
    return made


@pytest.fixture(autouse=True)
def hints_to_other_engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the senders of hints without `sends_hints`: a thread and a connection cost several times what a test does."""
    if request.node.get_closest_marker("sends_hints") is None:
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
