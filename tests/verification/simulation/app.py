"""What the app does: it enqueues, cancels, and has its callbacks called."""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import outbox
from dispatchers import Operations
from dispatchers.callbacks import Settlement
from dispatchers.delivery import NATIVE
from outbox.keys import ParentKey, Tag, derive_tag
from outbox.sql.schema.tables import SCHEMA_VERSION
from simulation.database import ENV, AppSession, Database, fields_of
from simulation.invariants import Invariants
from simulation.operators import People
from simulation.reference_rows import Entry
from simulation.world import World

EPOCHS = 8
CALLED_BACK = ("pay", "sms")  # the destinations with callbacks
WINDOW = timedelta(seconds=20)
KEYRING = outbox.Keyring({"k1": bytes(range(32))}, current="k1")
OUTBOX = outbox.Outbox(KEYRING, env=ENV)
OPERATIONS = [*["pay.charge"] * 4, "crm.upsert", "mail.send", "mail.send", "sms.send", "fax.send"]
OPERATIONS_IN_GROUPS = [*["pay.charge"] * 6, *["mail.send"] * 8, *["sms.send"] * 6, *["crm.upsert"] * 3, "fax.send"]
GROUPS = [*["group a"] * 5, "group b"]


class App:
    """The app, of a few entries. poison: those whose payload kills the process that sends it. to_come: not enqueued yet.

    groups: how likely an entry has an ordering key; in most runs none has.
    """

    def __init__(self, world: World, invariants: Invariants, database: Database, people: People, groups: float) -> None:
        self.world = world
        self.rng = world.rng
        self.poison: set[UUID] = set()
        self.callbacks_fail = self.rng.choice([0.0, 0.2, 0.5])
        self.groups = groups
        self.receipts_have_groups = self.rng.random() < 0.3
        self.to_come = self.rng.choice([4, 5, 6, 7] if self.groups else [1, 2, 2, 3, 4])
        self._invariants = invariants
        self._database = database
        self._people = people
        self._keys: dict[UUID, list[str]] = {}

    def begin(self) -> None:
        left = self.to_come
        while left:
            in_one_flush = 2 if self.groups and left > 1 and self.rng.random() < 0.2 else 1
            left -= in_one_flush
            self.world.at(self.rng.random() * 5, self._enqueue, [left + number for number in range(in_one_flush)])

    def _enqueue(self, numbers: list[int]) -> None:
        self.to_come -= len(numbers)
        operations = OPERATIONS_IN_GROUPS if self.groups else OPERATIONS
        entries = [self._entry(self.rng.choice(operations), f"order:{number}") for number in numbers]
        self._database.enqueue(*entries)
        for entry in entries:
            if self.rng.random() < 0.04:
                self.poison.add(entry.id)
            if entry.operation.startswith("fax") or entry.schema_version > SCHEMA_VERSION:
                self._invariants.never.add(entry.id)
            if self.rng.random() < 0.25:
                self.world.at(self.rng.random() * self.rng.choice([5, 20]), self._cancel, entry.id)
            if self.groups and self.rng.random() < 0.5:
                self.world.at(self.rng.random() * 10, self._cancel_slowly, entry.id)

    def _entry(self, operation: str, parent: str) -> Entry:
        return self.written(
            Entry(
                id=UUID(int=self.rng.getrandbits(128)),
                operation=operation,
                tag=b"",
                parent=parent,
                schema_version=SCHEMA_VERSION + (self.rng.random() < 0.03),
                created_at=self._database.now(),
                ordering_key=self.rng.choice(GROUPS) if self.rng.random() < self.groups else None,
            )
        )

    def written(self, blank: Entry) -> Entry:
        return replace(blank, tag=derive_tag(KEYRING, "k1", fields_of(blank)))

    def keys(self, id: UUID) -> list[str]:
        """The keys that the entry may be sent under, by epoch."""
        if id not in self._keys:
            fields = fields_of(self._invariants.entries[id])
            self._keys[id] = [NATIVE.encode(Tag(derive_tag(KEYRING, "k1", fields, epoch))) for epoch in range(EPOCHS)]
        return self._keys[id]

    def _cancel(self, id: UUID) -> None:
        """By the app, or by an operator through a dispatcher."""
        if id in self._database.store.locked or not self.world.faulty:
            return
        if self.rng.random() < 0.5:
            if self._database.store.cancel(id):
                self._invariants.cancelled(id)
        else:
            self._people.cancel(id)

    def _cancel_slowly(self, id: UUID) -> None:
        """In a transaction that stays open for a while, and then may be rolled back: its row is locked meanwhile."""
        store = self._database.store
        if not self.world.faulty or id in store.locked or not store.may_be_cancelled(id):
            return
        self._invariants.note(f"{id.hex[:6]} is being cancelled")
        self._database.lock(id)

        def end() -> None:
            was_set_back = id not in store.locked
            self._database.unlock(id)
            if not was_set_back and self.rng.random() < 0.5 and store.cancel(id):
                self._invariants.cancelled(id)

        self.world.at(self.rng.choice([0.3, 3.0, 12.0]), end)

    def hear_of_restore(self) -> None:
        """The customer changes their mind just then."""
        waiting = list(self._database.store.queue)
        if waiting:
            self.world.at(self.rng.random(), self._cancel, self.rng.choice(waiting))

    # --- its callbacks

    def callbacks(self, called_back: Collection[str]) -> Operations:
        """What a process registers for these destinations: an end is reported, and a delivered entry brings a receipt."""
        effects = Operations()

        async def ended(session: AppSession, settlement: Settlement) -> None:
            if self.rng.random() < 0.2 and self.world.faulty:
                await asyncio.sleep(self.rng.choice([0.1, 4.0, 12.0]))
            session.add(settlement.entry.id, settlement.state)
            if settlement.state == "delivered":
                session.enqueue(lambda parent: self._receipt(settlement.entry.id, parent))
            if self.world.faulty and self.rng.random() < self.callbacks_fail:
                raise RuntimeError("the callback broke")

        for name in called_back:
            effects.on_settled(name)(ended)
            effects.on_uncertain(name)(ended)
        return effects

    def _receipt(self, caused_by: UUID, parent: ParentKey) -> Entry:
        """In some runs in the group of what caused it, if that has one."""
        group = self._invariants.entries[caused_by].ordering_key if self.receipts_have_groups else None
        return self.written(
            Entry(
                id=UUID(int=(caused_by.int + 1) % 2**128),
                operation="crm.receipt",
                tag=b"",
                parent=parent.key,
                scope=parent.scope,
                source=parent.source,
                created_at=self._database.now(),
                ordering_key=group,
            )
        )
