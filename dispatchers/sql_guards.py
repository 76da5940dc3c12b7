"""What a dispatcher's transactions say to PostgreSQL, whatever the role's and the session's own settings."""

from sqlalchemy import Connection, text

DURABLE = "set_config('synchronous_commit', 'on', true)"
"""For this transaction: a role may have it off, and a claim that a crash takes back would be a send that nobody remembers."""

SILENT_SECONDS_MAX = 60
BRIEF = (
    "set_config('idle_in_transaction_session_timeout',"
    f" COALESCE(NULLIF(current_setting('idle_in_transaction_session_timeout'), '0'), '{SILENT_SECONDS_MAX}s'), true)"
)
"""For this transaction: a process that is stopped in the middle of it does not keep its locks until it goes on. Not where a
user's callback runs in it, which may take its time."""

_GUARD = text(f"SELECT {DURABLE}, {BRIEF}")


def guard(connection: Connection) -> None:
    """Both, for this transaction: a mark that was seen must not be lost in a crash, or that would look like a restore."""
    if connection.dialect.name == "postgresql":
        connection.execute(_GUARD)
