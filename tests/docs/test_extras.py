"""Where an optional package is not installed: the error names the extra that brings it."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.cli_runner import SECRET_TEXT
from support.database import IMPORT_PATH, Database
from support.entries import dispatcher
from support.python_processes import new_fork_server, run_python

import outbox
from dispatchers import Dispatcher
from dispatchers.adapters import MemoryAdapter
from outbox import migrations
from outbox.errors import ConfigurationError

ENVIRONMENT = {"PYTHONPATH": IMPORT_PATH, "OUTBOX_SECRET": SECRET_TEXT, "OUTBOX_ENV": "test"}
BLOCK = """
import runpy, sys, traceback
for name in {packages!r}:
    assert name not in sys.modules
    sys.modules[name] = None
try:
    {program}
except (ImportError, SystemExit) as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
RUN = "from dispatchers import Dispatcher; from dispatchers.adapters import MemoryAdapter; Dispatcher("
RUN += "'sqlite:///x.db', adapters={'crm': MemoryAdapter()}).run()"


@pytest.fixture(scope="module")
def server() -> Iterator[socket.socket]:
    """It has imported what needs no extra, and so none of the packages that are missing in a child."""
    with new_fork_server(sys.executable, ("sqlalchemy.orm", "outbox", "dispatchers"), ENVIRONMENT) as server:
        yield server


@pytest.mark.parametrize(
    ("packages", "program", "says"),
    [
        (
            ["click"],
            "sys.argv[1:] = ['--help']; runpy.run_module('dispatchers', run_name='__main__')",
            "SystemExit: outbox: the command line needs the package 'click': pip install 'sqlalchemy-outbox[dispatcher]'",
        ),
        (
            ["apscheduler", "apscheduler.schedulers.asyncio"],
            RUN,
            "ImportError: Dispatcher.run() needs the package 'apscheduler': pip install 'sqlalchemy-outbox[dispatcher]'",
        ),
        *(
            (
                [package],
                f"import outbox.http.{module}",
                f"ImportError: outbox.http.{module} needs the package '{package}': pip install 'sqlalchemy-outbox[{module}]'",
            )
            for module, package in [
                ("fastapi", "fastapi"),
                ("starlette", "anyio"),
                ("starlette", "starlette"),
                ("flask", "flask"),
                ("django", "django"),
            ]
        ),
        *(
            (
                [package],
                f"import dispatchers.adapters as a; a.MemoryAdapter; a.{adapter}",
                f"ImportError: {adapter} needs the package '{package}': pip install 'sqlalchemy-outbox[{extra}]'",
            )
            for adapter, package, extra in [
                ("StripeAdapter", "stripe", "stripe"),
                ("SmtpAdapter", "aiosmtplib", "email"),
            ]
        ),
        *(
            (
                [package],
                "import dispatchers.dashboard",
                f"ImportError: dispatchers.dashboard needs the package '{package}': pip install 'sqlalchemy-outbox[dashboard]'",
            )
            for package in ("starlette", "jinja2")
        ),
    ],
)
def test_a_part_without_its_package_names_the_extra(
    server: socket.socket, packages: list[str], program: str, says: str
) -> None:
    source = BLOCK.format(packages=packages, program=program)

    completed = run_python("-c", source, env=ENVIRONMENT, check=True, server=server)

    assert completed.stdout.splitlines()[-1] == says


@pytest.mark.parametrize("adapter", ["SmtpAdapter", "ImapSearch", "NatsAdapter", "RabbitMqAdapter", "TemporalAdapter"])
def test_an_adapter_that_sends_nothing_over_http_needs_no_httpx(server: socket.socket, adapter: str) -> None:
    source = BLOCK.format(
        packages=["httpx", "httptools"], program=f"import dispatchers.adapters as a; print(a.{adapter}.__name__)"
    )

    completed = run_python("-c", source, env=ENVIRONMENT, check=True, server=server)

    assert completed.stdout.splitlines() == [adapter]


@pytest.mark.parametrize("name", ["drain", "failpoint", "temporary_postgres"])
def test_a_tool_for_tests_of_apps_needs_neither_pytest_nor_h11(server: socket.socket, name: str) -> None:
    source = BLOCK.format(
        packages=["pytest", "h11"], program=f"from dispatchers.testing import {name} as tool; print('there')"
    )

    completed = run_python("-c", source, env=ENVIRONMENT, check=True, server=server)

    assert completed.stdout.splitlines() == ["there"]


@pytest.mark.parametrize("package", ["pydantic", "msgspec"])
def test_plain_entries_load_no_package_for_types(server: socket.socket, package: str) -> None:
    source = (
        f"import sys, outbox, dispatchers, dispatchers.operations, outbox.testing; print({package!r} in sys.modules)"
    )

    assert run_python("-c", source, env=ENVIRONMENT, check=True, server=server).stdout == "False\n"


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (["pydantic"], "read"),
        (["msgspec"], "read"),
        (
            ["pydantic", "msgspec"],
            "Effect('a.b') needs the package 'pydantic' or 'msgspec': pip install 'sqlalchemy-outbox[typed]' or"
            " 'sqlalchemy-outbox[msgspec]'",
        ),
    ],
)
def test_a_typed_effect_needs_one_of_two_packages(server: socket.socket, missing: list[str], says: str) -> None:
    source = f"""
import outbox, sys
from dataclasses import make_dataclass
for name in {missing!r}:
    sys.modules[name] = None
Receipt = make_dataclass("Receipt", [("to", str)])
try:
    effect = outbox.Effect("a.b", Receipt)
    assert effect.read(effect.write(Receipt("a")).text, {{}}) == Receipt("a")
    print("read")
except outbox.ConfigurationError as error:
    print(error)
"""
    assert run_python("-c", source, env=ENVIRONMENT, check=True, server=server).stdout == f"{says}\n"


def test_a_system_without_posix_is_refused_in_words() -> None:
    program = "import os; os.name = 'nt'; import outbox"

    refused = subprocess.run([sys.executable, "-S", "-c", program], env=ENVIRONMENT, capture_output=True, text=True)

    says = "ImportError: sqlalchemy-outbox runs on POSIX systems (Linux, macOS, WSL), not on 'nt'"
    assert refused.stderr.splitlines()[-1] == says


@pytest.mark.parametrize(
    ("package", "version", "program", "says"),
    [
        *(
            (
                "httpx",
                "1.0.dev6",
                f"import dispatchers.adapters as a; a.{adapter}",
                f"ImportError: {adapter} does not work with httpx 1.0.dev6, only with versions before 1:"
                f" pip install 'sqlalchemy-outbox[{extra}]'",
            )
            for adapter, extra in [("HttpAdapter", "http"), ("StripeAdapter", "stripe"), ("RestateAdapter", "restate")]
        ),
        (
            "apscheduler",
            "4.0.0a6",
            RUN,
            "ImportError: Dispatcher.run() needs the module 'apscheduler.schedulers', which apscheduler 4.0.0a6 does not have:"
            " pip install 'sqlalchemy-outbox[dispatcher]'",
        ),
    ],
)
def test_a_package_of_a_later_major_version_is_refused_in_words(
    server: socket.socket, tmp_path: Path, package: str, version: str, program: str, says: str
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / f"{package}-{version}.dist-info").mkdir()
    (tmp_path / f"{package}-{version}.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    source = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + BLOCK.format(packages=[], program=program)

    completed = run_python("-c", source, env=ENVIRONMENT, check=True, server=server)

    assert completed.stdout.splitlines()[-1] == says


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (
            "postgresql+psycopg2://user:hunter2@host/shop",
            "the driver 'psycopg2' of the URL postgresql+psycopg2://... is not installed: pip install"
            " 'sqlalchemy-outbox[postgresql]' and write postgresql+psycopg://...",
        ),
        (
            "oracle://user:hunter2@host/shop",
            "the outbox runs on postgresql, sqlite, mariadb and mysql, not on 'oracle'",
        ),
    ],
)
def test_a_url_that_nothing_here_can_open_says_what_to_write(ob: outbox.Outbox, url: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as dispatching:
        Dispatcher(url, outbox=ob, adapters={"crm": MemoryAdapter()})

    assert str(dispatching.value) == says
    if "psycopg2" in url:
        with pytest.raises(ConfigurationError) as migrating:
            migrations.upgrade(url)
        assert str(migrating.value) == says


def test_an_engine_of_another_database_is_refused(sqlite: Database, ob: outbox.Outbox) -> None:
    engine = sa.create_engine(sqlite.url)
    engine.dialect.name = "oracle"

    with pytest.raises(
        ConfigurationError, match="the outbox runs on postgresql, sqlite, mariadb and mysql, not on 'oracle'"
    ):
        dispatcher(engine, ob, adapters={"crm": MemoryAdapter()})
    with pytest.raises(ConfigurationError, match="not on 'oracle'"):
        ob.check(engine)
