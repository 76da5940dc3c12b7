"""The plugin for pytest, as an app's tests use it: pytest in a process of its own, on PostgreSQL and on SQLite."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from support.plugin_shop import SHOP

import outbox
from dispatchers.testing.copied_databases import copies_for

pytest_plugins = ["pytester"]

MAX_SECONDS = 300
OURS = sa.text("SELECT datname FROM pg_database WHERE datname LIKE 'outbox_pytest_%' ORDER BY datname")


@pytest.fixture
def shop(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with the shop, and no setting of this run."""
    for name in [*os.environ]:
        if name.startswith(("OUTBOX_", "PYTEST_ADDOPTS", "PYTEST_XDIST", "DJANGO_")):
            monkeypatch.delenv(name)
    pytester.makepyfile(**SHOP)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    return pytester


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    """The option `outbox_database_url`."""
    if request.param == "sqlite":
        return "sqlite://"
    return text_of(request.getfixturevalue("server_url"))


def text_of(url: sa.URL) -> str:
    return url.render_as_string(hide_password=False)


def run(shop: pytest.Pytester, url: str, *arguments: str, **files: str) -> pytest.RunResult:
    if files:
        shop.makepyfile(**files)
    return shop.runpytest_subprocess("--outbox-database-url", url, *arguments, timeout=MAX_SECONDS)


@contextmanager
def on(server_url: sa.URL) -> Iterator[sa.Connection]:
    engine = sa.create_engine(server_url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        yield connection


def databases(server_url: sa.URL) -> list[str]:
    with on(server_url) as connection:
        return list(connection.scalars(OURS))


SYNC = """
    from datetime import timedelta
    import pytest
    from dispatchers.adapters.providers import resend
    from dispatchers.testing import ServiceFault
    from shop import CHARGE, Order, place

    OPERATION = "stripe.payment_intents.create"

    def test_what_is_enqueued(outbox_session, outbox_entries, assert_enqueued, assert_not_enqueued):
        assert_not_enqueued()
        place(outbox_session, 1)
        [charge] = assert_enqueued(OPERATION, {"amount": 2000}, parent="order:1")
        assert outbox_entries(OPERATION) == outbox_entries(parent="order:1") == outbox_entries() == [charge]
        assert_not_enqueued("mail.send")
        assert outbox_entries("mail.send") == []

    def test_each_test_has_a_database_of_its_own(outbox_entries, outbox_session):
        assert outbox_entries() == []
        assert outbox_session.query(Order).all() == []

    def test_what_is_sent(outbox_session, outbox_drain, fake_stripe):
        place(outbox_session, 1)
        outbox_session.commit()
        fake_stripe.force(ServiceFault.LOSE_RESPONSE)

        charge, mail = outbox_drain(ahead=True)

        assert (charge.operation, charge.state, charge.attempts) == (OPERATION, "delivered", 2)
        assert (mail.operation, mail.state, mail.parent) == ("mail.send", "delivered", charge.parent)
        assert [each.parent for each in fake_stripe.ledger.charges] == [charge.result["id"]]
        assert outbox_session.get(Order, 1).state == "paid"
        outbox_session.commit()
        assert outbox_drain(ahead=True) == []

    def test_what_is_due_later(outbox_session, outbox_drain, outbox_clock):
        place(outbox_session, 1, due=timedelta(days=3))
        outbox_session.commit()
        before = outbox_clock.now()
        assert outbox_drain() == []
        outbox_clock.advance(timedelta(days=3))
        assert outbox_clock.now() - before >= timedelta(days=3)
        assert len(outbox_drain()) == 2

    def test_the_fakes_forget_keys_as_time_passes(outbox_clock, fake_stripe, service_of):
        payments, options = fake_stripe.client().v1.payment_intents, {"idempotency_key": "k"}
        payments.create(CHARGE, options)
        payments.create(CHARGE, options)
        assert len(fake_stripe.ledger.charges) == 1
        before = service_of(resend).fake.now()
        outbox_clock.advance(timedelta(days=2))
        payments.create(CHARGE, options)
        assert len(fake_stripe.ledger.charges) == 2
        assert service_of(resend).fake.now() - before >= timedelta(days=2)

    def test_a_test_may_leave_a_transaction_open(outbox_database, outbox_engine):
        connection = outbox_engine.connect()
        place_rows = connection.exec_driver_sql("INSERT INTO shop_order (id, state) VALUES (7, 'placed')")
        test_a_test_may_leave_a_transaction_open.kept = connection

    def test_the_next_test_is_clean(outbox_session):
        assert outbox_session.query(Order).all() == []
"""


def test_a_sync_test_sees_and_sends_what_is_enqueued(shop: pytest.Pytester, url: str, server_url: sa.URL) -> None:
    result = run(shop, url, "-Werror", test_shop=SYNC)

    result.assert_outcomes(passed=7)
    assert databases(server_url) == []


ASYNC = """
    import asyncio
    import pytest
    from dispatchers import Operations
    from outbox.testing import assert_enqueued as assert_in
    from shop import Order, place

    {mark}

    @pytest.fixture
    def outbox_operations():
        effects = Operations()
        @effects.on_settled("stripe.payment_intents.create")
        async def charged(session, settlement):
            (await session.get_one(Order, 1)).state = "paid"
        return effects

    @pytest.mark.parametrize("number", [1, 2])
    async def test_async(outbox_async_sessions, outbox_entries, outbox_drain, number):
        loop = asyncio.get_running_loop()
        async with outbox_async_sessions() as session, session.begin():
            place(session, 1)
            await assert_in(session, "stripe.payment_intents.create")
        assert len(outbox_entries()) == 1
        [charge] = outbox_drain(ahead=True)
        assert charge.state == "delivered"
        async with outbox_async_sessions() as session:
            assert (await session.get(Order, 1)).state == "paid"
        assert asyncio.get_running_loop() is loop
"""
MARKS = {
    "pytest-asyncio": "pytestmark = pytest.mark.asyncio",
    "one loop for all": "pytestmark = pytest.mark.asyncio(loop_scope='session')",
    "anyio": """pytestmark = pytest.mark.anyio
    @pytest.fixture(params=[{"use_uvloop": True}, {"use_uvloop": False}])
    def anyio_backend(request):
        return "asyncio", request.param""",
}


def test_async_tests_run_under_each_plugin(shop: pytest.Pytester, url: str) -> None:
    files = {f"test_{number}": ASYNC.format(mark=mark) for number, mark in enumerate(MARKS.values())}

    result = run(shop, url, "-Werror", **files)

    result.assert_outcomes(passed=2 + 2 + 4)


def test_asyncpg_alone_is_enough(shop: pytest.Pytester, server_url: sa.URL) -> None:
    without = """
        import importlib.util, sys
        sys.modules["psycopg"] = None
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == "psycopg" else found(name, package)
    """
    shop.makepyfile(without_psycopg=without)

    result = run(
        shop,
        text_of(server_url.set(drivername="postgresql+asyncpg")),
        *("-Werror", "-p", "without_psycopg"),
        test_1=ASYNC.format(mark=MARKS["pytest-asyncio"]),
        test_2="""
            def test_a_sync_test_reads_too(outbox_entries, outbox_engine, outbox_drain):
                assert outbox_engine.dialect.driver == "asyncpg"
                assert outbox_entries() == outbox_drain() == []
            def test_refused(outbox_session): ...
        """,
    )

    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*outbox_engine is an AsyncEngine: use the fixture outbox_async_sessions*"])


FAILING = """
    from shop import place
    from outbox.testing import assert_enqueued as assert_in
    import unittest

    OPERATION = "stripe.payment_intents.create"

    def test_diff(outbox_session, assert_enqueued):
        place(outbox_session, 1)
        place(outbox_session, 2)
        assert_enqueued(OPERATION, {"amount": 1999, "metadata": {"order": "2"}}, parent="order:2")

    def test_function(outbox_session):
        place(outbox_session, 1)
        assert_in(outbox_session, OPERATION, parent="order:3")

    def test_none(outbox_session, assert_enqueued):
        place(outbox_session, 1)
        assert_enqueued("mail.send")

    def test_compared(outbox_session, outbox_entries):
        place(outbox_session, 1)
        assert [entry.payload["amount"] for entry in outbox_entries()] == [1]

    def test_open(outbox_session, outbox_drain):
        place(outbox_session, 1)
        outbox_drain()

    def test_unserved(outbox_session, outbox_drain):
        import outbox
        outbox.enqueue(outbox_session, "crm.upsert", {}, parent="order:1")
        outbox_session.commit()
        outbox_drain()
"""


def test_a_failing_test_shows_what_is_enqueued(shop: pytest.Pytester, url: str) -> None:
    result = run(shop, url, "-vv", test_shop=FAILING)

    result.assert_outcomes(failed=6)
    shown = result.stdout.str()
    assert (
        "E       the payload of the nearest entry == what is asserted:\n"
        "E         {'amount': 2000, 'metadata': {'order': '2'}} == {'amount': 1999, 'metadata': {'order': '2'}}\n"
    ) in shown
    assert "E         {'amount': 2000} != {'amount': 1999}\n" in shown
    assert "E       the parent of the nearest entry == what is asserted:\n" in shown
    assert "0 entries are 'mail.send', not 1; enqueued are:\nE           stripe.payment_intents.create {" in shown
    assert "E       assert [2000] == [1]" in shown
    open_transaction = "which locks SQLite's file" if url == "sqlite://" else "with 1 entries that are not committed"
    assert f"outbox_session has an open transaction{', ' if url == 'sqlite://' else ' '}{open_transaction}" in shown
    assert (
        "no adapter serves 'crm.upsert', so outbox_drain cannot send it: let the fixture outbox_adapters return"
        in shown
    )
    assert "dispatchers/testing/" not in shown  # the traceback ends at the test's own line


def test_workers_share_a_server(shop: pytest.Pytester, server_url: sa.URL) -> None:
    numbered = """
        import pytest
        from shop import place
        @pytest.mark.parametrize("number", range(6))
        def test_order(outbox_session, outbox_drain, number):
            place(outbox_session, 1)
            outbox_session.commit()
            assert len(outbox_drain()) == 2
    """

    result = run(shop, text_of(server_url), "-n2", test_shop=numbered)

    result.assert_outcomes(passed=6)
    assert databases(server_url) == []


def test_the_next_run_removes_what_a_killed_run_left(shop: pytest.Pytester, server_url: sa.URL) -> None:
    waiting = """
        import pathlib, time
        def test_waits(outbox_session):
            pathlib.Path("ready").touch()
            while not pathlib.Path("end").exists():
                time.sleep(0.01)
    """
    shop.makepyfile(test_waiting=waiting, test_quick="def test_quick(outbox_session): ...")
    command = [sys.executable, "-m", "pytest", "-q", "--outbox-database-url", text_of(server_url)]
    with subprocess.Popen([*command, "test_waiting.py"], cwd=shop.path) as killed:
        wait_for((shop.path / "ready").exists)
        killed.send_signal(signal.SIGKILL)
    (left_template, left) = sorted(databases(server_url), reverse=True)
    (shop.path / "ready").unlink()

    with subprocess.Popen([*command, "test_waiting.py"], cwd=shop.path) as alive:
        wait_for((shop.path / "ready").exists)
        during = databases(server_url)
        assert not {left, left_template} & {*during}
        subprocess.run([*command, "test_quick.py"], cwd=shop.path, check=True)
        assert databases(server_url) == during  # a run that is alive keeps its databases
        (shop.path / "end").touch()
    assert alive.returncode == 0
    assert databases(server_url) == []


def wait_for(what: Callable[[], Any]) -> None:
    latest = time.monotonic() + MAX_SECONDS
    while not what():
        assert time.monotonic() < latest
        time.sleep(0.01)


def test_an_app_uses_its_own_database(shop: pytest.Pytester, url: str) -> None:
    """The engine of the app, and a transaction that is rolled back at the end of each test."""
    own = """
        import pytest, sqlalchemy as sa
        import outbox
        from sqlalchemy.orm import Session
        from shop import Base, Order, place

        @pytest.fixture(scope="module")
        def engine(_outbox_copies):  # in place of the app's own database
            database = _outbox_copies.make()
            engine = sa.create_engine(database.url)
            if engine.dialect.name == "sqlite":
                outbox.prepare_sqlite(engine)
            yield engine
            engine.dispose()
            _outbox_copies.remove(database)

        @pytest.fixture
        def outbox_engine(engine):
            return engine

        @pytest.fixture
        def outbox_session(engine):
            with engine.connect() as connection:
                transaction = connection.begin()
                with Session(connection, join_transaction_mode="create_savepoint") as session:
                    yield session
                transaction.rollback()

        @pytest.mark.parametrize("number", [1, 2])
        def test_commits_are_rolled_back(outbox_session, assert_enqueued, assert_not_enqueued, number):
            assert_not_enqueued()
            place(outbox_session, 1)
            outbox_session.commit()
            assert_enqueued("stripe.payment_intents.create", parent="order:1")
            assert outbox_session.get(Order, 1).state == "placed"

        def test_a_drain_is_refused(outbox_session, outbox_drain):
            place(outbox_session, 1)
            outbox_session.commit()
            with pytest.raises(outbox.ConfigurationError, match="open transaction"):
                outbox_drain()
    """

    result = run(shop, url, "-Werror", test_shop=own)

    result.assert_outcomes(passed=3)


def test_tables_come_from_the_apps_own_migrations(shop: pytest.Pytester, url: str) -> None:
    migrated = """
        import pytest
        from sqlalchemy import text
        from outbox import migrations

        @pytest.fixture(scope="session")
        def outbox_create_tables():
            def create(connection):
                migrations.upgrade(connection)
                connection.execute(text("CREATE TABLE legacy (id INTEGER)"))
            return create

        def test_tables(outbox_session, outbox_entries, outbox_engine):
            migrations.check(outbox_engine)
            assert outbox_session.execute(text("SELECT count(*) FROM legacy")).scalar() == 0
            assert outbox_entries() == []
    """

    run(shop, url, test_shop=migrated).assert_outcomes(passed=1)


def test_an_outbox_of_the_apps_own_has_its_tables(shop: pytest.Pytester, server_url: sa.URL) -> None:
    own = """
        import pytest
        import outbox
        @pytest.fixture(scope="session")
        def outbox_instance():
            return outbox.Outbox(outbox.Keyring.public(), env="own", schema="effects", prefix="box_")
        def test_own(outbox_session, outbox_instance, assert_enqueued, outbox_drain):
            outbox_instance.check(outbox_session.get_bind())
            outbox_instance.enqueue(outbox_session, "mail.send", {}, parent="order:1")
            outbox_session.commit()
            assert_enqueued("mail.send")
            assert len(outbox_drain()) == 1
    """

    run(shop, text_of(server_url), test_shop=own).assert_outcomes(passed=1)


def test_frozen_time_does_not_stop_a_drain(shop: pytest.Pytester, url: str) -> None:
    """Frozen by either package; freezegun must leave the event loop's time alone."""
    frozen = """
        from datetime import UTC, datetime, timedelta
        import freezegun, pytest, time_machine
        from shop import place

        @pytest.mark.parametrize("freeze", [
            lambda: time_machine.travel(datetime(2031, 5, 1, tzinfo=UTC), tick=False),
            lambda: freezegun.freeze_time("2031-05-01", real_asyncio=True),
        ], ids=["time-machine", "freezegun"])
        def test_frozen(outbox_session, outbox_drain, outbox_clock, fake_stripe, freeze):
            with freeze():
                place(outbox_session, 1, due=timedelta(hours=1))
                outbox_session.commit()
                assert outbox_clock.now() == datetime(2031, 5, 1, tzinfo=UTC)
                assert outbox_drain() == []
                assert [each.state for each in outbox_drain(ahead=True)] == ["delivered"] * 2
                [charge] = fake_stripe.ledger.charges
                assert timedelta(0) < charge.created - datetime(2031, 5, 1, tzinfo=UTC) <= timedelta(hours=1)
    """

    run(shop, url, test_shop=frozen).assert_outcomes(passed=2)


def test_who_does_not_use_it_pays_nothing(shop: pytest.Pytester) -> None:
    idle = """
        import sys
        HEAVY = ("sqlalchemy", "outbox", "httpx", "asyncio", "stripe", "dispatchers.delivery")
        def test_idle(request):
            assert "dispatchers.testing.plugin" in sys.modules
            assert [name for name in HEAVY if name in sys.modules] == []
            assert not [name for name in request.fixturenames if "outbox" in name]
    """
    (shop.path / "conftest.py").unlink()

    others = {plugin.name for plugin in entry_points(group="pytest11")} - {"outbox"}
    left_out = [f"-pno:{name}" for name in sorted(others)]  # some import what is heavy themselves

    result = shop.runpytest_subprocess(*left_out, shop.makepyfile(test_idle=idle), timeout=60)

    result.assert_outcomes(passed=1)


def test_it_can_be_left_out_and_names_of_the_app_come_first(shop: pytest.Pytester) -> None:
    named = """
        import pytest
        @pytest.fixture
        def service_of():
            return "the app's own"
        @pytest.fixture
        def fake_stripe():
            return "as well"
        def test_names(service_of, fake_stripe):
            assert (service_of, fake_stripe) == ("the app's own", "as well")
    """

    run(shop, "sqlite://", test_names=named).assert_outcomes(passed=1)
    left_out = shop.runpytest_subprocess("-p", "no:outbox", "test_names.py", timeout=60)
    left_out.assert_outcomes(passed=1)
    shop.makepyfile(test_gone="def test_gone(outbox_entries): ...")
    gone = shop.runpytest_subprocess("-p", "no:outbox", "test_gone.py", timeout=60)
    gone.stdout.fnmatch_lines(["*fixture 'outbox_entries' not found*"])
    django = run(shop, "django", "-p", "no:django", "test_gone.py")
    django.stdout.fnmatch_lines(["*outbox_database_url = django needs pytest-django: pip install pytest-django*"])


def test_a_case_of_unittest_takes_the_fixtures(shop: pytest.Pytester) -> None:
    case = """
        import unittest, pytest
        from outbox.testing import assert_enqueued
        from shop import place
        class ShopTest(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _outbox(self, outbox_session, outbox_drain):
                self.session, self.drain = outbox_session, outbox_drain
            def test_order(self):
                place(self.session, 1)
                assert_enqueued(self.session, "stripe.payment_intents.create")
                self.session.commit()
                self.assertEqual(len(self.drain()), 2)
            def test_fails(self):
                place(self.session, 1)
                assert_enqueued(self.session, "stripe.payment_intents.create", {"amount": 1})
    """

    result = run(shop, "sqlite://", test_shop=case)

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*the payload of the nearest entry == what is asserted:*"])


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("sqlite:///shop.db", "each test gets a new file, so write sqlite://"),
        ("mariadb+pymysql://localhost", "the plugin makes databases on PostgreSQL and SQLite only"),
        ("nonsense", "which is no URL. Set the option outbox_database_url"),
    ],
)
def test_an_option_that_cannot_work_is_an_error(option: str, says: str, tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(outbox.ConfigurationError) as refused:
        copies_for(option, tmp_path, lambda connection: None, stack)

    assert str(refused.value).startswith(f"outbox_database_url is {option!r}")
    assert says in str(refused.value)


def test_a_server_that_cannot_be_used_is_one_short_error(shop: pytest.Pytester, server_url: sa.URL) -> None:
    """The user has no right to create databases, or no server is there."""
    with on(server_url) as connection:
        connection.execute(sa.text("CREATE ROLE no_creator LOGIN"))
    weak, absent = (
        server_url.set(username="no_creator"),
        sa.make_url("postgresql+psycopg://ada:secret@127.0.0.1:1/shop"),
    )
    shop.makepyfile(test_shop="def test_shop(outbox_session): ...\ndef test_again(outbox_session): ...")

    for url, says in [(weak, "permission denied to create database"), (absent, "refused")]:
        result = run(shop, text_of(url))
        result.assert_outcomes(errors=2)
        result.stdout.fnmatch_lines(["outbox_database_url is postgresql+psycopg://*"])
        assert says in result.stdout.str()
        assert len(result.outlines) < 40
        assert "secret" not in result.stdout.str()


def test_a_missing_package_is_named(shop: pytest.Pytester) -> None:
    (shop.path / "conftest.py").write_text(
        "import sys, outbox, pytest\n"
        "for package in ('h11', 'aiosqlite'):\n    sys.modules[package] = None\n"
        "outbox.configure(outbox.Keyring.public(), env='test')\n"
        "from dispatchers.adapters import MemoryAdapter\n"
        "@pytest.fixture\ndef outbox_adapters():\n    return {'mail': MemoryAdapter()}\n"
    )
    asking = """
        def test_stripe(fake_stripe): ...
        def test_profile(service_of): ...
        def test_async(outbox_async_engine): ...
        def test_others(outbox_entries, outbox_drain): ...
    """

    result = run(shop, "sqlite://", test_shop=asking)

    result.assert_outcomes(errors=3, passed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*the fixture fake_stripe needs the package 'h11': pip install 'sqlalchemy-outbox[[]stripe[]]'*",
            "*the fixture service_of needs the package 'h11': pip install 'sqlalchemy-outbox[[]http[]]'*",
            "*an AsyncEngine needs the package 'aiosqlite': pip install aiosqlite*",
        ]
    )


def test_without_an_option_a_server_is_started(shop: pytest.Pytester) -> None:
    shop.makepyfile(
        test_shop="""
            def test_shop(outbox_session, outbox_entries):
                assert outbox_session.get_bind().dialect.name == "postgresql"
                assert outbox_entries() == []
        """
    )

    shop.runpytest_subprocess(timeout=MAX_SECONDS).assert_outcomes(passed=1)
    none = {"OUTBOX_PG_BIN": str(Path(shop.path))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest"],
        cwd=shop.path,
        env=os.environ | none,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no PostgreSQL could be started" in done.stdout
    assert "or `sqlite://` for files" in done.stdout
