"""Create and upgrade the outbox's tables, check them, and print the SQL.

    outbox.migrations.upgrade("postgresql+psycopg://app@db/shop")     # `outbox db upgrade`
    outbox.migrations.check(engine)                                   # `outbox db check`, and at a process's start

Every run is one transaction. Concurrent runs wait for each other, and the later ones find nothing to do. `schema` and
`prefix` are those of the `Outbox`. Each pair has its own tables and its own version table.

A `target` is a URL, an Engine, an AsyncEngine or a Connection. An AsyncEngine's URL is opened with a sync driver, without the
engine's connect_args. With a Connection the caller commits or rolls back: inside the app's own Alembic migration
(`upgrade(op.get_bind())`), or from asyncio (`await connection.run_sync(upgrade)`).

For the app's own Alembic: `metadata()` adds the outbox's tables to its `target_metadata`, and `include_name()` excludes them
from its comparison. `roles()` prints the SQL of the database's roles. `partition()` and `unpartition()` switch daily
partitions of response bodies on and off (docs/operations.md). docs/migrations.md shows each way.

`upgrade`, `downgrade`, `sql` and `metadata` need the extra `sqlalchemy-outbox[migrations]`. The others need only SQLAlchemy.
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
