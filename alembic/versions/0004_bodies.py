"""Room for the layout at scale: in which day's partition a response's body stands, and PostgreSQL's function that reads it there.

Frozen: it says what this revision made, whatever `outbox/schema.py` says today. What it means is said there.

Nothing is rewritten and no layout is changed: `outbox db partition` does that. On PostgreSQL the column takes the records for
itself for a moment; then the index keeps requests that store an answer waiting while it is built, empty: about 0.1 s per
million rows.
"""

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade(op: Operations, schema: str | None, prefix: str) -> None:
    op.add_column(f"{prefix}record", sa.Column("body_day", sa.Date()), schema=schema)
    elsewhere = sa.text("body_day IS NOT NULL")
    op.create_index(
        f"{prefix}record_body",
        f"{prefix}record",
        ["body_day", "keep_until"],
        schema=schema,
        postgresql_where=elsewhere,
        sqlite_where=elsewhere,
    )
    if op.get_context().dialect.name == "postgresql":
        body, body_of = (_quoted(op, schema, prefix, name) for name in ("body", "body_of"))
        op.execute(f"""
CREATE FUNCTION {body_of}(record_id uuid, on_day date) RETURNS bytea LANGUAGE plpgsql STABLE
AS $read$
DECLARE
    found bytea;
BEGIN
    EXECUTE $one$SELECT body FROM {body} WHERE id = $1 AND day = $2$one$ INTO found USING record_id, on_day;
    RETURN found;
END
$read$""")


def downgrade(op: Operations, schema: str | None, prefix: str) -> None:
    """Bodies that stand in partitions come back into their records: a rewrite of these, in one statement."""
    if op.get_context().dialect.name == "postgresql":
        record, body, body_of, move, add = (
            _quoted(op, schema, prefix, name) for name in ("record", "body", "body_of", "move_body", "add_body_days")
        )
        name = body.replace("'", "''")
        op.execute(f"""
DO $outbox$ BEGIN
    IF to_regclass('{name}') IS NOT NULL THEN
        DROP FUNCTION {move}() CASCADE;
        DROP FUNCTION {add}();
        UPDATE {record} AS r SET body = b.body FROM {body} AS b WHERE b.id = r.id AND b.day = r.body_day;
        DROP TABLE {body};
    END IF;
END $outbox$""")
        op.execute(f"DROP FUNCTION {body_of}(uuid, date)")
    op.drop_index(f"{prefix}record_body", f"{prefix}record", schema=schema)
    op.drop_column(f"{prefix}record", "body_day", schema=schema)


def _quoted(op: Operations, schema: str | None, prefix: str, name: str) -> str:
    table = sa.Table(prefix + name, sa.MetaData(), schema=schema)
    return op.get_context().dialect.identifier_preparer.format_table(table)
