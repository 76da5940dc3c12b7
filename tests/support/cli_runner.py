"""What the tests of the command line share: a way to run it, and entries in every state."""

import json
import os
import pty
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from click.testing import CliRunner, Result

import outbox
from dispatchers import Delivered, Delivery, Outcome, Rejected
from dispatchers.adapters import MemoryAdapter
from dispatchers.cli import main
from outbox.sql.clock import clock_plus
from outbox.times import NEVER
from support.database import TABLES, Database
from support.entries import change, put_one, run_once
from support.python_processes import PythonProcess

SECRET_TEXT = "k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="  # bytes 00 01 02 ... 1f
PRIVATE = {"card": "4242424242424242"}


def command(*arguments: str, database: Database | None = None, given: str | None = None, **environment: str) -> Result:
    """`outbox ARGUMENTS` in this process, with no variable of ours but `environment`. given: what is typed."""
    cleared = {name: None for name in os.environ if name.startswith(("OUTBOX_", "DATABASE_URL", "COLUMNS", "NO_COLOR"))}
    if database is not None:
        environment = {"DATABASE_URL": database.url.render_as_string(hide_password=False)} | environment
    return CliRunner().invoke(main, arguments, input=given, env=cleared | environment, prog_name="outbox")


def succeeded(*arguments: str, **settings: Any) -> str:
    """What the command prints; it must end well, and say nothing on stderr."""
    result = command(*arguments, **settings)
    assert (result.exit_code, result.stderr) == (0, ""), (result.output, result.exception)
    return result.stdout


def document(*arguments: str, **settings: Any) -> Any:
    """The JSON document that the command prints."""
    return json.loads(succeeded(*arguments, "--json", **settings))


def refused(*arguments: str, **settings: Any) -> tuple[int, str]:
    """The status and the text of a command that must fail, and print nothing else."""
    result = command(*arguments, **settings)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.exit_code, result.stderr


def error_of(*arguments: str, **settings: Any) -> tuple[int, str, str]:
    """The status, code and text of a command that must fail with `--json`."""
    status, text = refused(*arguments, "--json", **settings)
    error = json.loads(text)["error"]
    return status, error["code"], error["message"]


def on_terminal(*arguments: str, database: Database, typed: str = "", **environment: str) -> tuple[int, str]:
    """The status of `outbox ARGUMENTS` on a terminal of 80 columns, and what it shows then."""
    ours, theirs = pty.openpty()
    shown = database.url.render_as_string(hide_password=False)
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR" and not name.startswith("OUTBOX_")}
    variables = kept | {"DATABASE_URL": shown, "COLUMNS": "80", "TERM": "xterm-256color"} | environment
    script = Path(sys.executable).parent / "outbox"
    with PythonProcess(script, *arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=variables) as process:
        os.close(theirs)
        os.write(ours, typed.encode())
        printed = b"".join(iter(lambda: _read(ours), b""))
        os.close(ours)
    return process.returncode, printed.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other side is gone
        return b""


# --- entries


def put_uncertain(database: Database, ob: outbox.Outbox, **settings: Any) -> UUID:
    id = put_one(database, ob, "mail.send", **{"payload": PRIVATE, **settings})
    outcome = json.dumps({"reason": "no answer within 30 s"})
    change(database, id, state="uncertain", due_at=NEVER, maybe_sent=True, attempts=1, deliveries=1, outcome=outcome)
    return id


def put_suspended(database: Database, ob: outbox.Outbox, **settings: Any) -> UUID:
    id = put_one(database, ob, "mail.send", **settings)
    change(database, id, suspended_reason="restored from a backup", due_at=NEVER)
    return id


class Choosy(MemoryAdapter):
    """Takes what has a discriminator, and rejects the rest."""

    async def send(self, delivery: Delivery) -> Outcome:
        return Delivered({"id": "ch_1"}) if delivery.payload.get("good") else Rejected("status 422: no such customer")


def put_ended(database: Database, ob: outbox.Outbox, *, good: bool = True, **settings: Any) -> UUID:
    """An entry that was delivered, or failed, just now."""
    id = put_one(database, ob, "stripe.refunds.create", **{"payload": {"good": good}, **settings})
    assert run_once(database, ob, adapters={"stripe": Choosy()}) == 1
    return id


def set_row(database: Database, table: sa.Table, **values: Any) -> None:
    database.execute(sa.insert(table).values(values))


def block(database: Database, id: UUID, ordering_key: str) -> None:
    """As a dispatcher blocks a group after an entry that failed."""

    since = clock_plus(-timedelta(hours=1))
    set_row(database, TABLES.blocked_group, ordering_key=ordering_key, entry_id=id, reason="it failed", since=since)


def ids(page: Any) -> list[UUID]:
    return [UUID(entry["id"]) for entry in page["entries"]]


def write_databases(directory: Path, **databases: sa.URL) -> Path:
    path = directory / "databases.conf"
    path.write_text(
        "".join(f"{name} = {url.render_as_string(hide_password=False)}\n" for name, url in databases.items())
    )
    return path
