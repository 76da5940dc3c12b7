"""How things stand at one moment, for the live view and the final table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dispatchers.testing.stripe_ledger import StripeLedger

OPEN = ("pending", "sending", "retry")
SETTLED = ("delivered", "failed", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
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
    def read(cls, ledger: StripeLedger) -> "Service":
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`answered`: checkouts whose client was told 201. `entries`: how many in which state. `struck`: at each kill."""

    seconds: float
    orders: int
    answered: int
    entries: Mapping[str, int]
    service: Service
    struck: list[int] = field(default_factory=list)

    @property
    def open(self) -> int:
        return sum(self.entries.get(state, 0) for state in OPEN)

    @property
    def settled(self) -> int:
        return sum(self.entries.get(state, 0) for state in SETTLED)

    @property
    def uncertain(self) -> int:
        return self.entries.get("uncertain", 0)
