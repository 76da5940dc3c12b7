"""One service that many callers and accounts share, in some crowded runs. It refuses some of the accounts for a while.

Its draws are its own, so that the other runs stay as they are.
"""

import math
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any
from uuid import UUID

from dispatchers import Breaker, Deferred, Delivery, Limits
from dispatchers.time_limits import FOREVER
from outbox.keys import entry_id
from simulation.app import App
from simulation.database import Database, fields_of
from simulation.invariants import Invariants
from simulation.reference_rows import Entry
from simulation.services import Service
from simulation.tenant_invariants import HUB, REFUSAL
from simulation.trace import LEASE, Declared, Send
from simulation.world import World

OPERATION = "hub.charge"
NO_ID = UUID(int=0)
SOONER = (None, timedelta(seconds=3), timedelta(seconds=17))  # an account's own destination waits as long
LATER = (*SOONER, timedelta(days=3))  # if they share one, only the entry waits
REFUSED_SECONDS = (3.0, 15.0, 45.0, math.inf)


class Tenants:
    """The draws of one seed. is_here: whether the service has any callers.

    accounts: whose entries there are. refused_until: by account, when the service accepts it again.
    have_own_destinations: whether each account has a destination of its own (`hub:a1`), or all share `hub`.
    has_callbacks: whether the ends of their entries are reported.
    """

    def __init__(self, seed: int, *, is_crowded: bool) -> None:
        rng = Random(f"tenants {seed}")
        self.is_here = is_crowded and rng.random() < 0.5
        self.accounts = [f"a{number}" for number in range(rng.choice([1, 4, 4, 4, 30]) if self.is_here else 0)]
        self._scopes = [f"caller {number}" for number in range(rng.choice([1, 3, 12]))]
        self.have_own_destinations = rng.random() < 0.5
        self.has_callbacks = rng.random() < 0.3
        refused = rng.sample(self.accounts, len(self.accounts) * 2 // 3)
        self.refused_until = {account: rng.choice(REFUSED_SECONDS) for account in refused}
        self.retry_after = SOONER if self.have_own_destinations else LATER
        self._entries = max(len(self.accounts), rng.choice([2, 4, 12])) if self.is_here else 0
        self._begins_at = rng.random() * 5
        self._takes = rng.choice([0.0, 0.1, 5.0])  # from the first commit to the last one
        self._failures = rng.choice([2, 10])
        self.to_come = self._entries

    @property
    def called_back(self) -> list[str]:
        return [HUB] if self.is_here and self.has_callbacks else []

    @property
    def declared(self) -> list[Declared]:
        return [Declared(HUB, FOREVER, False, 12, LEASE * 15)] if self.is_here else []

    @property
    def limits(self) -> dict[str, Limits]:
        """Of the service, and so of each account's own destination."""
        breaker = Breaker(failures=self._failures, wait=timedelta(seconds=1), max_wait=timedelta(seconds=8))
        return {HUB: Limits(breaker=breaker)} if self.is_here else {}

    def begin(self, app: App, database: Database, invariants: Invariants) -> None:
        for number in range(self._entries):
            delay = self._begins_at + self._takes * number / self._entries
            app.world.at(delay, self._enqueue, number, app, database, invariants)

    def _enqueue(self, number: int, app: App, database: Database, invariants: Invariants) -> None:
        self.to_come -= 1
        entry = self._entry(number, app, database)
        invariants.tenants.enqueuing(entry)
        database.enqueue(entry)

    def _entry(self, number: int, app: App, database: Database) -> Entry:
        """Entries of different scopes have the same parents, and all the same operation."""
        scope, account = self._scopes[number % len(self._scopes)], self.accounts[number % len(self.accounts)]
        blank = Entry(
            id=NO_ID,
            operation=OPERATION,
            tag=b"",
            parent=f"order:{number // len(self._scopes)}",
            scope=scope,
            source="http",
            options=f'{{"account": "{account}"}}',
            apart=f"{HUB}:{account}" if self.have_own_destinations else None,
            created_at=database.now(),
        )
        return app.written(replace(blank, id=entry_id(fields_of(blank))))

    def still_refused(self, now: float) -> list[str]:
        return [account for account, until in self.refused_until.items() if until > now]


class Hub(Service):
    """The shared service: it answers for an account that it refuses before it looks at the key."""

    def __init__(self, world: World, invariants: Invariants, declared: Declared, tenants: Tenants) -> None:
        super().__init__(world, invariants, declared, 1.0)
        self._tenants = tenants

    def _handle(self, delivery: Delivery, send: Send, answer: Any) -> None:
        account = delivery.options["account"]
        if self.world.now < self._tenants.refused_until.get(account, 0.0):
            self.invariants.tenants.refused(account)
            after = self.world.rng.choice(self._tenants.retry_after)
            answer(Deferred(REFUSAL, after=after, cooldown=True, account=account))
        else:
            super()._handle(delivery, send, answer)
