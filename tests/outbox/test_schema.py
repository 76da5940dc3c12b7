"""The definitions of the tables."""

from support.database import TABLES

from outbox.sql.schema.tables import key_lock


def test_the_table_of_locks_stays_the_same_while_another_thread_uses_it() -> None:
    """A column that is replaced is missing for a moment, in which a statement of another thread failed."""
    column = key_lock(TABLES).c.id

    assert key_lock(TABLES).c.id is column
