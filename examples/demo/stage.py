"""The demo: the database, the load, the operator who resolves an uncertain entry, and the audit."""

import base64
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from sqlalchemy import Engine

import outbox
from dispatchers.testing.postgres import PostgresUnavailable, temporary_postgres
from dispatchers.testing.stripe_ledger import StripeLedger
from examples.demo.act import Act, Files, Script
from examples.demo.audit import Audit, Excuses, audit
from examples.demo.children import children
from examples.demo.folder import temporary_folder
from examples.demo.mail_ledger import read_mails
from examples.demo.orders import Base, connect
from examples.demo.person import Finding, look_at_one
from examples.demo.promises import Promise, read_promises
from examples.demo.snapshot import Snapshot
from examples.demo.statements import read_paid, read_statements
from examples.demo.view import View
from outbox import migrations


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is left when the processes have gone. resolved: the entry that the operator resolved, if any."""

    audit: Audit
    last: Snapshot
    promises: Sequence[Promise]
    resolved: Finding | None
    database: str


def play(script: Script, view: View) -> Ending:
    """All of it. Every process has ended when this returns or raises."""
    with temporary_folder("outbox-demo-") as folder, database(script, folder) as (url, origin):
        view.tell(0, f"on {origin}")
        environment = prepare(url)
        engine, files = connect(url), Files(folder)
        with children(folder) as started, closing(Act(script, view, started, environment, files)) as act:
            in_time = act.rush().entries.open == 0
            promises = read_promises(files.promises)
            resolved = look_at_one(engine, files, promises, environment, view) if in_time else None
            last, struck = act.snapshot(), act.struck
        decided = set() if resolved is None else {resolved.entry.id}
        result = audited(script, engine, files, promises, struck=struck, decided=decided)
        engine.dispose()
        return Ending(audit=result, last=last, promises=promises, resolved=resolved, database=origin)


def prepare(url: str) -> dict[str, str]:
    """Make the tables, and return the environment that shop and dispatcher need."""
    secret = "demo:" + base64.b64encode(secrets.token_bytes(32)).decode()
    outbox.configure(outbox.Keyring.from_text(secret), env="demo")
    migrations.upgrade(url)
    engine = connect(url)
    Base.metadata.create_all(engine)
    engine.dispose()
    return {"DATABASE_URL": url, "OUTBOX_SECRET": secret, "OUTBOX_ENV": "demo"}


def audited(
    script: Script,
    engine: Engine,
    files: Files,
    promises: Sequence[Promise],
    *,
    struck: set[UUID],
    decided: set[UUID],
) -> Audit:
    """Read the remote services' ledgers, the outbox and the shop's table, and compare them."""
    with closing(StripeLedger(files.payments)) as ledger:
        return audit(
            orders=script.orders,
            promises=promises,
            charges=ledger.charges,
            mails=read_mails(files.mails).accepted,
            statements=read_statements(engine, promises),
            paid=read_paid(engine),
            excuses=Excuses(stored_500=stored_500(ledger), struck=struck, decided=decided),
        )


def stored_500(ledger: StripeLedger) -> set[str]:
    return {answer.key for answer in ledger.answers if answer.status == 500 and answer.key is not None}


@contextmanager
def database(script: Script, folder: Path) -> Iterator[tuple[str, str]]:
    """A database's URL, and the words for it."""
    if script.database is not None:
        yield script.database, "the given database"
        return
    origin = "SQLite"
    with ExitStack() as stack:
        if not script.sqlite:
            try:
                server = stack.enter_context(temporary_postgres())
            except PostgresUnavailable as unavailable:
                origin = f"SQLite, because {unavailable}"
            else:
                yield server.url, server.origin
                return
        yield f"sqlite:///{folder / 'shop.sqlite'}", origin
