"""The plugin for pytest: a database for each test, what the app has enqueued, and what it comes to when it is sent.

    def test_an_order_is_charged_once(client, outbox_drain, fake_stripe):
        client.post("/orders", json={"amount": 2000})
        [charge] = outbox_drain(ahead=True)
        assert charge.state == "delivered"
        assert len(fake_stripe.ledger.charges) == 1

pytest loads it if the package is installed; `-p no:outbox` leaves it out. Until a test asks for a fixture it imports nothing of
the library. See docs/testing.md.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine, MetaData
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session

    from dispatchers.delivery import Adapter
    from dispatchers.operations import Operations
    from dispatchers.process.dispatcher import Dispatcher
    from dispatchers.testing.clock import OutboxClock, PassedTime
    from dispatchers.testing.copied_databases import CopiedDatabase, Copies
    from dispatchers.testing.loop_thread import LoopThread
    from dispatchers.testing.outbox_under_test import (
        AssertEnqueued,
        AssertNotEnqueued,
        OutboxDrain,
        OutboxEntries,
        OutboxUnderTest,
    )
    from dispatchers.testing.provider_service import RunningProvider
    from dispatchers.testing.stripe_service import RunningStripe
    from outbox.instance import Outbox

OPTION = "outbox_database_url"
DJANGO = "django"
DJANGO_FIXTURES = {"db", "transactional_db", "django_db_reset_sequences", "django_db_serialized_rollback"}


# --- what pytest calls


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "where the outbox's fixtures make databases: postgresql://..., sqlite://, or django (see docs/testing.md)"
    parser.addini(OPTION, what, default="")
    parser.getgroup("outbox").addoption("--outbox-database-url", metavar="URL", help=f"{what}; before the ini option")


def pytest_itemcollected(item: pytest.Item) -> None:
    """With Django's database, give a test of the outbox the mark `django_db` if it has none; with commits if it drains."""
    if not _is_django(_option_of(item.config)):
        return
    names = set(getattr(item, "fixturenames", ()))
    if "outbox_engine" in names and not names & DJANGO_FIXTURES and item.get_closest_marker("django_db") is None:
        item.add_marker(pytest.mark.django_db(transaction="outbox_drain" in names))


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Add pytest's own comparison to a failed `assert_enqueued`: how the nearest entry differs from what the test wants.

    It comes after pytest's own hook that gives `call` the failure of a unittest case, which is tried first.
    """
    testing = sys.modules.get("outbox.testing")
    if testing is None or call.excinfo is None or not isinstance(call.excinfo.value, testing.NotEnqueued):
        return
    error: Any = call.excinfo.value
    compare = item.ihook.pytest_assertrepr_compare
    for name, (left, right) in error.differing.items():
        lines: list[str] = next(filter(None, compare(config=item.config, op="==", left=left, right=right)), [])
        error.add_note("\n  ".join([f"the {name} of the nearest entry == what is asserted:", *lines]))


# --- the outbox


@pytest.fixture(scope="session")
def outbox_instance() -> "Outbox":
    """The outbox under test: by default the one of `outbox.configure`. Override it for an `outbox.Outbox` of your own."""
    from outbox.default_outbox import default

    return default


# --- the database


@pytest.fixture(scope="session")
def outbox_metadata() -> "MetaData | list[MetaData]":
    """The app's own tables, which each database has beside the outbox's. Override it: `return Base.metadata`."""
    return []


@pytest.fixture(scope="session")
def outbox_create_tables(outbox_metadata: Any, outbox_instance: "Outbox") -> "Callable[[Connection], None]":
    """Creates the tables in a new database, once for a session. Override it to run your own migrations."""
    from dispatchers.testing.outbox_under_test import table_creator

    return table_creator(outbox_metadata, outbox_instance)


@pytest.fixture(scope="session")
def _outbox_option(request: pytest.FixtureRequest) -> str:
    return _option_of(request.config)


@pytest.fixture(scope="session")
def _outbox_copies(
    _outbox_option: str, outbox_create_tables: Any, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[Copies]":
    from dispatchers.testing.copied_databases import copies_for
    from outbox.errors import ConfigurationError

    with ExitStack() as stack:
        try:
            copies = copies_for(_outbox_option, tmp_path_factory.mktemp("outbox"), outbox_create_tables, stack)
        except ConfigurationError as error:
            # every test reports it, and a driver's traceback has hundreds of lines
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        yield copies


@pytest.fixture
def outbox_database(_outbox_copies: "Copies") -> "Iterator[CopiedDatabase]":
    """A database of the test's own, with all tables: its `url`, and its `async_url` for an AsyncEngine."""
    database = _outbox_copies.make()
    yield database
    _outbox_copies.remove(database)


@pytest.fixture
def outbox_engine(request: pytest.FixtureRequest, _outbox_option: str) -> "Iterator[Engine | AsyncEngine]":
    """An Engine for the test's database. It is an AsyncEngine if no sync driver is installed.

    Override it with the app's own Engine or AsyncEngine: the other fixtures then work on its database.
    """
    from dispatchers.testing.database_access import async_engine, sync_engine, sync_url

    if _is_django(_outbox_option):
        yield request.getfixturevalue("_outbox_django_engine")
        return
    url = request.getfixturevalue("outbox_database").url
    if sync_url(url) is None:
        yield async_engine(url)
        return
    engine = sync_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def outbox_async_engine(outbox_engine: Any) -> "AsyncEngine":
    """An AsyncEngine for the database of `outbox_engine`. It keeps no connection, so it works in any event loop."""
    from dispatchers.testing.database_access import async_engine

    engine: AsyncEngine = outbox_engine if hasattr(outbox_engine, "sync_engine") else async_engine(outbox_engine.url)
    return engine


@pytest.fixture
def outbox_session(outbox_engine: Any) -> "Iterator[Session]":
    """A Session on `outbox_engine`, which is closed at the end. What the test does not commit is rolled back."""
    from sqlalchemy.orm import Session

    if hasattr(outbox_engine, "sync_engine"):
        pytest.fail("outbox_engine is an AsyncEngine: use the fixture outbox_async_sessions", pytrace=False)
    with Session(outbox_engine) as session:
        yield session


@pytest.fixture
def outbox_async_sessions(outbox_async_engine: "AsyncEngine") -> "async_sessionmaker[AsyncSession]":
    """Makes sessions: `async with outbox_async_sessions() as session`. Only the test's own loop can close an AsyncSession."""
    from sqlalchemy.ext.asyncio import async_sessionmaker

    return async_sessionmaker(outbox_async_engine, expire_on_commit=False)


# --- Django's database


@pytest.fixture(scope="session")
def _outbox_django_url(request: pytest.FixtureRequest, _outbox_option: str, outbox_create_tables: Any) -> "URL":
    """Of the test database that pytest-django makes, with the outbox's tables."""
    from dispatchers.testing.django_database import create_tables, url_of

    if not request.config.pluginmanager.hasplugin("django"):
        pytest.fail(f"{OPTION} = {_outbox_option} needs pytest-django: pip install pytest-django", pytrace=False)
    request.getfixturevalue("django_db_setup")
    url = url_of(_django_alias(_outbox_option))
    create_tables(url, outbox_create_tables)
    return url


@pytest.fixture
def _outbox_django_engine(
    request: pytest.FixtureRequest, _outbox_option: str, _outbox_django_url: "URL", outbox_instance: "Outbox"
) -> "Iterator[Engine]":
    """An Engine for Django's test database."""
    from dispatchers.testing.database_access import DatabaseAccess, sync_engine
    from dispatchers.testing.django_database import empty, is_open
    from dispatchers.testing.outbox_under_test import tables_under_test

    engine = sync_engine(_outbox_django_url)
    yield engine
    if not is_open(_django_alias(_outbox_option)):
        empty(DatabaseAccess(engine, request.getfixturevalue("_outbox_loop")), tables_under_test(outbox_instance))
    engine.dispose()


def _option_of(config: pytest.Config) -> str:
    option: str = config.getoption("--outbox-database-url") or config.getini(OPTION)
    return option.strip()


def _is_django(option: str) -> bool:
    return option.partition(":")[0] == DJANGO


def _django_alias(option: str) -> str:
    return option.partition(":")[2] or "default"


# --- what is enqueued


@pytest.fixture
def _outbox_loop() -> "Iterator[LoopThread]":
    from dispatchers.testing.loop_thread import LoopThread

    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture
def _outbox_tested(
    request: pytest.FixtureRequest,
    _outbox_option: str,
    _outbox_loop: "LoopThread",
    outbox_instance: "Outbox",
    outbox_engine: Any,
) -> "OutboxUnderTest":
    from dispatchers.testing.database_access import DatabaseAccess
    from dispatchers.testing.outbox_under_test import OutboxUnderTest

    session = request.getfixturevalue("outbox_session") if "outbox_session" in request.fixturenames else None
    access = DatabaseAccess(outbox_engine, _outbox_loop)
    if not _is_django(_outbox_option):
        return OutboxUnderTest(outbox_instance, access, session)
    from dispatchers.testing.django_database import DjangoUnderTest

    return DjangoUnderTest(outbox_instance, access, session, using=_django_alias(_outbox_option))


@pytest.fixture
def outbox_entries(_outbox_tested: "OutboxUnderTest") -> "OutboxEntries":
    """What the app has enqueued: `outbox_entries()`, or `outbox_entries("email.send")`."""
    from dispatchers.testing.outbox_under_test import OutboxEntries

    return OutboxEntries(_outbox_tested)


@pytest.fixture
def assert_enqueued(_outbox_tested: "OutboxUnderTest") -> "AssertEnqueued":
    """Asserts that an entry is enqueued: `assert_enqueued("email.send", {"to": "ada@example.com"}, parent="order:42")`."""
    from dispatchers.testing.outbox_under_test import AssertEnqueued

    return AssertEnqueued(_outbox_tested)


@pytest.fixture
def assert_not_enqueued(_outbox_tested: "OutboxUnderTest") -> "AssertNotEnqueued":
    """Asserts that no such entry is enqueued: `assert_not_enqueued("email.send")`, or `assert_not_enqueued()`."""
    from dispatchers.testing.outbox_under_test import AssertNotEnqueued

    return AssertNotEnqueued(_outbox_tested)


# --- what is sent


@pytest.fixture
def outbox_operations() -> "Operations | list[Operations]":
    """The app's Operations, with its callbacks. Override it: `return effects`."""
    return []


@pytest.fixture
def outbox_adapters() -> "dict[str, Adapter]":
    """The adapters by operation prefix. Override it: `return {"stripe": fake_stripe.adapter()}`."""
    return {}


@pytest.fixture
def outbox_dispatcher(
    _outbox_option: str, _outbox_tested: "OutboxUnderTest", outbox_operations: Any, outbox_adapters: Any
) -> "Dispatcher":
    """The dispatcher of `outbox_drain`, which closes it. Override it for other settings."""
    from dispatchers.testing.outbox_under_test import make_dispatcher

    settings: dict[str, Any] = {}
    if _is_django(_outbox_option):
        from dispatchers.testing.django_database import DjangoTransactions

        settings["callback_transactions"] = DjangoTransactions(_django_alias(_outbox_option))
    tested = _outbox_tested
    return make_dispatcher(tested.outbox, tested.access, outbox_operations, outbox_adapters, **settings)


@pytest.fixture
def outbox_drain(
    _outbox_tested: "OutboxUnderTest",
    _outbox_loop: "LoopThread",
    _outbox_passed: "PassedTime",
    outbox_dispatcher: "Dispatcher",
) -> "Iterator[OutboxDrain]":
    """Sends what is enqueued: `outbox_drain()`, or `outbox_drain(ahead=True)` without any wait. Returns what it sent."""
    from dispatchers.testing.outbox_under_test import OutboxDrain

    drain = OutboxDrain(_outbox_tested, outbox_dispatcher, _outbox_loop, _outbox_passed)
    yield drain
    drain.close()


# --- time, and services


@pytest.fixture
def _outbox_passed() -> "PassedTime":
    from dispatchers.testing.clock import PassedTime

    return PassedTime()


@pytest.fixture
def outbox_clock(_outbox_passed: "PassedTime", _outbox_tested: "OutboxUnderTest") -> "OutboxClock":
    """Lets time pass for the outbox and for the fakes: `outbox_clock.advance(timedelta(days=2))`."""
    from dispatchers.testing.clock import OutboxClock

    return OutboxClock(_outbox_passed, _outbox_tested.access.run, lambda: _outbox_tested.tables)


@pytest.fixture
def fake_stripe(_outbox_passed: "PassedTime") -> "Iterator[RunningStripe]":
    """A strict imitation of Stripe's API: its `ledger`, an `adapter()`, a `client()`, and faults with `force(...)`."""
    try:
        from dispatchers.testing.stripe_service import running_stripe
    except ModuleNotFoundError as error:
        raise _missing("fake_stripe", "stripe", error) from error
    with running_stripe(clock=_outbox_passed.now) as stripe:
        yield stripe
    stripe.ledger.close()


@pytest.fixture
def service_of(_outbox_passed: "PassedTime") -> "Iterator[Callable[..., RunningProvider]]":
    """Starts the fake of a service that has a profile: `mails = service_of(resend)`. It runs until the test's end."""
    try:
        from dispatchers.testing.provider_service import service_of as running
    except ModuleNotFoundError as error:
        raise _missing("service_of", "http", error) from error
    with ExitStack() as stack:
        yield lambda profile, **settings: stack.enter_context(running(profile, clock=_outbox_passed.now, **settings))


def _missing(fixture: str, extra: str, error: ModuleNotFoundError) -> ImportError:
    from outbox.extras import missing

    return missing(f"the fixture {fixture}", extra, error)
