"""The settings of a dispatcher's PostgreSQL transactions. They override the settings of the role and the session.

They are set for one transaction only, so that PgBouncer in transaction mode works. A settling statement contains them; every
other transaction begins with `guard`.
"""

from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

from sqlalchemy import Connection, TextClause, text

from outbox.sql.dialect import dialect_of
from outbox.sql.schema.tables import MAX_STATEMENTS

DURABLE = "set_config('synchronous_commit', 'on', true)"
"""A role may switch it off. Then a crash could undo a claim after the send, and the send would have no record."""

LEASE_MIN, MAX_LEASE = timedelta(seconds=4), timedelta(seconds=60)


class Guards(NamedTuple):
    """The limits of one transaction; None for no limit of ours. A stricter limit of the session is kept.

    lock_wait: how long a statement may wait for a lock that another transaction holds. statement: how long a statement may
    take; the first one, which sets this, is not limited. silence: how long the server waits for the next statement before it
    ends the transaction and frees its locks, because the process was stopped or its host is gone.
    replan: plan each later statement for the present tables, without bitmap scans. A plan from the time when a table was empty
    reads the whole table after it has grown. With a bitmap scan the planner reads and sorts all due rows for each claim, if it
    expects fewer due rows than are wanted, as for a destination with about ten thousand.
    keep: keep the plan of each later statement, without bitmap scans and without scans of whole tables. It is for statements
    that read each table by one index only, whatever the tables hold. Without JIT, because up to PostgreSQL 17 the only row of a
    table without a fitting index costs so much that the server would compile the plan.
    """

    lock_wait: timedelta | None = None
    statement: timedelta | None = None
    silence: timedelta | None = None
    replan: bool = False
    keep: bool = False

    @property
    def sql(self) -> str:
        """Expressions for a SELECT's list."""
        limits = {
            "lock_timeout": self.lock_wait,
            "statement_timeout": self.statement,
            "idle_in_transaction_session_timeout": self.silence,
        }
        settings = _KEPT if self.keep else _PLANNED_ANEW if self.replan else {}
        plans = [f"set_config('{name}', '{value}', true)" for name, value in settings.items()]
        return ", ".join(
            [DURABLE, *plans, *(_limited(name, limit) for name, limit in limits.items() if limit is not None)]
        )


_PLANNED_ANEW = {"plan_cache_mode": "force_custom_plan", "enable_bitmapscan": "off"}
_KEPT = {"plan_cache_mode": "force_generic_plan", "enable_bitmapscan": "off", "enable_seqscan": "off", "jit": "off"}


def _limited(setting: str, limit: timedelta) -> str:
    milliseconds = max(1, limit // timedelta(milliseconds=1))
    own = f"NULLIF(EXTRACT(epoch FROM CAST(current_setting('{setting}') AS interval)), 0) * 1000"  # LEAST ignores NULL
    return f"set_config('{setting}', CAST(CAST(LEAST({own}, {milliseconds}) AS integer) AS text), true)"


def limiting(lease: timedelta) -> timedelta:
    """The lease from which the limits are calculated, between a minimum and a maximum.

    Longer limits are useless, because no statement of a dispatcher takes so long. A busy machine would exceed shorter ones.
    """
    return min(max(lease, LEASE_MIN), MAX_LEASE)


def guards_for(lease: timedelta) -> Guards:
    """The limits of a dispatcher with such leases: no transaction may take longer than a lease."""
    lease = limiting(lease)
    return Guards(lock_wait=lease / 12, statement=lease * 0.3, silence=lease, replan=True)


GUARDS = guards_for(timedelta(seconds=60))
"""The limit for the default lease, and for callers without a lease."""


def guard(connection: Connection, guards: Guards = GUARDS) -> None:
    """Set the limits of this transaction, and make its commit durable."""
    if dialect_of(connection).has_limits:
        connection.execute(guarding(guards))


def limit_portable(connection: Connection, guards: Guards) -> None:
    """Set the limits of a transaction of the portable mode: without them a stopped process would block the others."""
    connection.execute(_limiting_portable(guards))


@lru_cache(MAX_STATEMENTS)
def _limiting_portable(guards: Guards) -> TextClause:
    limits = {"lock_timeout": guards.lock_wait, "idle_in_transaction_session_timeout": guards.silence}
    limited = (
        f"set_config('{name}', '{limit // timedelta(milliseconds=1)}ms', true)"
        for name, limit in limits.items()
        if limit
    )
    return text(f"SELECT {', '.join(limited)}")


@lru_cache(MAX_STATEMENTS)
def guarding(guards: Guards) -> TextClause:
    return text(f"SELECT {guards.sql}")
