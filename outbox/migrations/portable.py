"""Alembic's support for the portable mode."""

from alembic.ddl.postgresql import PostgresqlImpl


class PortableImpl(PostgresqlImpl):
    """PostgreSQL's, for the dialects of `outbox.sql.postgresql.portable`."""

    __dialect__ = "portable"
