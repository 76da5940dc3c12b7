"""Connections to a test's database for the next test that gets it: a new one costs the server 5 ms, and knows no table yet."""

import select
from contextlib import suppress
from typing import Any

import psycopg
import sqlalchemy as sa


class KeptConnections:
    """One connection of each user, as new: `DISCARD ALL` takes from it what the test's session had set or prepared."""

    def __init__(self) -> None:
        self._of_user: dict[str | None, psycopg.Connection[Any]] = {}

    def engine(self, url: sa.URL, **settings: Any) -> sa.Engine:
        """An engine whose first connection is the kept one, if there is one."""

        def connect() -> Any:
            kept = self._of_user.pop(url.username, None)
            if kept is not None:
                if not _is_ended(kept):
                    return kept
                kept.close()
            positional, named = engine.dialect.create_connect_args(url)
            return engine.dialect.connect(*positional, **named)

        engine = sa.create_engine(url, creator=connect, **settings)
        return engine

    def keep_one_of(self, engine: sa.Engine) -> None:
        """Take an idle connection out of the engine's pool, which is disposed of next."""
        user = engine.url.username
        if user in self._of_user or not engine.pool.checkedin():  # type: ignore[attr-defined]
            return
        taken = engine.raw_connection()
        connection = taken.driver_connection
        taken.detach()
        assert isinstance(connection, psycopg.Connection)
        try:
            connection.rollback()
            connection.autocommit = True
            connection.execute("DISCARD ALL")
            connection.execute("SELECT pg_stat_force_next_flush()")  # or it counts this test's reads during the next
            connection.autocommit = False
        except psycopg.Error:
            connection.close()
        else:
            self._of_user[user] = connection

    def pids(self) -> list[int]:
        return [connection.info.backend_pid for connection in self._of_user.values()]

    def close(self) -> None:
        for connection in self._of_user.values():
            with suppress(psycopg.Error):
                connection.close()
        self._of_user.clear()


def _is_ended(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server has ended it meanwhile: it sends nothing else to an idle client."""
    return connection.closed or bool(select.select([connection.fileno()], [], [], 0)[0])
