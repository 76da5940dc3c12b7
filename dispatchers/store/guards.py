"""The settings of a dispatcher's PostgreSQL transactions, which override the role's and the session's.

All of it is for the transaction only, so that PgBouncer in transaction mode works. The statements that settle bring it along;
any other transaction begins with `guard`.
"""

from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

from sqlalchemy import Connection, TextClause, text

from outbox.sql.schema import STATEMENTS_MAX

DURABLE = "set_config('synchronous_commit', 'on', true)"
"""A role may have it off, and a claim that a crash undoes would be a send without a record."""

LEASE_MIN, LEASE_MAX = timedelta(seconds=4), timedelta(seconds=60)


class Guards(NamedTuple):
    """The limits of one transaction; None for no limit of ours. Where the session has a stricter one, that one holds.

    lock_wait: how long a statement may wait for a lock that another transaction holds. statement: how long any statement may
    take but the first one, which sets this. silence: how long the server waits for the next statement before it ends the
    transaction and frees its locks: the process may be stopped, or its host gone. replan: whether each statement but the first
    one is planned for the tables as they are now. A plan that was made and kept while a table was empty reads it from end to
    end when it has grown. Nor may it use a bitmap: where the planner expects fewer due rows than are wanted, as it does of a
    destination with some ten thousand, it would read and sort all due rows for each claim.
    """

    lock_wait: timedelta | None = None
    statement: timedelta | None = None
    silence: timedelta | None = None
    replan: bool = False

    @property
    def sql(self) -> str:
        """Expressions for a SELECT's list."""
        limits = {
            "lock_timeout": self.lock_wait,
            "statement_timeout": self.statement,
            "idle_in_transaction_session_timeout": self.silence,
        }
        settings = {"plan_cache_mode": "force_custom_plan", "enable_bitmapscan": "off"} if self.replan else {}
        replan = [f"set_config('{name}', '{value}', true)" for name, value in settings.items()]
        return ", ".join(
            [DURABLE, *replan, *(_limited(name, limit) for name, limit in limits.items() if limit is not None)]
        )


def _limited(setting: str, limit: timedelta) -> str:
    milliseconds = max(1, limit // timedelta(milliseconds=1))
    own = f"NULLIF(EXTRACT(epoch FROM CAST(current_setting('{setting}') AS interval)), 0) * 1000"  # LEAST passes NULL over
    return f"set_config('{setting}', CAST(CAST(LEAST({own}, {milliseconds}) AS integer) AS text), true)"


def limiting(lease: timedelta) -> timedelta:
    """The lease that limits follow from. Beyond the default one they need not grow: nothing that a dispatcher asks takes so long.
    Nor do they shrink without end, or a busy machine would meet them.
    """
    return min(max(lease, LEASE_MIN), LEASE_MAX)


def guards_for(lease: timedelta) -> Guards:
    """The limits under which a dispatcher with such leases works: none of its transactions may use up a lease."""
    lease = limiting(lease)
    return Guards(lock_wait=lease / 12, statement=lease * 0.3, silence=lease, replan=True)


GUARDS = guards_for(timedelta(seconds=60))
"""For the default lease, and for callers without one."""


def guard(connection: Connection, guards: Guards = GUARDS) -> None:
    """Set the limits of this transaction, and that its commit survives a crash."""
    if connection.dialect.name == "postgresql":
        connection.execute(guarding(guards))


@lru_cache(STATEMENTS_MAX)
def guarding(guards: Guards) -> TextClause:
    return text(f"SELECT {guards.sql}")
