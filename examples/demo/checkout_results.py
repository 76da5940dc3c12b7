"""The results of the checkouts, as the clients saw them: one JSON line for each checkout."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckoutResult:
    """One checkout as its client saw it.

    email: the address to which the receipt must be sent.
    order_ids: the different orders in the answers with status 201. There is one, unless the shop is broken. There is none if
        the shop never answered.
    requests: how many requests the client sent. It gave up `timeouts` of them. The shop answered `conflicts` with 409,
        `replays` with the answer to an earlier request, and `errors` with another status than 201 or 409.
    """

    key: str
    customer: str
    email: str
    amount: int
    currency: str
    order_ids: list[str]
    requests: int = 0
    timeouts: int = 0
    conflicts: int = 0
    errors: int = 0
    replays: int = 0

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read_results(path: Path) -> list[CheckoutResult]:
    """Read all results that are written in full so far."""
    if not path.exists():
        return []
    *lines, _unfinished = path.read_text().split("\n")
    return [CheckoutResult(**json.loads(line)) for line in lines]
