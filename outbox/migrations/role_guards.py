"""Triggers that keep what a role may change or delete: the entries that wait, every id, and the audit log. PostgreSQL only.

None of them fires for a dispatcher's statement on an entry or the queue: what it sends costs nothing more. The owner, who
restores a backup, may do everything.
"""

from collections.abc import Iterator

from outbox.sql.schema.identifiers import literal, quoted

AUDIT_KEPT_DAYS = 400
"""How long maintenance keeps decisions."""

_IS_OWNER = "pg_has_role(current_user, (SELECT c.relowner FROM pg_class AS c WHERE c.oid = TG_RELID), 'USAGE')"


def guard_entries(schema: str | None, prefix: str, *, dispatcher: str) -> Iterator[str]:
    """An entry that waits in the queue is not deleted: its effect would vanish without a settlement.

    Each deleted entry is looked up in the queue once, by its primary key. A dispatcher's own maintenance passes: the condition
    is asked once for a statement.
    """
    entry, queue = (quoted(f"{prefix}{name}", schema) for name in ("entry", "queue"))
    guard = quoted(f"{prefix}guard_entries", schema)
    yield _function(
        guard,
        f"""    IF EXISTS (SELECT FROM deleted AS d, %1$s AS q WHERE q.id = d.id) AND NOT {_IS_OWNER} THEN
        RAISE insufficient_privilege USING
            MESSAGE = 'an entry that waits in the queue of the outbox is not deleted: `outbox cancel` ends it';
    END IF;
    RETURN NULL;""",
        queue,
    )
    yield f"""CREATE OR REPLACE TRIGGER {quoted(f"{prefix}guard_entries")} AFTER DELETE ON {entry}
    REFERENCING OLD TABLE AS deleted FOR EACH STATEMENT
    WHEN (NOT pg_has_role(current_user, {literal(dispatcher)}, 'USAGE')) EXECUTE FUNCTION {guard}()"""


def guard_ids(schema: str | None, prefix: str) -> Iterator[str]:
    """No id changes. FOR UPDATE asks for the right to update a column, and that is the id: with it a settlement could be moved to
    an entry that is in doubt, and an entry that waits to another id, under which it may be deleted.

    It fires only for a statement that sets an id, which none of the outbox does.
    """
    guard = quoted(f"{prefix}guard_ids", schema)
    yield _function(
        guard,
        f"""    IF NOT {_IS_OWNER} THEN
        RAISE insufficient_privilege USING MESSAGE = 'an id in the tables of the outbox does not change';
    END IF;
    RETURN NULL;""",
    )
    for name in ("entry", "settlement", "proposal", "record"):
        yield f"""CREATE OR REPLACE TRIGGER {quoted(f"{prefix}guard_ids")} BEFORE UPDATE OF id
    ON {quoted(f"{prefix}{name}", schema)} FOR EACH STATEMENT EXECUTE FUNCTION {guard}()"""


def guard_audit(schema: str | None, prefix: str) -> Iterator[str]:
    """A decision gets the server's clock and the login that has recorded it. Later its count may grow, for the same login, while
    a decision in bulk continues. It is deleted once it is old.
    """
    audit, guard = quoted(f"{prefix}audit", schema), quoted(f"{prefix}guard_audit", schema)
    yield _function(
        guard,
        f"""    IF {_IS_OWNER} THEN
        IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
        RETURN NEW;
    END IF;
    IF TG_OP = 'INSERT' THEN
        NEW.at := clock_timestamp();
        NEW.login := session_user;
        RETURN NEW;
    ELSIF TG_OP = 'UPDATE' THEN
        IF NEW.id = OLD.id AND NEW.count >= OLD.count AND OLD.login = session_user THEN RETURN NEW; END IF;
        RAISE insufficient_privilege USING
            MESSAGE = 'a decision in the audit log of the outbox does not change; only its own login may raise its count';
    ELSIF OLD.at < clock_timestamp() - INTERVAL '{AUDIT_KEPT_DAYS} days' THEN
        RETURN OLD;
    END IF;
    RAISE insufficient_privilege USING
        MESSAGE = 'a decision stays in the audit log of the outbox for {AUDIT_KEPT_DAYS} days';""",
    )
    yield f"""CREATE OR REPLACE TRIGGER {quoted(f"{prefix}guard_audit")} BEFORE INSERT OR UPDATE OR DELETE ON {audit}
    FOR EACH ROW EXECUTE FUNCTION {guard}()"""


def _function(name: str, body: str, *tables: str) -> str:
    """A function with its own search path, so that the caller's path cannot replace its functions and operators.

    tables: what `body` names as `%1$s`, ...
    """
    named = "".join(f", {in_full(table)}" for table in tables)
    return f"""DO $outbox$ BEGIN EXECUTE format($make$
CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $guard$
BEGIN
{body}
END
$guard$$make${named});
END $outbox$"""


def in_full(table: str) -> str:
    """An expression for the table's name with its schema, as the search path finds it now."""
    return (
        "(SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) FROM pg_class AS c"
        f" JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = {literal(table)}::regclass)"
    )
