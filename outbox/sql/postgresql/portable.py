"""The dialects of the portable mode: PostgreSQL's, at SERIALIZABLE, without SKIP LOCKED, and under a name of their own.

`portable+psycopg://user@host/shop` in an engine's URL chooses the mode. The outbox's own dialect, `portable_dialect`, then takes
the plain statements, as on SQLite. Where they would skip rows that are locked, they lock nothing: the server lets one of two
transactions commit, and ends the other with SQLSTATE 40001.
"""

from contextlib import suppress
from typing import Any, cast

from sqlalchemy.dialects.postgresql.asyncpg import PGCompiler_asyncpg, PGDialect_asyncpg
from sqlalchemy.dialects.postgresql.psycopg import PGCompiler_psycopg, PGDialect_psycopg, PGDialectAsync_psycopg

NAME = "portable"
LEVEL = "SERIALIZABLE"


class _WithoutSkipLocked:
    def for_update_clause(self, select: Any, **kw: Any) -> str:
        clause = cast("str", super().for_update_clause(select, **kw))  # type: ignore[misc]
        return "" if clause.endswith("SKIP LOCKED") else clause


class _PsycopgCompiler(_WithoutSkipLocked, PGCompiler_psycopg): ...


class _AsyncpgCompiler(_WithoutSkipLocked, PGCompiler_asyncpg): ...


class _Portable:
    name = NAME

    def __init__(self, isolation_level: Any = None, **settings: Any) -> None:
        super().__init__(isolation_level=isolation_level or LEVEL, use_native_hstore=False, **settings)  # type: ignore[call-arg]

    def _get_server_version_info(self, connection: Any) -> tuple[int, ...]:
        """The PostgreSQL whose SQL is written. What the server calls itself is read by `outbox.sql.connections.servers`."""
        return (14, 0)


class PortablePsycopg(_Portable, PGDialect_psycopg):
    """`portable+psycopg`, for an engine and for an async one."""

    statement_compiler = _PsycopgCompiler
    supports_statement_cache = True

    @classmethod
    def get_async_dialect_cls(cls, url: Any) -> Any:
        return PortableAsyncPsycopg


class PortableAsyncPsycopg(_Portable, PGDialectAsync_psycopg):
    """`portable+psycopg` in `create_async_engine()`, or `portable+psycopg_async`."""

    statement_compiler = _PsycopgCompiler
    supports_statement_cache = True


class PortableAsyncpg(_Portable, PGDialect_asyncpg):
    """`portable+asyncpg`."""

    statement_compiler = _AsyncpgCompiler
    supports_statement_cache = True

    async def setup_asyncpg_json_codec(self, conn: Any) -> None:
        with suppress(ValueError):  # CockroachDB has the type `jsonb` only, so asyncpg finds no `json`
            await super().setup_asyncpg_json_codec(conn)  # type: ignore[no-untyped-call]  # untyped in SQLAlchemy
