"""What clients got with a 201: one JSON line for each checkout."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One checkout as its client saw it.

    email: where the receipt is to go.
    order_ids: the different orders that answers of 201 named: one, unless the shop is broken; none if it never answered.
    requests: how many were sent for it; of these `timeouts` were given up by the client, `conflicts` answered 409,
    `errors` anything else but 201, and `replays` with the answer of an earlier one.
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


def read_promises(path: Path) -> list[Promise]:
    """All that are written in full so far."""
    if not path.exists():
        return []
    *lines, _unfinished = path.read_text().split("\n")
    return [Promise(**json.loads(line)) for line in lines]
