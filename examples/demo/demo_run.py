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
from dispatchers.testing import PostgresUnavailable, temporary_postgres
from dispatchers.testing.stripe_ledger import StripeLedger
from examples.demo.audit import Audit, Excuses, audit
from examples.demo.checkout_results import CheckoutResult, read_results
from examples.demo.children import children
from examples.demo.files import Files
from examples.demo.folder import temporary_folder
from examples.demo.mail_ledger import read_mails
from examples.demo.operator_decision import Finding, resolve_one
from examples.demo.orders import Base, connect
from examples.demo.scenario import DemoOptions, Scenario
from examples.demo.snapshot import Snapshot
from examples.demo.statements import read_paid, read_statements
from examples.demo.view import View
from outbox import migrations


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The result of the demo, after all processes have ended. resolved: the entry that the operator resolved, if any."""

    audit: Audit
    last: Snapshot
    results: Sequence[CheckoutResult]
    resolved: Finding | None
    database: str


def run_demo(options: DemoOptions, view: View) -> DemoResult:
    """Run the whole demo. Every process has ended when this returns or raises."""
    with temporary_folder("outbox-demo-") as folder, database(options, folder) as (url, origin):
        view.report_event(0, f"on {origin}")
        environment = prepare(url)
        engine, files = connect(url), Files(folder)
        with children(folder) as started, closing(Scenario(options, view, started, environment, files)) as scenario:
            in_time = scenario.rush().entries.open == 0
            results = read_results(files.results)
            resolved = resolve_one(engine, files, results, environment, view) if in_time else None
            last, interrupted = scenario.snapshot(), scenario.interrupted
        decided = set() if resolved is None else {resolved.entry.id}
        result = audited(options, engine, files, results, interrupted=interrupted, decided=decided)
        engine.dispose()
        return DemoResult(audit=result, last=last, results=results, resolved=resolved, database=origin)


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
    options: DemoOptions,
    engine: Engine,
    files: Files,
    results: Sequence[CheckoutResult],
    *,
    interrupted: set[UUID],
    decided: set[UUID],
) -> Audit:
    """Read the remote services' ledgers, the outbox and the shop's table, and compare them."""
    with closing(StripeLedger(files.payments)) as ledger:
        return audit(
            orders=options.orders,
            results=results,
            charges=ledger.charges,
            mails=read_mails(files.mails).accepted,
            statements=read_statements(engine, results),
            paid=read_paid(engine),
            excuses=Excuses(stored_500=stored_500(ledger), interrupted=interrupted, decided=decided),
        )


def stored_500(ledger: StripeLedger) -> set[str]:
    return {answer.key for answer in ledger.answers if answer.status == 500 and answer.key is not None}


@contextmanager
def database(options: DemoOptions, folder: Path) -> Iterator[tuple[str, str]]:
    """The URL of a database, and its name for the report."""
    if options.database is not None:
        yield options.database, "the given database"
        return
    origin = "SQLite"
    with ExitStack() as stack:
        if not options.sqlite:
            try:
                server = stack.enter_context(temporary_postgres())
            except PostgresUnavailable as unavailable:
                origin = f"SQLite, because {unavailable}"
            else:
                yield server.url, server.origin
                return
        yield f"sqlite:///{folder / 'shop.sqlite'}", origin
