"""An outbox with many rows of every kind, and what was read of its tables: how many rows, and by which kind of scan.

PostgreSQL counts what is read itself, so what functions and kept plans read is counted as well, which no EXPLAIN shows.
"""

from typing import NamedTuple

import sqlalchemy as sa

from support.daemons import wait_for
from support.database import Database

LARGE = ("entry", "queue", "settlement", "event", "record", "tombstone")
DUE = ("a", "b", "c", "d")
"""Destinations with entries that are due. Others are "shared", whose entries are due too, of many scopes, and "ordered"."""

# Of ten rows of a life four are due, one each is of a scope, of a group and uncertain, and three have ended, 0 to 60 days ago.
# Every other one belongs to a request of its own.
_ROWS = f"""
    SELECT n, md5('e' || :life || n)::uuid AS id, md5('r' || :life || n)::uuid AS parent_id,
        (ARRAY['{"', '".join(DUE)}', 'shared', 'ordered', 'uncertain', 'a', 'b', 'c'])[n % 10 + 1] AS destination,
        n % 10 BETWEEN 7 AND 9 AS ended, (:rows - n) * interval '60 days' / :rows AS age
    FROM generate_series(1, :rows) AS n
"""
_FILL = [
    """
    INSERT INTO outbox_entry (id, env, scope, source, parent, operation, discriminator, kid, tag, parent_id, record_id,
        destination, payload, options, headers, schema_version, due_at, created_at, ordering_key)
    SELECT id, 'test', 'scope ' || n % 500, 'http', 'order:' || n, destination || '.upsert', '', 'k1', sha256(n::text::bytea),
        parent_id, CASE WHEN n % 2 = 0 THEN parent_id END, destination, '{{"amount": 2000, "currency": "eur"}}', '{{}}', '{{}}',
        1, now(), now(), CASE destination WHEN 'ordered' THEN 'group ' || n % 50 END
    FROM ({rows}) AS r
    """,
    """
    INSERT INTO outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, key_epoch, outcome,
        ordering_key, position, fair, scope)
    SELECT id, destination, CASE WHEN {state} THEN 'uncertain' ELSE 'pending' END,
        CASE WHEN {state} OR destination = 'ordered' THEN '9999-12-31Z' ELSE now() - n * interval '1 ms' END,
        0, 0, {state}, 0, CASE WHEN {state} THEN '{{"reason": "lost"}}' END,
        CASE destination WHEN 'ordered' THEN 'group ' || n % 50 END,
        CASE destination WHEN 'ordered' THEN nextval('outbox_position') END,
        CASE destination WHEN 'shared' THEN destination END, CASE destination WHEN 'shared' THEN 'scope ' || n % 500 END
    FROM ({rows}) AS r WHERE NOT ended
    """,
    """
    INSERT INTO outbox_settlement (id, state, deliveries, attempts, key_epoch, settled_at)
    SELECT id, 'delivered', 1, 1, 0, now() - age FROM ({rows}) AS r WHERE ended
    """,
    "INSERT INTO outbox_event (entry_id, at, kind) SELECT id, now(), 'attempt' FROM ({rows}) AS r",
    """
    INSERT INTO outbox_record (id, env, scope, source, parent, kid, state, fingerprint, fingerprint_version, status, body,
        headers, created_at, answered_at, replay_until, keep_until)
    SELECT parent_id, 'test', '', 'http', 'order:' || n, 'k1', 'succeeded', sha256('r'), 1, 201, '', '{{}}',
        now(), now(), now(), now() + interval '30 days' - age
    FROM ({rows}) AS r WHERE n % 2 = 0
    """,
    """
    INSERT INTO outbox_tombstone (id, env, scope, source, fingerprint, fingerprint_version, forget_at)
    SELECT md5('t' || :life || n)::uuid, 'test', '', 'http', sha256('t'), 1, now() + interval '10 days' - age
    FROM ({rows}) AS r
    """,
]


def fill(database: Database, rows: int, *, uncertain: bool = False) -> None:
    """uncertain: all of what has not ended."""
    state = "true" if uncertain else "destination = 'uncertain'"
    for statement in _FILL:
        database.execute(sa.text(statement.format(rows=_ROWS, state=state)).bindparams(rows=rows, life=str(rows)))


def on_each(database: Database, command: str) -> None:
    """Run a command on each large table, outside a transaction. `{}` is the table."""
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for name in LARGE:
            connection.exec_driver_sql(command.format(f"outbox_{name}"))


def believe(database: Database, size: str, *names: str) -> None:
    """Have the planner believe in another size of these tables and their indexes, by default of all, and know nothing else.

    size: what it reads, in `pg_class`. It knows how many pages there are, and takes from here how many rows a page has.
    """
    tables = [f"outbox_{name}" for name in names or LARGE]
    with database.owner() as connection:
        connection.execute(
            sa.text("DELETE FROM pg_statistic WHERE starelid = ANY (CAST(:tables AS regclass[]))"), {"tables": tables}
        )
        indexes = "SELECT indexrelid FROM pg_index WHERE indrelid = ANY (CAST(:tables AS regclass[]))"
        of_these = f"oid = ANY (CAST(:tables AS regclass[])) OR oid IN ({indexes})"
        connection.execute(sa.text(f"UPDATE pg_class SET {size} WHERE {of_these}"), {"tables": tables})


class Reads(NamedTuple):
    """scanned: tables that were read from end to end. rows: how many of each table were read by an index."""

    scanned: list[str]
    rows: dict[str, int]


_COUNTS = sa.text(
    "SELECT t.relname, t.seq_scan, sum(i.idx_tup_read) FROM pg_stat_user_tables AS t JOIN pg_stat_user_indexes AS i USING (relid)"
    " WHERE t.relname = ANY (:tables) GROUP BY t.relid, t.relname, t.seq_scan"
)


_END_OTHERS = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> ALL (:ours)"
)


class ReadCounter:
    """What is read of the large tables over `engine`, which has one connection.

    PostgreSQL counts for the database, and a backend reports what it has read up to ten seconds later, or when it ends: so all
    other backends must have ended first, those of the test before this one, too.
    """

    def __init__(self, database: Database, engine: sa.Engine) -> None:
        self._engines = (database.engine, engine)  # of the first one too: what it read before must not be counted late
        wait_for(lambda: not self._end_others(), "the end of the other backends")
        self._last = self._counts()

    def _end_others(self) -> int:
        """Returns how many there were."""
        with self._engines[0].connect() as asking, self._engines[1].connect() as counted:
            ours = [connection.scalar(sa.text("SELECT pg_backend_pid()")) for connection in (asking, counted)]
            return len(asking.execute(_END_OTHERS, {"ours": ours}).all())

    def since_last(self) -> Reads:
        last, self._last = self._last, self._counts()
        scanned = [name for name, (scans, _) in self._last.items() if scans > last[name][0]]
        rows = {name: rows - last[name][1] for name, (_, rows) in self._last.items() if rows > last[name][1]}
        return Reads(scanned, rows)

    def _counts(self) -> dict[str, tuple[int, int]]:
        for engine in self._engines:
            with engine.begin() as connection:
                connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
        with self._engines[0].begin() as connection:
            found = connection.execute(_COUNTS, {"tables": [f"outbox_{name}" for name in LARGE]})
            return {name.removeprefix("outbox_"): (scans, int(rows)) for name, scans, rows in found}
