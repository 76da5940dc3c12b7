"""The current state at one moment, for the live view and the final tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dispatchers.testing.stripe_ledger import StripeLedger
from examples.demo.killer import Lease
from examples.demo.mail_ledger import MailLedger

OPEN = ("pending", "sending", "retry")
SETTLED = ("delivered", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaymentService:
    """What the payment service has answered so far, from its ledger."""

    requests: int
    charges: int
    replays: int
    lost: int
    stored_500: int
    refused_503: int
    limited_429: int
    in_use_409: int

    @classmethod
    def read(cls, ledger: StripeLedger) -> "PaymentService":
        return cls(
            requests=ledger.count(),
            charges=ledger.count("object = 'charge'", table="effect"),
            replays=ledger.count("replayed"),
            lost=ledger.count("fault = 'lose_response' AND status = 200"),
            stored_500=ledger.count("status = 500 AND NOT replayed"),
            refused_503=ledger.count("status = 503"),
            limited_429=ledger.count("status = 429"),
            in_use_409=ledger.count("status = 409"),
        )


class Tally(Counter[str]):
    """How many entries are in which state."""

    @property
    def open(self) -> int:
        return sum(self[state] for state in OPEN)

    @property
    def settled(self) -> int:
        return sum(self[state] for state in SETTLED)

    @property
    def uncertain(self) -> int:
        return self["uncertain"]

    @property
    def ended(self) -> int:
        return self.settled + self.uncertain


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the run.

    answered: checkouts whose client got a 201. charges, receipts: the outbox's entries, by state.
    interrupted: by kill, the leases of the entries that the dispatcher was sending.
    """

    seconds: float
    orders: int
    answered: int
    charges: Tally
    receipts: Tally
    payments: PaymentService
    mails: MailLedger
    interrupted: Sequence[Sequence[Lease]] = field(default_factory=list)

    @property
    def entries(self) -> Tally:
        """The entries of both kinds."""
        return Tally(self.charges + self.receipts)
