"""The functions that the outbox has on PostgreSQL: their SQL, their names, and what makes and drops them with the tables."""

from typing import NamedTuple

from outbox.sql.schema.identifiers import quoted
from outbox.times import NEVER


class DatabaseFunction(NamedTuple):
    """One of them, under one schema and prefix.

    name: quoted, as it is called. signature: with the types of its arguments, as it is dropped. create: the statement that makes
    it. closed: whether it is only for those whom `outbox db roles` lets call it. needs: its tables, without the prefix.
    """

    name: str
    signature: str
    create: str
    closed: bool
    needs: frozenset[str]


def database_functions(schema: str | None, prefix: str) -> dict[str, DatabaseFunction]:
    """All of them, by their names without the prefix."""
    made = (
        ("cancel", "uuid, text", _cancel(schema, prefix), True, {"entry", "queue", "settlement", "meta"}),
        ("body_of", "uuid, date", _body_of(schema, prefix), False, {"record"}),
        ("claim_key", "uuid, bigint", _claim_key(schema, prefix), False, {"record", "tombstone"}),
    )
    return {
        short: DatabaseFunction(
            name := function_name(short, schema, prefix), f"{name}({arguments})", create, closed, frozenset(needs)
        )
        for short, arguments, create, closed, needs in made
    }


def function_name(short: str, schema: str | None, prefix: str) -> str:
    """Quoted, as it is called."""
    return quoted(f"{prefix}{short}", schema)


def closing(function: DatabaseFunction) -> str:
    """The statement after which only its owner may call it, and those to whom it is granted."""
    return f"REVOKE ALL ON FUNCTION {function.signature} FROM PUBLIC"


def creation(function: DatabaseFunction) -> tuple[str, ...]:
    """The statements that create it."""
    return (function.create, closing(function)) if function.closed else (function.create,)


def suspended_sql(meta: str) -> str:
    """PostgreSQL's condition, over the quoted name of `meta`, under which the database may have forgotten commits.

    A suspension is stored, or the server is on another timeline than the stored identity's and no dispatcher has noticed yet,
    because a standby was promoted or a backup was recovered. CASE, since a server without a stored timeline may refuse the
    question.
    """
    return (
        f"EXISTS (SELECT FROM {meta} AS m WHERE m.suspended_reason IS NOT NULL OR CASE WHEN m.timeline IS NOT NULL"
        " THEN m.timeline <> substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END)"
    )


def _cancel(schema: str | None, prefix: str) -> str:
    """The function that cancels an entry for the app, or for an operator if no dispatcher serves it: they may not delete rows.

    It deletes only what was never possibly sent, nothing in a database that may have forgotten, nothing that has settled and
    that a restore brought back into the queue, and lets the next of its group
    come (outbox/sql/ordering.py): first it locks the entry, then it reads the group, for which each statement in it has a
    snapshot of its own. BEGIN ATOMIC binds every name when it is made, so that a caller's search_path leads it nowhere else.
    Source: PostgreSQL, "CREATE FUNCTION", "Writing SECURITY DEFINER Functions Safely".
    """
    name = function_name("cancel", schema, prefix)
    entry, queue, settlement = (quoted(f"{prefix}{table}", schema) for table in ("entry", "queue", "settlement"))
    cancellable = (
        "q.id = entry_id AND q.state IN ('pending', 'retry') AND q.lease_token IS NULL AND NOT q.maybe_sent"
        f" AND NOT EXISTS (SELECT FROM {settlement} AS s WHERE s.id = q.id)"
        f" AND NOT {suspended_sql(quoted(f'{prefix}meta', schema))}"
    )
    return f"""
CREATE OR REPLACE FUNCTION {name}(entry_id uuid, why text DEFAULT NULL) RETURNS boolean LANGUAGE sql SECURITY DEFINER
BEGIN ATOMIC
    SELECT q.id FROM {queue} AS q WHERE {cancellable} FOR UPDATE;
    UPDATE {queue} AS q SET due_at = CASE
        WHEN q.due_at = '{NEVER.isoformat()}' AND q.suspended_reason IS NULL THEN GREATEST(e.due_at, now()) ELSE q.due_at END
    FROM {entry} AS e WHERE e.id = q.id AND q.id = (
        SELECT n.id FROM {queue} AS n
        WHERE n.ordering_key = (SELECT q.ordering_key FROM {queue} AS q WHERE {cancellable})
            AND n.position > (SELECT q.position FROM {queue} AS q WHERE {cancellable}) AND n.state IN ('pending', 'retry')
        ORDER BY n.position LIMIT 1 FOR UPDATE
    );
    WITH cancelled AS (
        DELETE FROM {queue} AS q WHERE {cancellable}
        RETURNING q.id, q.deliveries, q.attempts, q.key_epoch
    ), settled AS (
        INSERT INTO {settlement} (id, state, deliveries, attempts, key_epoch, reason, settled_at)
        SELECT c.id, 'cancelled', c.deliveries, c.attempts, c.key_epoch, why, clock_timestamp() FROM cancelled AS c
    )
    SELECT EXISTS (SELECT FROM cancelled);
END""".strip()


def _body_of(schema: str | None, prefix: str) -> str:
    """The function that reads a body in its day's partition: `outbox.sql.schema.body_partitions`.

    It has the rights of who calls it. EXECUTE plans for the day that is asked for: no other day's partition is opened or
    locked, whereas a prepared plan would lock all of them. NULL: the partition is gone.
    """
    name, table = function_name("body_of", schema, prefix), quoted(f"{prefix}body", schema)
    return f"""
CREATE OR REPLACE FUNCTION {name}(record_id uuid, on_day date) RETURNS bytea LANGUAGE plpgsql STABLE
AS $read$
DECLARE
    found bytea;
BEGIN
    EXECUTE $one$SELECT body FROM {table} WHERE id = $1 AND day = $2$one$ INTO found USING record_id, on_day;
    RETURN found;
END
$read$""".strip()


def _claim_key(schema: str | None, prefix: str) -> str:
    """The function by which a request claims its key in one round trip: `outbox.requests.records`.

    It finds the record, and unless that or a tombstone has an answer tries the key's lock and reads it again: each query in it
    has a snapshot of its own, so that under the lock it sees what the lock's last holder has committed. Not where the
    transaction keeps its first snapshot, and then it says so. It has the rights of who calls it.
    """
    claim_key, body_of = (function_name(short, schema, prefix) for short in ("claim_key", "body_of"))
    record, tombstone = (quoted(f"{prefix}{name}", schema) for name in ("record", "tombstone"))
    return f"""
CREATE OR REPLACE FUNCTION {claim_key}(
    wanted uuid, lock_number bigint, OUT status smallint, OUT body bytea, OUT headers text, OUT fingerprint bytea,
    OUT fingerprint_version smallint, OUT expired boolean, OUT buried boolean, OUT lease_until timestamptz,
    OUT asked_at timestamptz, OUT locked boolean, OUT keeps_snapshot boolean
) LANGUAGE plpgsql AS $claim$
BEGIN
    locked := false;
    keeps_snapshot := current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
    LOOP
        SELECT r.status, CASE WHEN r.body_day IS NULL THEN r.body ELSE {body_of}(r.id, r.body_day) END,
            r.headers, r.fingerprint, r.fingerprint_version, NOT (r.state = 'accepted' OR r.replay_until > clock_timestamp()),
            COALESCE(t.forget_at > clock_timestamp(), false), r.lease_until, clock_timestamp()
        INTO status, body, headers, fingerprint, fingerprint_version, expired, buried, lease_until, asked_at
        FROM (SELECT wanted AS id) AS w LEFT JOIN {record} AS r ON r.id = w.id LEFT JOIN {tombstone} AS t ON t.id = w.id;
        EXIT WHEN locked OR buried OR NOT COALESCE(expired, true);
        locked := pg_try_advisory_xact_lock(lock_number);
        EXIT WHEN NOT locked;
    END LOOP;
END
$claim$""".strip()
