"""The audit: what the clients were told against what the payment service did. Pure.

The clients' receipts say which orders there are. The payment service's own ledger says what was charged. The only word
taken from the outbox is its claim about each order, and that is put to the test too: `delivered` must be charged once,
`uncertain` at most once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dispatchers.testing.stripe_ledger import Effect
from examples.demo.receipts import Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One order: what the outbox claims, and how often the ledger has it charged."""

    order_id: str
    customer: str
    amount: int
    currency: str
    state: str
    charges: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result. It is passed when there are no `problems`."""

    verdicts: Sequence[Verdict]
    problems: Sequence[str]
    uncertain_max: int
    suppressed: int

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def uncertain(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.state == "uncertain"]


def audit(
    *,
    orders: int,
    receipts: Sequence[Receipt],
    charges: Sequence[Effect],
    states: Mapping[str, str],
    uncertain_max: int,
    suppressed: int,
) -> Audit:
    """Compare them, order by order and in both directions.

    orders: how many checkouts were made. states: what the outbox claims of each order.
    uncertain_max: as many may be uncertain: those in flight at a kill, and those answered with a 500 that is stored.
    suppressed: how many requests the service answered as repeats; only reported.
    """
    problems: list[str] = []

    def require(fact: bool, problem: str) -> None:
        if not fact:
            problems.append(problem)

    charges_of: dict[str, list[Effect]] = {}
    for charge in charges:
        charges_of.setdefault(charge.metadata.get("order_id", ""), []).append(charge)

    require(len(receipts) == orders, f"{orders} checkouts were made, {len(receipts)} have a receipt")
    verdicts = []
    for receipt in receipts:
        named = len(receipt.order_ids)
        require(named > 0, f"checkout {receipt.key}: never answered 201")
        require(named < 2, f"checkout {receipt.key}: answered with {named} orders: {receipt.order_ids}")
        for order_id in receipt.order_ids:
            charged = charges_of.pop(order_id, [])
            state = states.get(order_id, "without an entry")
            verdicts.append(
                Verdict(
                    order_id=order_id,
                    customer=receipt.customer,
                    amount=receipt.amount,
                    currency=receipt.currency,
                    state=state,
                    charges=len(charged),
                )
            )
            once = {"delivered": {1}, "uncertain": {0, 1}}.get(state, set())
            require(len(charged) in once, f"order {order_id}: {state}, and charged {len(charged)} times")
            for charge in charged:
                require(
                    (charge.amount, charge.currency, charge.customer)
                    == (receipt.amount, receipt.currency, receipt.customer),
                    f"order {order_id}: {receipt.customer} owed {receipt.amount} {receipt.currency},"
                    f" and {charge.customer} was charged {charge.amount} {charge.currency}",
                )
    for order_id, charged in charges_of.items():
        require(False, f"order {order_id}: charged {len(charged)} times, and no client knows of it")
    made = Audit(verdicts=verdicts, problems=problems, uncertain_max=uncertain_max, suppressed=suppressed)
    found = len(made.uncertain)
    require(found <= uncertain_max, f"{found} orders are uncertain; at most {uncertain_max} may be")
    return made
