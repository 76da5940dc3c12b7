"""The statements of `claims_rows` for MySQL: those for MariaDB, but there is no compound statement to end a batch."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from dispatchers.store.queue.rows_mariadb import ENDS_ALONE, Names, allowed, lease, literals, lock_due, parts, run
from dispatchers.transitions import ClaimedEntry, Settle
from outbox.sql.mariadb.entry import run_counted
from outbox.sql.schema.tables import Tables

__all__ = ["ENDS_ALONE", "allowed", "end", "lease", "lock_due"]


def end(
    connection: Connection,
    tables: Tables,
    ended: Sequence[tuple[ClaimedEntry, Settle]],
    now: datetime,
    callbacks: str | None,
) -> set[UUID]:
    """See `rows_mariadb.end`. If the INSERT leaves some out, another statement finds out which."""
    names = Names.of(connection, tables)
    settled: set[UUID] = set()
    for part in parts(names, ended, callbacks):
        ours = part.ours if callbacks is None else f"{part.unchanged} AND ({part.ours})"
        rows = ", ".join([f"ROW{row}" for row in part.rows])
        insertion = names.insertion.format(outcomes=rows, state=part.state, ours=ours)
        written = run_counted(connection, insertion, (*part.texts, *part.recorded))
        found = part.ids
        if written < len(part.ids):
            ids = literals(id.bytes for id in part.ids)
            inserted = run(connection, f"SELECT id FROM {names.queue} WHERE id IN ({ids}) AND {names.ended}")
            found = [UUID(bytes=row[0]) for row in inserted] if written else []
        if found:
            run(connection, f"{names.deletion} WHERE id IN ({literals(id.bytes for id in found)})")
        settled.update(found)
    return settled
