"""How things are in the outbox, as the shop reports it."""

from types import TracebackType
from typing import NamedTuple, Self
from uuid import UUID

import httpx

from examples.demo.killer import Lease
from examples.demo.snapshot import Tally


class Progress(NamedTuple):
    """tallies: by destination, how many entries are in which state. leases: of the entries that are being sent."""

    tallies: dict[str, Tally]
    leases: list[Lease]


class ProgressReader:
    """Asks the shop; `close` closes its connection."""

    def __init__(self, shop_url: str) -> None:
        self._shop = httpx.Client(base_url=shop_url, trust_env=False, timeout=60)

    def read(self) -> Progress:
        answer = self._shop.get("/progress")
        answer.raise_for_status()
        progress = answer.json()
        tallies: dict[str, Tally] = {}
        for destination, state, entries in progress["entries"]:
            tallies.setdefault(destination, Tally())[state] = entries
        leases = [Lease(UUID(entry_id), token, destination) for entry_id, token, destination in progress["leases"]]
        return Progress(tallies, leases)

    def close(self) -> None:
        self._shop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
