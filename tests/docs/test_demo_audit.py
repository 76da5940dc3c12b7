"""The audit of the demo: it passes when ledgers, outbox and shop agree, and names each thing that is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from support.demo_audit import charge, charge_id, charging, mail, mailing, ordered, receipt_id

from dispatchers.testing.stripe_ledger import Effect
from examples.demo.audit import Audit, Excuses, audit
from examples.demo.checkout_results import CheckoutResult
from examples.demo.mail_ledger import Mail

OWED_AND_CHARGED = "order B: ada owed 2000 eur, but {} was charged {}"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Of two orders, A and B, with which all went well. charge, receipt: what the outbox says of B's entries."""

    orders: int = 2
    responses: Sequence[CheckoutResult] = (ordered("A"), ordered("B"))
    charges: Sequence[Effect] = (charge("A"), charge("B"))
    mails: Sequence[Mail] = (mail("A"), mail("B"))
    charge: Sequence[str] = ("delivered",)
    receipt: Sequence[str] = ("delivered",)
    paid: Sequence[str] = ("A", "B")
    excuses: Excuses = field(default_factory=Excuses)

    def audited(self) -> Audit:
        said_of_b = [charging("B", state) for state in self.charge] + [mailing("B", state) for state in self.receipt]
        return audit(
            orders=self.orders,
            results=self.responses,
            charges=self.charges,
            mails=self.mails,
            statements={"A": [charging("A", "delivered"), mailing("A", "delivered")], "B": said_of_b},
            paid=self.paid,
            excuses=self.excuses,
        )


ONLY_A = Evidence(charges=(charge("A"),), mails=(mail("A"),), receipt=(), paid=("A",))
"""What is left where B was neither charged nor mailed."""

UNMAILED = Evidence(mails=(mail("A"),))
STORED_500 = Excuses(stored_500={"charge-B"})
KILLED = Excuses(interrupted={charge_id("B"), receipt_id("B")})
DECIDED = Excuses(decided={charge_id("B"), receipt_id("B")})
UNSURE = {"charge": ("uncertain",), "excuses": STORED_500}


@pytest.mark.parametrize(
    "evidence",
    [
        pytest.param(Evidence(), id="each charged and mailed once"),
        pytest.param(replace(ONLY_A, **UNSURE), id="a charge is uncertain, and did not happen"),
        pytest.param(
            replace(ONLY_A, charges=Evidence.charges, **UNSURE), id="a charge is uncertain, and happened once"
        ),
        pytest.param(
            replace(ONLY_A, charge=("failed",), excuses=DECIDED), id="an operator found that it did not happen"
        ),
        pytest.param(
            Evidence(receipt=("uncertain",), excuses=KILLED), id="a kill interrupted a mail that was accepted"
        ),
        pytest.param(
            replace(UNMAILED, receipt=("uncertain",), excuses=KILLED), id="a kill interrupted a mail before it left"
        ),
        pytest.param(
            Evidence(mails=(mail("A"), mail("B", reply_lost=True)), receipt=("uncertain",)),
            id="a mail's reply was lost",
        ),
        pytest.param(
            replace(UNMAILED, receipt=("failed",), excuses=DECIDED), id="an operator found that no mail was sent"
        ),
        pytest.param(
            Evidence(orders=0, responses=(), charges=(), mails=(), paid=()),
            id="no orders at all",
        ),
    ],
)
def test_an_audit_passes_when_ledgers_outbox_and_shop_agree(evidence: Evidence) -> None:
    result = evidence.audited()

    assert result.problems == []
    assert result.passed


@pytest.mark.parametrize(
    ("evidence", "problem"),
    [
        (Evidence(charges=(*Evidence.charges, charge("B"))), "order B: charge delivered, but charged 2 times"),
        (
            replace(ONLY_A, charges=(*Evidence.charges, charge("B")), **UNSURE),
            "order B: charge uncertain, but charged 2 times",
        ),
        (Evidence(charges=(charge("A"), charge("B", amount=2001))), OWED_AND_CHARGED.format("ada", "2001 eur")),
        (Evidence(charges=(charge("A"), charge("B", currency="usd"))), OWED_AND_CHARGED.format("ada", "2000 usd")),
        (Evidence(charges=(charge("A"), charge("B", customer="bob"))), OWED_AND_CHARGED.format("bob", "2000 eur")),
        (
            replace(ONLY_A, charges=(charge("A"), charge("B", amount=1)), **UNSURE),
            OWED_AND_CHARGED.format("ada", "1 eur"),
        ),
        (
            replace(ONLY_A, charge=("uncertain",)),
            "order B: charge uncertain, but the payment service has stored no 500 for it",
        ),
        (
            replace(ONLY_A, charge=("uncertain",), excuses=KILLED),
            "order B: charge uncertain, but the payment service has stored no 500 for it",
        ),
        (replace(ONLY_A, charge=("failed",)), "order B: charge failed, but charged 0 times"),
        (
            replace(ONLY_A, charges=Evidence.charges, charge=("failed",), excuses=DECIDED),
            "order B: charge failed, but charged 1 times",
        ),
        (replace(ONLY_A, charge=("pending",)), "order B: charge pending, but charged 0 times"),
        (replace(ONLY_A, charges=Evidence.charges, charge=("retry",)), "order B: charge retry, but charged 1 times"),
        (replace(ONLY_A, charges=Evidence.charges, charge=()), "order B: charge without an entry, but charged 1 times"),
        (
            replace(ONLY_A, charges=Evidence.charges, charge=("delivered", "delivered")),
            "order B: charge delivered and delivered, but charged 1 times",
        ),
        (Evidence(charges=(*Evidence.charges, charge("C"))), "order C: charged 1 times, but no client got this order"),
        (
            Evidence(charges=(*Evidence.charges, charge("", metadata={}))),
            "order : charged 1 times, but no client got this order",
        ),
        (Evidence(mails=(*Evidence.mails, mail("B"))), "order B: receipt delivered, but mailed 2 times"),
        (
            Evidence(mails=(*Evidence.mails, mail("B")), receipt=("uncertain",), excuses=KILLED),
            "order B: receipt uncertain, but mailed 2 times",
        ),
        (UNMAILED, "order B: receipt delivered, but mailed 0 times"),
        (replace(UNMAILED, receipt=("pending",)), "order B: receipt pending, but mailed 0 times"),
        (replace(UNMAILED, receipt=("failed",)), "order B: receipt failed, but mailed 0 times"),
        (Evidence(receipt=("failed",), excuses=DECIDED), "order B: receipt failed, but mailed 1 times"),
        (
            Evidence(receipt=("uncertain",)),
            "order B: receipt uncertain, but no kill interrupted it and no reply was lost",
        ),
        (replace(UNMAILED, receipt=()), "order B: charge delivered, but 0 receipts were enqueued"),
        (
            Evidence(charge=("uncertain",), excuses=STORED_500, paid=("A",)),
            "order B: charge uncertain, but 1 receipts were enqueued",
        ),
        (
            replace(ONLY_A, charges=Evidence.charges, mails=Evidence.mails, **UNSURE),
            "order B: receipt without an entry, but mailed 1 times",
        ),
        (
            Evidence(mails=(mail("A"), mail("B", recipient="bob@example.com"))),
            "order B: the receipt was for ada@example.com, but bob@example.com got it",
        ),
        (Evidence(mails=(*Evidence.mails, mail("C"))), "order C: mailed 1 times, but no client got this order"),
        (Evidence(paid=("A",)), "order B: not marked as paid, but its charge is delivered"),
        (replace(ONLY_A, **UNSURE, paid=("A", "B")), "order B: marked as paid, but its charge is uncertain"),
        (replace(ONLY_A, responses=(ordered("A"), ordered("B", order_ids=[]))), "checkout key-B: never answered 201"),
        (
            Evidence(responses=(ordered("A", order_ids=["A", "B"]),), orders=1),
            "checkout key-A: answered with 2 orders: ['A', 'B']",
        ),
        (replace(ONLY_A, responses=(ordered("A"),)), "2 checkouts were made, but only 1 have a result"),
    ],
)
def test_an_audit_names_what_is_wrong(evidence: Evidence, problem: str) -> None:
    result = evidence.audited()

    assert result.problems == [problem]
    assert not result.passed


def test_an_audit_names_every_problem_and_not_just_the_first() -> None:
    result = Evidence(charges=(charge("A"), charge("A"), charge("C"))).audited()

    assert result.problems == [
        "order A: charge delivered, but charged 2 times",
        "order B: charge delivered, but charged 0 times",
        "order B: mailed 1 times, but never charged",
        "order C: charged 1 times, but no client got this order",
    ]
