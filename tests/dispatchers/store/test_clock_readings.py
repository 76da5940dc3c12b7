"""The clock, the random numbers and the identifiers come from the daemon: only the listed functions read their own."""

import ast
from pathlib import Path

import dispatchers

MODULES = {"time", "random", "secrets"}
NAMES = {"uuid1", "uuid4", "now", "utcnow", "today", "urandom", "getrandom"}
PACKAGE = Path(dispatchers.__file__).parent
ALLOWED = {
    # how long an app's function really takes
    "store/app_code/callback_transactions.py": {"calling", "give_up", "seconds_left"},
    "process/dispatcher_work.py": {"_reports"},  # the defaults of what is handed in
    "process/loop_watch.py": {"_watch", "_handle_block"},  # for how long the event loop was really blocked
    "steady_clock.py": {"steady_clock", "_STEADY"},
    # after a conflict: or two dispatchers would choose the same entries again
    "store/queue/rows_plain.py": {"_chosen"},
    "store/connections/transactions.py": {"_in_portable_transactions"},  # the same, for their pauses
    "admin/check/doctor.py": {"_clock"},  # compares our clock with the database's
    "admin/decide/proposals.py": {"propose"},  # its id is chance; its time is the database's
    "maintenance/body_partitions.py": {"drop_days"},  # `today` is the database's
    "adapters/retry_after.py": {"retry_after"},  # an HTTP date counts from our own clock where the answer has none
    "adapters/brokers/kafka_producer.py": {"import"},  # librdkafka answers on its own thread, with no event loop
    "adapters/brokers/nats_connection.py": {"import"},  # which server of a cluster is asked first
    "adapters/brokers/rabbitmq_connection.py": {"import"},  # which server of a cluster is asked first
    "adapters/brokers/redis_connection.py": {"import"},  # which server is asked first
}


def readings(path: Path) -> set[str]:
    """The functions and constants in a module that read a clock or chance. The event loop's clock is the loop's maker's."""
    tree = ast.parse(path.read_text())
    found = {"import" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in MODULES}
    constants = [node for node in tree.body if isinstance(node, ast.Assign)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for outer in (*constants, *functions):
        name = outer.name if not isinstance(outer, ast.Assign) else ast.unparse(outer.targets[0])
        inner = [outer.value] if isinstance(outer, ast.Assign) else outer.body
        if any(_reads(node) for part in inner for node in ast.walk(part)):
            found.add(name)
    return found


def _reads(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id in MODULES or node.attr in NAMES
    return isinstance(node, ast.Name) and node.id in NAMES - {"now"}


def test_nothing_below_the_daemon_reads_a_clock_or_chance_by_itself() -> None:
    for_people = {path for folder in ("cli", "dashboard", "testing") for path in PACKAGE.glob(f"{folder}/**/*.py")}
    paths = {*PACKAGE.rglob("*.py")} - for_people - {PACKAGE / "process" / "daemon.py"}
    named = {path.relative_to(PACKAGE).as_posix(): path for path in paths}

    found = {name: readings(path) - ALLOWED.get(name, set()) for name, path in named.items()}

    assert {name: where for name, where in found.items() if where} == {}
    assert any(readings(path) for path in paths)  # the search finds what there is
    assert named.keys() >= ALLOWED.keys()
