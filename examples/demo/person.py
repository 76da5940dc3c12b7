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
from examples.demo.act import LOOK_EVERY_SECONDS, Files, Stuck
from examples.demo.mail_ledger import read_mails
from examples.demo.promises import Promise
from examples.demo.snapshot import OPEN
from examples.demo.statements import CHARGE, RECEIPT, Statement, read_statements
from examples.demo.view import View

PATIENCE_SECONDS = 30  # a charge that happened has a receipt to send after it, which may be turned away a few times
NAMES = {CHARGE: "charge", RECEIPT: "receipt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An uncertain entry, and what the remote service has of it. found: the id there; None if it did not happen."""

    order_id: str
    entry: Statement
    found: str | None

    @property
    def looked_up(self) -> str:
        if self.entry.operation == CHARGE:
            return f"the payment service has {self.found or 'no charge'} for this order"
        return f"the mail server has accepted {self.found or 'no mail'} for this order"

    @property
    def command(self) -> list[str]:
        """What the person types; without `--actor` it would be the name of the system's user."""
        verdict = "--did-not-happen" if self.found is None else "--happened"
        return ["resolve", str(self.entry.id), verdict, "--reason", self.looked_up, "--actor", "you"]


def look_at_one(
    engine: Engine, files: Files, promises: Sequence[Promise], environment: Mapping[str, str], view: View
) -> Finding | None:
    """Resolve one uncertain entry by the real command, and wait until the dispatcher has settled all that follows from it.

    Raises `Stuck` if the command fails, or nothing comes of it.
    """
    statements = read_statements(engine, promises)
    finding = most_telling(findings(statements, files))
    view.say("")
    if finding is None:
        view.say("Nothing is uncertain: there is nothing for an operator to look at.")
        return None
    view.say(f"A person takes one that is uncertain: the {NAMES[finding.entry.operation]} of order {finding.order_id}")
    view.say(f"  the outbox says why:   {finding.entry.reason}")
    view.say(f"  a look at its ledger:  {finding.looked_up}")
    view.say("")
    view.say(f"$ outbox {shlex.join(finding.command)}")
    view.say(run(finding.command, environment))
    owner = next(promise for promise in promises if finding.order_id in promise.order_ids)
    for entry in settled(engine, owner, finding):
        view.say(f"  its {NAMES[entry.operation]} is now {entry.state}")
    return finding


def findings(statements: Mapping[str, Sequence[Statement]], files: Files) -> list[Finding]:
    """Every uncertain entry, looked up as in a provider's dashboard."""
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
        if entry.state == "uncertain"
    ]


def most_telling(found: Sequence[Finding]) -> Finding | None:
    """A charge rather than a mail, and one that happened, because its receipt then follows."""
    return max(found, key=lambda each: (each.entry.operation == CHARGE, each.found is not None), default=None)


def run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """What `outbox` prints for it. `python -m dispatchers` is the same command."""
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


def settled(engine: Engine, owner: Promise, finding: Finding) -> list[Statement]:
    """The order's entries, once the resolved one and what its callback enqueued have ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        entries = read_statements(engine, [owner])[finding.order_id]
        ended = not any(entry.state in OPEN for entry in entries)
        if ended and any(entry.id == finding.entry.id and entry.state != "uncertain" for entry in entries):
            return entries
        time.sleep(LOOK_EVERY_SECONDS)
    raise Stuck(f"entry {finding.entry.id} was resolved {PATIENCE_SECONDS} s ago, and no dispatcher has settled it")
