"""An operator resolves an uncertain entry: checks the service, and records what happened."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from sqlalchemy import Engine

from dispatchers.testing.stripe_ledger import StripeLedger
from examples.demo.checkout_results import CheckoutResult
from examples.demo.files import Files
from examples.demo.mail_ledger import read_mails
from examples.demo.scenario import LOOK_EVERY_SECONDS, Stuck
from examples.demo.snapshot import OPEN
from examples.demo.statements import CHARGE, RECEIPT, Statement, read_statements
from examples.demo.view import View

TIMEOUT_SECONDS = 120  # after a charge its receipt is sent, and the mail service may refuse it a few times
NAMES = {CHARGE: "charge", RECEIPT: "receipt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An uncertain entry, and its effect at the remote service. found: the effect's id there; None if it did not happen."""

    order_id: str
    entry: Statement
    found: str | None

    @property
    def looked_up(self) -> str:
        if self.entry.operation == CHARGE:
            return f"the payment service has {self.found or 'no charge'} for this order"
        return f"the mail service has accepted {self.found or 'no mail'} for this order"

    @property
    def command(self) -> list[str]:
        """The command that the operator types. Without `--actor` the actor is the system's user."""
        verdict = "--did-not-happen" if self.found is None else "--happened"
        return ["resolve", str(self.entry.id), verdict, "--reason", self.looked_up, "--actor", "you"]


def resolve_one(
    engine: Engine, files: Files, results: Sequence[CheckoutResult], environment: Mapping[str, str], view: View
) -> Finding | None:
    """Resolve one uncertain entry by the real command. Wait until it, and what its callback enqueued, has ended.

    Raises `Stuck` if the command fails, or if no dispatcher settles the entry.
    """
    statements = read_statements(engine, results)
    finding = most_instructive(findings(statements, files))
    view.print_line("")
    if finding is None:
        view.print_line("No entry is uncertain: the operator has nothing to resolve.")
        return None
    kind = NAMES[finding.entry.operation]
    view.print_line(f"An operator resolves an uncertain entry: the {kind} of order {finding.order_id}")
    view.print_line(f"  reason in the outbox:     {finding.entry.reason}")
    view.print_line(f"  in the service's ledger:  {finding.looked_up}")
    view.print_line("")
    view.print_line(f"$ outbox {shlex.join(finding.command)}")
    view.print_line(run(finding.command, environment))
    owner = next(checkout for checkout in results if finding.order_id in checkout.order_ids)
    for entry in settled(engine, owner, finding):
        view.print_line(f"  its {NAMES[entry.operation]} is now {entry.state}")
    return finding


def findings(statements: Mapping[str, Sequence[Statement]], files: Files) -> list[Finding]:
    """Look every uncertain entry up in its service's ledger, as in a provider's dashboard."""
    with closing(StripeLedger(files.payments)) as ledger:
        charges = {charge.metadata.get("order_id"): charge.id for charge in ledger.charges}
    mails = {mail.order_id: mail.message_id for mail in read_mails(files.mails).accepted}
    return [
        Finding(
            order_id=order_id,
            entry=entry,
            found=(charges if entry.operation == CHARGE else mails).get(order_id),
        )
        for order_id, entries in statements.items()
        for entry in entries
        if entry.state == "uncertain" and entry.operation in NAMES
    ]


def most_instructive(found: Sequence[Finding]) -> Finding | None:
    """Choose a charge rather than a mail, and one that happened, because its receipt is then sent."""
    return max(found, key=lambda each: (each.entry.operation == CHARGE, each.found is not None), default=None)


def run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run the command, and return what it prints. `python -m dispatchers` is the command `outbox`."""
    done = subprocess.run(
        [sys.executable, "-m", "dispatchers", *command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise Stuck(f"outbox {shlex.join(command)} ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout.rstrip()


def settled(engine: Engine, owner: CheckoutResult, finding: Finding) -> list[Statement]:
    """Wait until the resolved entry, and the receipt that its callback enqueued, has ended. Return the order's entries."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        entries = [each for each in read_statements(engine, [owner])[finding.order_id] if each.operation in NAMES]
        ended = not any(entry.state in OPEN for entry in entries)
        if ended and any(entry.id == finding.entry.id and entry.state != "uncertain" for entry in entries):
            return entries
        time.sleep(LOOK_EVERY_SECONDS)
    raise Stuck(f"entry {finding.entry.id} was resolved {TIMEOUT_SECONDS} s ago, and no dispatcher has settled it")
