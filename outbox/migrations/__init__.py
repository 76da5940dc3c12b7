"""Bring a database to the shape that this release needs: upgrade, check, print the SQL.

    outbox.migrations.upgrade("postgresql+psycopg://app@db/shop")     # `outbox db upgrade`
    outbox.migrations.check(engine)                                   # `outbox db check`, and at a process's start

Every run is one transaction: whole or not at all. Runs at the same time wait for one another, and the later ones find
nothing to do. `schema` and `prefix` are the `Outbox`'s; each pair is a set of tables of its own with its own version table.

A `target` is a URL, a sync Engine, or an AsyncEngine, whose URL is opened with a sync driver: its connect_args do not
follow. Or it is a Connection, and then the transaction is the caller's, to commit or to roll back: inside the app's own
Alembic migration (`upgrade(op.get_bind())`), or from asyncio (`await connection.run_sync(upgrade)`).

For the app's own Alembic: `metadata()` puts the outbox's tables into its `target_metadata`, `include_name()` keeps them out
of its comparison. `roles()` prints the rights of the database's roles. `partition()`
and `unpartition()` switch the layout at scale on and off (docs/retention.md). docs/migrations.md shows each way.

`upgrade`, `downgrade`, `sql` and `metadata` need the extra `sqlalchemy-outbox[migrations]`; the others SQLAlchemy alone.
"""

from outbox.migrations.environment import include_name, metadata
from outbox.migrations.inspection import check, current
from outbox.migrations.partitioning import check_partitions, partition, unpartition
from outbox.migrations.roles import roles
from outbox.migrations.runs import downgrade, sql, upgrade
from outbox.migrations.scripts import head
from outbox.migrations.targets import Target

__all__ = [
    "Target",
    "check",
    "check_partitions",
    "current",
    "downgrade",
    "head",
    "include_name",
    "metadata",
    "partition",
    "roles",
    "sql",
    "unpartition",
    "upgrade",
]
