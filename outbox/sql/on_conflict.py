"""The INSERT ... ON CONFLICT of PostgreSQL, of the databases that take its SQL, and of SQLite."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table

from outbox.sql.dialect import Dialect, changes


class OnConflict(Dialect):
    """The dialect of a database whose INSERT takes ON CONFLICT."""

    @abstractmethod
    def insert(self, table: Table) -> Any:
        """The database's own INSERT of SQLAlchemy."""

    def insert_unless_present(self, table: Table) -> Any:
        return self.insert(table).on_conflict_do_nothing(index_elements=list(table.primary_key))

    def upsert(
        self,
        connection: Connection,
        table: Table,
        rows: Sequence[Mapping[str, Any]],
        *,
        added: Collection[str] = (),
        kept: Collection[str] = (),
    ) -> None:
        inserting = self.insert(table).values(rows)
        changed = changes(table, inserting.excluded, rows[0], added=added, kept=kept)
        connection.execute(inserting.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed))
