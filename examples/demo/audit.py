"""The audit: compare the answers that the clients got with what the payment service and the mail service did. Pure.

The clients' records list the orders. The services' own ledgers list what was charged and mailed. From the outbox the audit takes
only the state of each order's charge and receipt, and it checks these states too. A `delivered` effect must have happened once,
a `failed` one never, and an `uncertain` one at most once. An uncertain entry also needs a known cause.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from dispatchers.testing.stripe_ledger import Effect
from examples.demo.checkout_results import CheckoutResult
from examples.demo.mail_ledger import Mail
from examples.demo.statements import CHARGE, RECEIPT, Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Excuses:
    """The known causes: without one of them no entry may be uncertain or failed.

    stored_500: the keys under which the payment service has stored a 500, which it would only repeat.
    interrupted: the entries that the dispatcher was sending when it was killed. A mail among them may be uncertain, because
        Postmark has no keys. A charge may not: it is sent again under its key.
    decided: the entries that an operator has resolved.
    """

    stored_500: Collection[str] = ()
    interrupted: Collection[UUID] = ()
    decided: Collection[UUID] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything that is known about one order."""

    order_id: str
    checkout: CheckoutResult
    statements: Sequence[Statement]
    charges: Sequence[Effect]
    mails: Sequence[Mail]
    paid: bool

    @property
    def charge(self) -> str:
        """The state of its charge in the outbox: `delivered` if nothing went wrong."""
        return self._state(CHARGE)

    @property
    def receipt(self) -> str:
        return self._state(RECEIPT)

    def entries(self, operation: str) -> list[Statement]:
        return [statement for statement in self.statements if statement.operation == operation]

    def _state(self, operation: str) -> str:
        return " and ".join(statement.state for statement in self.entries(operation)) or "without an entry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of the audit. It is passed if there are no `problems`."""

    cases: Sequence[Case]
    problems: Sequence[str]

    @property
    def passed(self) -> bool:
        return not self.problems


def audit(
    *,
    orders: int,
    results: Sequence[CheckoutResult],
    charges: Iterable[Effect],
    mails: Iterable[Mail],
    statements: Mapping[str, Sequence[Statement]],
    paid: Collection[str],
    excuses: Excuses,
) -> Audit:
    """Compare the records: each order with the ledgers, and each effect in the ledgers with the orders.

    orders: how many checkouts were made. charges, mails: the ledgers. statements: the outbox's states, by order.
    paid: the orders that the shop has marked as paid.
    """
    charged, mailed = defaultdict[str, list[Effect]](list), defaultdict[str, list[Mail]](list)
    for charge in charges:
        charged[charge.metadata.get("order_id", "")].append(charge)
    for mail in mails:
        mailed[mail.order_id].append(mail)
    cases = [
        Case(
            order_id=order_id,
            checkout=checkout,
            statements=statements.get(order_id, ()),
            charges=charged.pop(order_id, ()),
            mails=mailed.pop(order_id, ()),
            paid=order_id in paid,
        )
        for checkout in results
        for order_id in checkout.order_ids
    ]
    problems = [*checkout_problems(orders, results)]
    for case in cases:
        problems += [f"order {case.order_id}: {problem}" for problem in problems_of(case, excuses)]
    for verb, strangers in (("charged", charged), ("mailed", mailed)):
        for order_id, effects in strangers.items():
            problems.append(f"order {order_id}: {verb} {len(effects)} times, but no client got this order")
    return Audit(cases=cases, problems=problems)


def checkout_problems(orders: int, results: Sequence[CheckoutResult]) -> Iterator[str]:
    if len(results) != orders:
        yield f"{orders} checkouts were made, but only {len(results)} have a result"
    for checkout in results:
        if not checkout.order_ids:
            yield f"checkout {checkout.key}: never answered 201"
        elif len(checkout.order_ids) > 1:
            yield f"checkout {checkout.key}: answered with {len(checkout.order_ids)} orders: {checkout.order_ids}"


def problems_of(case: Case, excuses: Excuses) -> Iterator[str]:
    yield from charge_problems(case, excuses)
    yield from receipt_problems(case, excuses)
    if case.paid != (case.charge == "delivered"):
        yield f"{'' if case.paid else 'not '}marked as paid, but its charge is {case.charge}"


def charge_problems(case: Case, excuses: Excuses) -> Iterator[str]:
    if len(case.charges) not in allowed(case.entries(CHARGE), excuses):
        yield f"charge {case.charge}, but charged {len(case.charges)} times"
    for entry in case.entries(CHARGE):
        if entry.state == "uncertain" and entry.key not in excuses.stored_500:
            yield "charge uncertain, but the payment service has stored no 500 for it"
    owed = case.checkout
    for charge in case.charges:
        if (charge.amount, charge.currency, charge.customer) != (owed.amount, owed.currency, owed.customer):
            yield (
                f"{owed.customer} owed {owed.amount} {owed.currency},"
                f" but {charge.customer} was charged {charge.amount} {charge.currency}"
            )


def receipt_problems(case: Case, excuses: Excuses) -> Iterator[str]:
    receipts = case.entries(RECEIPT)
    if len(receipts) != (case.charge == "delivered"):
        yield f"charge {case.charge}, but {len(receipts)} receipts were enqueued"
    if len(case.mails) not in (allowed(receipts, excuses) if receipts else {0}):
        yield f"receipt {case.receipt}, but mailed {len(case.mails)} times"
    if case.mails and not case.charges:
        yield f"mailed {len(case.mails)} times, but never charged"
    lost = {mail.key for mail in case.mails if mail.reply_lost}
    for entry in receipts:
        if entry.state == "uncertain" and entry.id not in excuses.interrupted and entry.key not in lost:
            yield "receipt uncertain, but no kill interrupted it and no reply was lost"
    for mail in case.mails:
        if mail.recipient != case.checkout.email:
            yield f"the receipt was for {case.checkout.email}, but {mail.recipient} got it"


def allowed(entries: Sequence[Statement], excuses: Excuses) -> set[int]:
    """How often the effect may have happened, given the state in the outbox.

    All cards and addresses are valid, so an entry is `failed` only after an operator's decision.
    """
    match [entry.state for entry in entries]:
        case ["delivered"]:
            return {1}
        case ["uncertain"]:
            return {0, 1}
        case ["failed"] if entries[0].id in excuses.decided:
            return {0}
        case _:
            return set()
