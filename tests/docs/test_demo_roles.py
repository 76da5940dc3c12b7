"""The roles of the demo: the killer, the operator who looks up what is uncertain, the mail service."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from support.demo_audit import charge, charging, mail, mailing

from dispatchers.adapters.providers import postmark
from dispatchers.delivery import Deferred, Delivered, Delivery, Outcome, Unknown
from dispatchers.testing import service_of
from dispatchers.testing.conformance_frame import ENTRY
from dispatchers.testing.provider_core import Effect
from dispatchers.testing.provider_service import Ledger
from dispatchers.testing.service_faults import Faults
from dispatchers.testing.stripe_ledger import StripeLedger
from examples.demo.files import Files
from examples.demo.killer import POINTS, Killer, Lease
from examples.demo.mail_ledger import Mail, read_mails
from examples.demo.operator_decision import Finding, findings, most_instructive
from examples.demo.statements import CHARGE, RECEIPT, Statement

# --- the killer


def lease(number: int, token: str) -> Lease:
    return Lease(UUID(int=number), token, "email")


def test_a_kill_is_due_when_enough_has_ended_and_something_is_being_sent() -> None:
    killer = Killer(entries=100)
    enough = int(POINTS[0] * 100)

    assert not killer.due(enough - 1, [lease(1, "a")])
    assert not killer.due(enough, [])
    assert killer.due(enough, [lease(1, "a")])


def test_what_an_earlier_kill_interrupted_counts_for_no_later_one() -> None:
    killer = Killer(entries=100)
    orphan, living = lease(1, "a"), lease(2, "b")
    killer.record_kill([orphan])

    assert not killer.due(100, [orphan])
    assert killer.record_kill([orphan, living]) == [living]
    assert killer.interrupted == [[orphan], [living]]


def test_a_kill_that_found_nothing_in_hand_is_not_counted() -> None:
    killer = Killer(entries=100)

    killer.record_kill([])

    assert killer.interrupted == []


def test_nothing_is_killed_after_the_last_point() -> None:
    killer = Killer(entries=100)
    for number, _ in enumerate(POINTS):
        killer.record_kill([lease(number, f"token {number}")])

    assert not killer.due(100, [lease(99, "of the living")])


# --- the operator


def finding(statement: Statement, found: str | None) -> Finding:
    return Finding(order_id="A", entry=statement, found=found)


def test_an_operator_looks_up_each_uncertain_entry_in_its_services_ledger(tmp_path: Path) -> None:
    files = Files(tmp_path)
    StripeLedger(files.payments).add_execution([charge("A", id="ch_A"), charge("C", id="ch_C")])
    accepted = mail("C", message_id="<C>")
    payload = {
        "To": accepted.recipient,
        "Subject": accepted.subject,
        "Metadata": {"outbox_key": accepted.key, "order_id": accepted.order_id},
    }
    Ledger(files.mails)(Effect(operation="email.send", key=None, id="<C>", payload=payload, at=datetime.now(UTC)))
    statements = {
        "A": [charging("A", "uncertain")],
        "B": [charging("B", "uncertain")],
        "C": [charging("C", "delivered"), mailing("C", "uncertain")],
        "D": [charging("D", "delivered"), mailing("D", "uncertain")],
    }

    found = {(each.order_id, each.entry.operation): each.found for each in findings(statements, files)}

    assert found == {("A", CHARGE): "ch_A", ("B", CHARGE): None, ("C", RECEIPT): "<C>", ("D", RECEIPT): None}


def test_an_operator_would_rather_resolve_a_charge_that_happened() -> None:
    happened, not_charged = finding(charging("A", "uncertain"), "ch_1"), finding(charging("B", "uncertain"), None)
    mailed = finding(mailing("C", "uncertain"), "<1@shop>")

    assert most_instructive([mailed, not_charged, happened]) is happened
    assert most_instructive([mailed, not_charged]) is not_charged
    assert most_instructive([]) is None


@pytest.mark.parametrize(
    ("statement", "found", "verdict", "reason"),
    [
        (charging("A", "uncertain"), "ch_1", "--happened", "the payment service has ch_1 for this order"),
        (charging("A", "uncertain"), None, "--did-not-happen", "the payment service has no charge for this order"),
        (mailing("A", "uncertain"), "<1@shop>", "--happened", "the mail service has accepted <1@shop> for this order"),
        (mailing("A", "uncertain"), None, "--did-not-happen", "the mail service has accepted no mail for this order"),
    ],
)
def test_an_operator_puts_on_record_what_the_ledger_says(
    statement: Statement, found: str | None, verdict: str, reason: str
) -> None:
    command = finding(statement, found).command

    assert command == ["resolve", str(statement.id), verdict, "--reason", reason, "--actor", "you"]


# --- the mail service


def mailed(ledger: Path, **faults: float) -> Outcome:
    """The outcome of a receipt at the mail service."""
    record, chances = Ledger(ledger), Faults(**faults)  # type: ignore[arg-type]  # fractions
    receipt = {"To": "ada@example.com", "Subject": "Your receipt", "Metadata": {"order_id": "A"}}
    delivery = Delivery(ENTRY, RECEIPT, json.dumps(receipt).encode(), "ck1_receipt", 1, {}, {}, 0.0)
    with service_of(postmark, faults=chances, record=record) as service:
        adapter = service.adapter()

        async def main() -> Outcome:
            outcome = await adapter.send(delivery)
            await adapter.aclose()
            return outcome

        return asyncio.run(main())


def test_an_accepted_mail_is_in_the_ledger_with_its_key_and_order(tmp_path: Path) -> None:
    outcome = mailed(tmp_path / "mails")

    assert isinstance(outcome, Delivered)
    assert read_mails(tmp_path / "mails").accepted == [
        Mail(
            message_id="postmark_1",
            key="ck1_receipt",
            recipient="ada@example.com",
            order_id="A",
            subject="Your receipt",
            reply_lost=False,
        )
    ]


def test_a_mail_whose_reply_is_lost_is_in_the_ledger_and_in_doubt(tmp_path: Path) -> None:
    outcome = mailed(tmp_path / "mails", lose_response=1)

    assert isinstance(outcome, Unknown)
    ledger = read_mails(tmp_path / "mails")
    assert [mail.reply_lost for mail in ledger.accepted] == [True]
    assert ledger.lost == 1


def test_a_refused_mail_must_be_sent_later_and_is_not_among_the_accepted(tmp_path: Path) -> None:
    outcome = mailed(tmp_path / "mails", rate_limit=1)

    assert isinstance(outcome, Deferred)
    ledger = read_mails(tmp_path / "mails")
    assert (ledger.accepted, ledger.turned_away) == ([], {429: 1})


def test_a_ledger_is_read_up_to_the_line_that_is_being_written(tmp_path: Path) -> None:
    mailed(tmp_path / "mails", rate_limit=1)
    with (tmp_path / "mails").open("a") as file:
        file.write('{"effect": {"id')

    assert read_mails(tmp_path / "mails").turned_away == {429: 1}
    assert read_mails(tmp_path / "missing").accepted == []
