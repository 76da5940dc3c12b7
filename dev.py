"""Everything a developer runs, on a machine with Python 3.11 and a package registry and nothing else.

    python3 dev.py demo [ARGS]     show it running; --stay keeps a shop open, with the dashboard
    python3 dev.py test [ARGS]     lint, types, contracts, then pytest with ARGS
    python3 dev.py matrix [NAMES]  the core of the tests on every Python and PostgreSQL of this machine, and with the lowest and
                                   the newest dependencies, in about 10 minutes
    python3 dev.py bench [PARTS]   all benchmarks beside the peers, in about 15 minutes, or the named ones; --help lists them
    python3 dev.py bench --quick   the first figures in a minute, without peers
    python3 dev.py model [NAMES]   the protocol's model, checked by Spin; with --all every setting of it, in about an hour
    python3 dev.py simulate [ARGS] the sending side under faults: --seeds 1000000 --from 0 --jobs 2
    python3 dev.py soak [ARGS]     an app and a dispatcher under load, and whether their memory stays flat: --hours 6 --rate 50
    python3 dev.py kills [ARGS]    processes killed at every point: --rounds 200, --mysql; or on both sides of a message broker,
                                   and the broker itself: --broker nats --messages 50000
    python3 dev.py rollout [ARGS]  a release, a secret and data keys rolled out process by process under load: --from v1.0.0
    python3 dev.py galera [ARGS]   three nodes of a Galera cluster, until Ctrl-C; --chaos breaks nodes under load
    python3 dev.py mysql           a MySQL server on a socket, until Ctrl-C; downloads Debian's once, into .mysql/
    python3 dev.py check           lint, types, contracts and the site's build only
    python3 dev.py screenshots     pictures of the dashboard for the documents, by Chromium; --all FOLDER for every page
    python3 dev.py docs            only build the site of the documents, into site/
    python3 dev.py api             write the public names and signatures to tests/public_api/ again
    python3 dev.py providers       write what the profiles state to docs/providers.md again
    python3 dev.py build [--tag T] what a release publishes, into dist/, and check it: RELEASING.md
    python3 dev.py env             only make the environment
    python3 dev.py lock [ARGS]     write the lock files from pyproject.toml again; --upgrade for the newest of all

Each makes the environment first: what requirements.lock names, in .venv beside this file. When the lock has changed, or an
earlier run was interrupted, it is made from nothing. Where .venv is not ready, the demo makes .venv-demo, from
requirements-demo.lock. The benchmarks' peers are in .venv-peers: requirements-peers.lock, benchmarks/peers/package-lock.json.
"""

# Kept to what Python 3.7 can parse, so that an old one gets to say what is wrong instead of a syntax error.
from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent
PYPROJECT = ROOT / "pyproject.toml"


class Environment(NamedTuple):
    """A virtual environment, and the lock file that names its packages."""

    home: Path
    lock: Path
    has_project: bool = True

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def ready_file(self) -> Path:
        """Written last: an environment without it was not finished."""
        return self.home / "ready.json"


WHOLE = Environment(ROOT / ".venv", ROOT / "requirements.lock")
DEMO = Environment(ROOT / ".venv-demo", ROOT / "requirements-demo.lock")
PEERS = Environment(ROOT / ".venv-peers", ROOT / "requirements-peers.lock", has_project=False)
NODE_PEERS = ROOT / "benchmarks" / "peers"
PYTHON = WHOLE.python

DEMO_EXTRAS = ("postgresql", "asyncio", "migrations", "dispatcher", "stripe", "email", "starlette", "dashboard")

LOWEST_LOCK = ROOT / "requirements-lowest.lock"
IMPORTED = (ROOT / "tests", ROOT / "tests" / "verification")  # where the tests' own packages are

COMPILED = ("mysqlclient",)
"""What an extra brings, but no environment of ours: it has no wheels for Linux, and a machine may lack a compiler."""

COMMANDS = (
    *(
        "demo",
        "test",
        "matrix",
        "bench",
        "model",
        "simulate",
        "soak",
        "kills",
        "rollout",
        "galera",
        "mysql",
        "screenshots",
        "check",
        "docs",
        "api",
        "providers",
        "build",
        "env",
        "lock",
    ),
)
MODULES = {
    "simulate": "simulation",
    "kills": "support.crash",
    "rollout": "support.rollout",
    "galera": "support.galera_cluster",
    "mysql": "support.mysql_server",
    "screenshots": "support.pictures",
    "api": "support.public_api",
    "providers": "support.provider_page",
    "build": "support.release",
}
"""The commands that are modules of the tests."""

CHAOS_OPTIONS = {"kills": "--broker", "galera": "--chaos"}
CHAOS_MODULES = {"kills": "support.broker_pair", "galera": "support.galera_chaos"}
"""The modules of two of them with such an option."""

BESIDE_PEERS, WITHOUT_PEERS = {"drain", "latency"}, {"sends", "relay", "enqueue", "requests", "scale", "scaling"}
"""The parts of the benchmark. Without a part, all of them are measured."""

PYTEST_WORKERS = min(max(os.cpu_count() or 2, 2) + 2, 6)  # many tests wait for a process, a server or a clock
BESIDE = ("-n", str(PYTEST_WORKERS), "--dist", "worksteal")  # tests of one file mostly stay together, with its fixtures
IN_MEMORY_BYTES = 8 << 30  # several times what a run has ever needed
MAX_ALONE = 5
CACHE = ROOT / ".pytest_cache"
CHECKS = (
    ("ruff check",),
    ("ruff format", "--check"),
    ("mypy",),
    ("basedpyright", "--pythonpath", str(PYTHON)),
    ("lint-imports",),
    ("zensical build", "--strict"),  # a link that leads nowhere is a failure
)


def main(arguments: Sequence[str]) -> int:
    command, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if command in ("-h", "--help", "help"):
        print(__doc__)
        return 0
    if command not in COMMANDS or (command in ("check", "docs", "api", "providers", "mysql", "env") and rest):
        print(__doc__, file=sys.stderr)
        return 2
    os.chdir(ROOT)
    environment = DEMO if command == "demo" and not is_ready(WHOLE) else WHOLE
    make_environment(environment)
    if command == "demo":
        become_python("-m", "examples.demo", *rest, environment=environment)
    if command == "bench":
        parts = {each.partition(".")[0] for each in rest} & (BESIDE_PEERS | WITHOUT_PEERS)
        if not {"--quick", "--help", "-h"} & set(rest) and (BESIDE_PEERS & parts or not parts):
            install_peers()
        become_python("-m", "benchmarks", *rest)
    if command == "soak":
        become_python("-m", "benchmarks.soak", *rest)
    if command == "model":
        become_python("tests/verification/promela/check.py", *rest)
    if command in MODULES:
        module = CHAOS_MODULES[command] if CHAOS_OPTIONS.get(command) in rest else MODULES[command]
        become_python("-m", module, *rest, PYTHONPATH=os.pathsep.join(map(str, IMPORTED)))
    if command == "lock":
        return lock(rest)
    if command == "docs":
        return run("zensical", "build", "--strict")
    if command == "matrix":
        with temporary_files_in_memory():
            return run("python", "tests/support/matrix.py", *rest)
    if command == "test":
        with temporary_files_in_memory():
            return max(run_checks(), run_pytest(*rest)) if rest else run_all()
    return 0 if command == "env" else run_checks()


# --- the environment


def make_environment(environment: Environment) -> None:
    """Make it what its lock file says, doing no more than is needed.

    What is there counts only if its `ready_file` says that it was finished, and for these very packages. A change of
    pyproject.toml alone only installs the project again.
    """
    if finished(environment).get("packages") != packages(environment):
        install_packages(environment)
    elif is_ready(environment):
        return
    if environment.has_project:
        with step("installing the project"):
            # Built by the locked hatchling, not by the registry's newest.
            pip(environment, "install", "--no-deps", "--no-build-isolation", "--editable", ".")
    written = {"packages": packages(environment), "project": digest(PYPROJECT)}
    environment.ready_file.write_text(json.dumps(written))


def is_ready(environment: Environment) -> bool:
    return finished(environment) == {"packages": packages(environment), "project": digest(PYPROJECT)}


def finished(environment: Environment) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(environment.ready_file.read_text())
    except (OSError, ValueError):
        return {}
    return found if environment.python.exists() else {}


def packages(environment: Environment) -> list[str]:
    """What makes the installed packages others: the lock, the folder (scripts hold its path), the interpreter."""
    return [digest(environment.lock), str(ROOT), os.path.realpath(environment.python)]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install_packages(environment: Environment) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  # an older one runs this too, and is refused by it
        stop(f"this needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}: run another python3")
    if importlib.util.find_spec("ensurepip") is None:
        minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
        stop(f"this Python has no ensurepip: install it (on Debian and Ubuntu: apt-get install python{minor}-venv)")
    locked = environment.lock.read_text()
    with step(f"making {environment.home.name}"):
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=True).create(environment.home)
    with step("installing uv, which installs the rest"):
        only_uv = environment.home / "uv.lock"
        only_uv.write_text(next(pin for pin in re.split(r"^(?=\S)", locked, flags=re.M) if pin.startswith("uv==")))
        pip(environment, "install", "--require-hashes", "--requirement", str(only_uv))
    print(f"installing {locked.count('==')} locked packages", flush=True)
    install = ("install", "--require-hashes", "--requirement", str(environment.lock))
    uv = [str(environment.home / "bin" / "uv"), "pip", *install, "--quiet", "--python", str(environment.python)]
    if subprocess.run(uv).returncode != 0:  # it reads none of pip's settings, which may name a mirror
        with step("uv failed, see above; installing with pip"):
            pip(environment, *install)


def install_peers() -> None:
    """What cannot be installed is reported, and left out of the comparison."""
    try:
        make_environment(PEERS)
    except SystemExit as error:
        print(f"THE PEERS IN PYTHON COULD NOT BE INSTALLED: {error}", flush=True)
        return
    home, npm = PEERS.home / "node", shutil.which("npm")
    locked = (NODE_PEERS / "package-lock.json").read_text()
    ready = home / "ready"
    if npm is None:
        print("THERE IS NO npm: the peers in JavaScript are not compared", flush=True)
    elif not ready.exists() or ready.read_text() != locked:
        home.mkdir(exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(NODE_PEERS / name, home)
        with step("installing the peers in JavaScript"):
            done = subprocess.run(
                [npm, "ci", "--silent"], cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        if done.returncode:
            print(f"THE PEERS IN JAVASCRIPT COULD NOT BE INSTALLED: {done.stdout}", flush=True)
        else:
            ready.write_text(locked)


def pip(environment: Environment, *arguments: str) -> None:
    command = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    # A user's wish to install outside of any environment is not meant for this one.
    variables = {**os.environ, "PIP_USER": "0"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        print(f"failed\n{done.stdout}", flush=True)
        stop(f"pip {arguments[0]} failed, see above")


@contextmanager
def step(what: str) -> Iterator[None]:
    started = time.monotonic()
    print(f"{what} ... ", end="", flush=True)
    yield
    print(f"{time.monotonic() - started:.1f} s", flush=True)


def stop(text: str) -> NoReturn:
    raise SystemExit(f"dev.py: {text}")


def lock(arguments: Sequence[str]) -> int:
    """Pin every package for every platform, keeping the pins that still fit. Names no registry: pip knows its own."""
    options = "--universal --python-version 3.11 --generate-hashes --no-annotate --no-header"
    compiling = ["uv", "pip", "compile", "--quiet", "pyproject.toml", *options.split()]
    lowest = str(WHOLE.home / "lowest.txt")  # of what users install; the tests' own tools are not the lowest
    extras = ["--all-extras", *(f"--no-emit-package={name}" for name in COMPILED)]
    whole = [*compiling, *extras, "--group", "dev", "--output-file", WHOLE.lock.name, *arguments]
    direct = [*compiling, *extras, "--resolution", "lowest-direct", "--output-file", lowest]
    lowest_lock = [*compiling, *extras, "--group", "dev", "--constraint", lowest, "--output-file", LOWEST_LOCK.name]
    demo = [*compiling, "--group", "demo", "--constraint", WHOLE.lock.name, "--output-file", DEMO.lock.name]
    demo += [f"--extra={extra}" for extra in DEMO_EXTRAS]
    peers = ["uv", "pip", "compile", "--quiet", *options.split(), "--group", "peers", "--output-file", PEERS.lock.name]
    return run(*whole) or run(*direct) or run(*lowest_lock) or run(*demo) or run(*peers, *arguments)


# --- what runs in it


def become_python(*arguments: str, environment: Environment = WHOLE, **variables: str) -> NoReturn:
    """A child would be killed a moment after Ctrl-C, before it has stopped its servers and removed its files."""
    os.execve(environment.python, [str(environment.python), *arguments], {**inside(environment), **variables})


def inside(environment: Environment = WHOLE) -> dict[str, str]:
    """The environment variables of an activated environment: a tool that starts another finds the one beside it.

    Bytecode is written, even where the machine forbids it: without it every process that a test starts compiles SQLAlchemy.
    """
    path = os.pathsep.join([str(environment.python.parent), os.environ.get("PATH", os.defpath)])
    variables = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(environment.home)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def run(program: str, *arguments: str) -> int:
    return subprocess.run([str(PYTHON.parent / program), *arguments], env=inside()).returncode


def run_all() -> int:
    """The checks take what the tests leave of the machine: many tests wait."""
    with ThreadPoolExecutor(1) as beside:
        checks = beside.submit(run_checks)
        # Compiled once: otherwise each worker of pytest compiles all test modules, at the same time as the others.
        if checked("collection", "pytest", "--collect-only", "-qq", nice=0):
            return 1
        status = run_pytest()
        failed = checks.result()
    print("a check FAILED: see above" if failed else "all checks passed", flush=True)
    return status or failed


def run_checks() -> int:
    """Run every check, whatever became of the one before. Returns: 1 if any failed."""
    with ThreadPoolExecutor(PYTEST_WORKERS) as pool:
        return max(pool.map(lambda check: checked(check[0], *check[0].split(), *check[1:]), CHECKS))


@contextmanager
def temporary_files_in_memory() -> Iterator[None]:
    """Have the tests' databases in memory, where Linux has room for them, unless TMPDIR names another place.

    The servers make and delete thousands of files; on ext4 these take more CPU time than all else that the servers do.
    """
    folder = Path("/dev/shm")
    if "TMPDIR" in os.environ or not has_room(folder):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="outbox-tests-", dir=folder, ignore_cleanup_errors=True) as made:
        os.chmod(made, 0o711)  # where a server runs as another user, it must reach its own folder inside
        os.environ["TMPDIR"] = made
        yield


def has_room(folder: Path) -> bool:
    """Whether a run's files fit in this folder of the memory, and programs may be run from it, as tests do."""
    try:
        if os.statvfs(folder).f_flag & os.ST_NOEXEC or not os.access(folder, os.W_OK):
            return False
        available = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
        free = shutil.disk_usage(folder).free
    except OSError:
        return False
    return available is not None and min(free, int(available[1]) * 1024) >= IN_MEMORY_BYTES


def checked(name: str, program: str, *arguments: str, nice: int = 10, **variables: str) -> int:
    """Run a command quietly, after what runs beside it, and show what it printed only if it failed. Returns: 1 if it did."""
    started = time.monotonic()
    command = ["nice", "-n", str(nice), str(PYTHON.parent / program), *arguments]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, env={**inside(), **variables}, text=True, **streams)
    verdict = "FAILED" if done.returncode else "ok"
    line = f"{name:<15} {verdict:<6} {time.monotonic() - started:6.1f} s\n"
    # Written in one call with the line's end, because other commands run at the same time.
    print(line + (f"{done.stdout}\n" if done.returncode else ""), end="", flush=True)
    return min(done.returncode, 1)


def run_pytest(*arguments: str) -> int:
    given = any(argument.startswith(("-n", "--numprocesses", "--pdb")) for argument in arguments)
    workers = [] if given else BESIDE
    status = run("pytest", *workers, *arguments)
    if status == 1 and not arguments:
        status = run_alone(last_failed())
    return status


def last_failed() -> list[str]:
    return sorted(json.loads((CACHE / "v" / "cache" / "lastfailed").read_text()))


def run_alone(tests: Sequence[str]) -> int:
    """The few that failed, once more and one at a time: what fails alone is broken, what passes is named, to be cured."""
    is_test = ["::" in test for test in tests]  # a worker may fail as a whole: that is no test
    if len(tests) > MAX_ALONE or not all(is_test):
        return 1
    print(f"\n{len(tests)} failed beside the others; once more, alone:", flush=True)
    status = run("pytest", "--last-failed", "--last-failed-no-failures", "none")
    if status == 0:
        print("passed alone, which is a race in the test or in the code, to be cured:", *tests, sep="\n    ")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
