"""The audit: what the clients were answered against what the payment service and the mail server did. Pure.

The clients' records list the orders. The services' own ledgers list what was charged and mailed. The only words
taken from the outbox are its statements about each order's charge and receipt, and those are put to the test too:
`delivered` must have happened once, `failed` never, and `uncertain` at most once and with an excuse.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from dispatchers.testing.stripe_ledger import Effect
from examples.demo.mail_ledger import Mail
from examples.demo.promises import Promise
from examples.demo.statements import CHARGE, RECEIPT, Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Excuses:
    """What went wrong, one by one: without one of these reasons no entry may be uncertain, nor have failed.

    stored_500: the keys under which the payment service has stored a 500, which it would only repeat.
    struck: the entries that a kill left under a lease. SMTP knows no keys, so a mail among them is not sent again. A charge
        is, under its key: no kill makes one uncertain, and it finds no excuse here.
    decided: the entries that an operator has resolved.
    """

    stored_500: Collection[str] = ()
    struck: Collection[UUID] = ()
    decided: Collection[UUID] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that is known of one order."""

    order_id: str
    promise: Promise
    statements: Sequence[Statement]
    charges: Sequence[Effect]
    mails: Sequence[Mail]
    paid: bool

    @property
    def charge(self) -> str:
        """What the outbox says of its charge: `delivered` if all went well."""
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
    """The result. It is passed when there are no `problems`."""

    cases: Sequence[Case]
    problems: Sequence[str]

    @property
    def passed(self) -> bool:
        return not self.problems


def audit(
    *,
    orders: int,
    promises: Sequence[Promise],
    charges: Iterable[Effect],
    mails: Iterable[Mail],
    statements: Mapping[str, Sequence[Statement]],
    paid: Collection[str],
    excuses: Excuses,
) -> Audit:
    """Compare them, order by order and in both directions.

    orders: how many checkouts were made. charges, mails: the ledgers. statements: the outbox's, by order.
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
            promise=promise,
            statements=statements.get(order_id, ()),
            charges=charged.pop(order_id, ()),
            mails=mailed.pop(order_id, ()),
            paid=order_id in paid,
        )
        for promise in promises
        for order_id in promise.order_ids
    ]
    problems = [*broken_promises(orders, promises)]
    for case in cases:
        problems += [f"order {case.order_id}: {problem}" for problem in problems_of(case, excuses)]
    for verb, strangers in (("charged", charged), ("mailed", mailed)):
        for order_id, effects in strangers.items():
            problems.append(f"order {order_id}: {verb} {len(effects)} times, and no client knows of it")
    return Audit(cases=cases, problems=problems)


def broken_promises(orders: int, promises: Sequence[Promise]) -> Iterator[str]:
    if len(promises) != orders:
        yield f"{orders} checkouts were made, {len(promises)} have come to an end"
    for promise in promises:
        if not promise.order_ids:
            yield f"checkout {promise.key}: never answered 201"
        elif len(promise.order_ids) > 1:
            yield f"checkout {promise.key}: answered with {len(promise.order_ids)} orders: {promise.order_ids}"


def problems_of(case: Case, excuses: Excuses) -> Iterator[str]:
    yield from charge_problems(case, excuses)
    yield from receipt_problems(case, excuses)
    if case.paid != (case.charge == "delivered"):
        yield f"{'' if case.paid else 'not '}marked as paid, and its charge is {case.charge}"


def charge_problems(case: Case, excuses: Excuses) -> Iterator[str]:
    if len(case.charges) not in allowed(case.entries(CHARGE), excuses):
        yield f"{case.charge}, and charged {len(case.charges)} times"
    for entry in case.entries(CHARGE):
        if entry.state == "uncertain" and entry.key not in excuses.stored_500:
            yield "uncertain, and the payment service has stored no 500 for it"
    owed = case.promise
    for charge in case.charges:
        if (charge.amount, charge.currency, charge.customer) != (owed.amount, owed.currency, owed.customer):
            yield (
                f"{owed.customer} owed {owed.amount} {owed.currency},"
                f" and {charge.customer} was charged {charge.amount} {charge.currency}"
            )


def receipt_problems(case: Case, excuses: Excuses) -> Iterator[str]:
    receipts = case.entries(RECEIPT)
    if len(receipts) != (case.charge == "delivered"):
        yield f"its charge is {case.charge}, and {len(receipts)} receipts were enqueued"
    if len(case.mails) not in (allowed(receipts, excuses) if receipts else {0}):
        yield f"receipt {case.receipt}, and mailed {len(case.mails)} times"
    if case.mails and not case.charges:
        yield f"mailed {len(case.mails)} times, and never charged"
    lost = {mail.key for mail in case.mails if mail.reply_lost}
    for entry in receipts:
        if entry.state == "uncertain" and entry.id not in excuses.struck and entry.key not in lost:
            yield "receipt uncertain, though no kill struck it and no reply was lost"
    for mail in case.mails:
        if mail.recipient != case.promise.email:
            yield f"its receipt was for {case.promise.email}, and {mail.recipient} got it"


def allowed(entries: Sequence[Statement], excuses: Excuses) -> set[int]:
    """How often it may have happened, given what the outbox says. Cards and addresses are good: only an operator decides
    `failed`."""
    match [entry.state for entry in entries]:
        case ["delivered"]:
            return {1}
        case ["uncertain"]:
            return {0, 1}
        case ["failed"] if entries[0].id in excuses.decided:
            return {0}
        case _:
            return set()
