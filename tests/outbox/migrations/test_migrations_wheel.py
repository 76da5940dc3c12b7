"""The migrations without Alembic, and from an installed wheel."""

import os
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from support.migrations import ROOT

from outbox import migrations

pytest_plugins = ["support.blank_databases"]


WITHOUT_ALEMBIC = """
import sys
sys.modules["alembic"] = None
from outbox import migrations
from outbox.errors import SchemaError

print(migrations.head(), migrations.current(sys.argv[1]))
made = (lambda _: migrations.sql(), lambda _: migrations.metadata())
for call in (migrations.check, migrations.upgrade, migrations.downgrade, *made):
    try:
        call(sys.argv[1])
    except SchemaError as error:
        print(error)
"""


def test_without_alembic_the_extra_is_named_and_checking_still_works(blank_sqlite):
    printed = run([sys.executable, "-c", WITHOUT_ALEMBIC, str(blank_sqlite.url)], cwd=ROOT).splitlines()

    assert printed[0] == f"{migrations.head()} None"
    assert "run `outbox db upgrade`" in printed[1]
    assert printed[2:] == ["migrations need Alembic: pip install 'sqlalchemy-outbox[migrations]'"] * 4


def test_importing_the_migrations_loads_neither_alembic_nor_asyncio():
    program = "import sys, outbox.migrations; print({'alembic', 'sqlalchemy.ext.asyncio'} & set(sys.modules))"

    assert run([sys.executable, "-c", program], cwd=ROOT) == "set()\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(made)], cwd=ROOT)
    [wheel] = made.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The programs of a fresh environment into which pip put the wheel; what the wheel depends on is lent by this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home / "bin" / "python")]
    run([*pip, "install", "--no-deps", "--no-index", str(wheel)], cwd=home)
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(home)}))
    (packages / "lent.pth").write_text("\n".join(site.getsitepackages()))
    return home / "bin"


def test_from_the_wheel_the_migrations_run(installed, tmp_path):
    program = "import outbox.migrations as m; print(m.__file__); m.upgrade('sqlite:///x.db'); m.check('sqlite:///x.db')"

    printed = run([str(installed / "python"), "-c", program], cwd=tmp_path)

    assert Path(printed.strip()).is_relative_to(installed.parent)
    migrations.check(f"sqlite:///{tmp_path / 'x.db'}")


def test_from_the_wheel_the_command_upgrades(installed, tmp_path, blank):
    url = blank.url.render_as_string(hide_password=False)

    printed = [run([str(installed / "outbox"), "db", "upgrade", "--database", url], cwd=tmp_path) for _ in range(2)]

    assert printed == [f"upgraded from nothing to {migrations.head()}\n", f"already at {migrations.head()}\n"]
    migrations.check(blank.url)


def run(arguments: list[str], *, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
