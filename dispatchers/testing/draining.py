"""For the tests of an app: send all that was enqueued, now.

    asyncio.run(drain(make_dispatcher()))

With adapters of the test's own (`MemoryAdapter`, or the strict imitation of Stripe in this package) it shows what the app's
effects and callbacks come to.
"""

from sqlalchemy import Connection, and_, update

from dispatchers.claims import Claims
from dispatchers.dispatcher import Dispatcher
from outbox.databases import clock
from outbox.errors import ConfigurationError
from outbox.instants import NEVER

ROUNDS_MAX = 100


async def drain(dispatcher: Dispatcher, *, ahead: bool = False) -> int:
    """Run the dispatcher until nothing is due, what callbacks enqueue included; returns how many entries it settled.

    ahead: what is due later, a retry after its backoff or an entry with `due`, is made due at once, until all has ended or is
    uncertain. For a database of the tests' own: due times are changed in it.
    Raises AssertionError for what still comes due after 100 rounds.
    """
    settled = 0
    for _ in range(ROUNDS_MAX):
        now = await dispatcher.run_once()
        settled += now
        brought = await _bring_forward(dispatcher) if ahead else 0
        if not (now or brought):
            return settled
    raise AssertionError(
        f"entries still come due after {ROUNDS_MAX} rounds: an adapter puts them off for ever, or none serves them"
    )


async def _bring_forward(dispatcher: Dispatcher) -> int:
    """Make due what waits for its time only; returns how many."""
    if not isinstance(dispatcher.store, Claims):
        raise ConfigurationError(
            "drain(ahead=True) changes due times in the database: the dispatcher's store must be Claims"
        )
    queue = dispatcher.store.tables.queue

    def bring(connection: Connection) -> int:
        waiting = and_(queue.c.due_at < NEVER, queue.c.lease_token.is_(None))
        brought: int = connection.execute(update(queue).where(waiting).values(due_at=clock())).rowcount
        return brought

    return await dispatcher.store.run(bring)
