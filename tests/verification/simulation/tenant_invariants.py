"""The invariants of accounts and scopes: none holds up the others, and no two entries have one key."""

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from dispatchers.flow_control.state import FlowState, service_of
from dispatchers.transitions import ClaimedEntry, Retry
from simulation.reference_rows import Entry
from simulation.trace import Truth

HUB = "hub"
REFUSAL = "the account is refused"
STARVED_SECONDS = 90.0  # the longest freeze, a lease, and the rounds of claims after them


class TenantInvariants:
    """Knows which accounts the service refuses. refused: those that it has refused so far."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._refused: set[str] = set()
        self._keys: dict[str, UUID] = {}
        self._entries: list[Entry] = []
        self._must_have_waited: dict[
            str, UUID
        ] = {}  # own destinations of refused accounts, and an entry that was refused
        self._has_waited: set[str] = set()

    def enqueuing(self, entry: Entry) -> None:
        is_new = entry.id not in self._truth.entries
        self._truth.require(is_new, entry.id, "entries of two scopes have the same id")
        self._entries.append(entry)

    def sending(self, id: UUID, key: str) -> None:
        self._truth.require(self._keys.setdefault(key, id) == id, id, "sent under another entry's key")

    def refused(self, account: str) -> None:
        self._truth.note(f"{HUB} refuses {account}")
        self._refused.add(account)

    def settled(self, entry: ClaimedEntry, change: Any) -> None:
        """The process that puts a refusal on record reports it with that, or before."""
        is_own = entry.destination.startswith(f"{HUB}:")
        if is_own and isinstance(change, Retry) and change.reason == REFUSAL:
            self._must_have_waited[entry.destination] = entry.id

    def check_flow(self, flow: Mapping[str, FlowState]) -> None:
        """Only an account's own destination waits because of it."""
        for name, row in flow.items() if self._entries else ():
            if row.cooldown_until is not None:
                self._has_waited.add(name)
            account = name.partition(":")[2]
            if service_of(name) == HUB and account not in self._refused:
                is_open = row.cooldown_until is None and (row.breaker == "closed" or self._has_timed_out)
                self._truth.require(is_open, self._entries[0].id, f"{name} waits for the accounts that are refused")

    @property
    def _has_timed_out(self) -> bool:
        """Whether a send to the service had no answer in time, which counts as the destination's failure."""
        sends = [send for entry in self._entries for send in self._truth.trace(entry.id).sends]
        return any(send.decided_at is None or send.process.frozen_seconds(send.began) for send in sends)

    def check_none_starves(self, refused: Collection[str]) -> None:
        """Some time after the last fault. refused: the accounts that the service still refuses."""
        for entry in self._entries:
            row, account = self._truth.store.queue.get(entry.id), entry.options
            is_accepted = not any(f'"{each}"' in account for each in refused)
            if row is not None and is_accepted:
                self._truth.require(bool(self._truth.trace(entry.id).sends), entry.id, "it starves: it was never sent")

    def check_all(self) -> None:
        """At the end."""
        for name, id in self._must_have_waited.items():
            self._truth.require(name in self._has_waited, id, f"its account was refused, and {name} did not wait")
