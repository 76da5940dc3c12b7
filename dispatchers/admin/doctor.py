"""`outbox doctor`: reads what `doctor_rules` judge, each check in a read-only transaction with a time limit of its own.

It changes nothing. What this role may not read, or what takes too long, is reported as not checked.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial

from sqlalchemy import Connection, select, text
from sqlalchemy.exc import DBAPIError

from dispatchers.admin import doctor_rules as rules
from dispatchers.admin.dispatchers import is_served, live
from dispatchers.admin.doctor_rules import Finding, Holder, TableHealth
from dispatchers.admin.overview import read_unregistered, read_unserved
from dispatchers.store import callback_registry
from dispatchers.store.guards import Guards
from dispatchers.store.heartbeats import DispatcherSeen, read_dispatchers
from dispatchers.store.outage_log import cause_of, is_outage
from dispatchers.store.protocol import Run
from dispatchers.store.queries import read_lags
from outbox import migrations
from outbox.errors import ConfigurationError, SchemaError
from outbox.keys import Keyring
from outbox.sql import deployment
from outbox.sql.body_partitions import read_layout
from outbox.sql.dialect import clock, sqlstate
from outbox.sql.identifiers import quoted_table
from outbox.sql.schema import Tables
from outbox.sql.separate_connections import backend_pid

CHECK_LIMITS = Guards(lock_wait=timedelta(seconds=1), statement=timedelta(seconds=5), silence=timedelta(seconds=30))

REASONS = {
    "42501": "this role may not read it",
    "55P03": "another transaction has locked a table",
    "57014": "a statement took too long",
}
"""PostgreSQL, appendix A: insufficient_privilege, lock_not_available, query_canceled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the caller knows. env, keyring: None where they are not set. own: the dispatcher that asks, if one does.

    missing: packages that are not installed, each with its extra.
    """

    tables: Tables
    prefix: str
    env: str | None = None
    keyring: Keyring | None = None
    own: DispatcherSeen | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """A check that could not be made, and why."""

    check: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The findings, errors first, and what could not be checked. checked: the names of the checks that were made."""

    findings: list[Finding]
    checked: list[str]
    unchecked: list[Unchecked]

    @property
    def is_healthy(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return all(finding.severity == "notice" for finding in self.findings)


class NotChecked(Exception):
    """A check cannot be made here."""


Check = Callable[[Connection, Context], Iterable[Finding]]


async def diagnose(run: Run, context: Context) -> Diagnosis:
    """Make every check. Raises what an unavailable database raises."""
    findings: list[Finding] = []
    checked: list[str] = []
    unchecked: list[Unchecked] = []
    for name, check in CHECKS.items():
        try:
            findings += await run(partial(_limited, check, context))
        except NotChecked as why:
            unchecked.append(Unchecked(check=name, reason=str(why)))
        except SchemaError:
            unchecked.append(Unchecked(check=name, reason="a table is missing: see the finding of `schema`"))
        except DBAPIError as error:
            if is_outage(error):
                raise
            reason = REASONS.get(sqlstate(getattr(error, "orig", None)) or "") or cause_of(error)
            unchecked.append(Unchecked(check=name, reason=reason))
        else:
            checked.append(name)
    findings.sort(key=lambda finding: ("error", "warning", "notice").index(finding.severity))
    return Diagnosis(findings=findings, checked=checked, unchecked=unchecked)


def _limited(check: Check, context: Context, connection: Connection) -> list[Finding]:
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT set_config('transaction_read_only', 'on', true), {CHECK_LIMITS.sql}"))
    return list(check(connection, context))


def _now(connection: Connection) -> datetime:
    now: datetime = connection.execute(select(clock())).scalar_one()
    return now


def _is_postgresql(connection: Connection) -> bool:
    return connection.dialect.name == "postgresql"


# --- what a process refuses at its start


def _schema(connection: Connection, context: Context) -> Iterable[Finding]:
    try:
        migrations.check(connection, schema=context.tables.queue.schema, prefix=context.prefix)
    except SchemaError as error:
        yield rules.refused("schema", str(error))


def _environment(connection: Connection, context: Context) -> Iterable[Finding]:
    if context.env is None:
        raise NotChecked("OUTBOX_ENV is not set here")
    try:
        deployment.require_environment(connection, context.tables, context.env)
    except ConfigurationError as error:
        yield rules.refused("environment", str(error))


def _secrets(connection: Connection, context: Context) -> Iterable[Finding]:
    try:
        deployment.require_secrets(connection, context.tables, _keyring(context))
    except ConfigurationError as error:
        yield rules.refused("secrets", str(error))


def _key_ids(connection: Connection, context: Context) -> Iterable[Finding]:
    keyring = _keyring(context)
    kid = deployment.unknown_kid(connection, context.tables, keyring.kids)
    if kid is not None:
        found = f"unsettled entries were enqueued under kid {kid!r}, which is not in the key ring {keyring.kids}"
        yield rules.refused("key ids", found)


def _keyring(context: Context) -> Keyring:
    if context.keyring is None:
        raise NotChecked("OUTBOX_SECRET is not set here")
    return context.keyring


def _suspended(connection: Connection, context: Context) -> Iterable[Finding]:
    yield from rules.suspended(connection.execute(select(context.tables.meta.c.suspended_reason)).scalar_one_or_none())


# --- who runs


def _dispatchers(connection: Connection, context: Context) -> list[DispatcherSeen]:
    found = read_dispatchers(connection, context.tables, _now(connection))
    return found if context.own is None else [*found, context.own]


def _running(connection: Connection, context: Context) -> Iterable[Finding]:
    lags = read_lags(connection, context.tables, _now(connection))
    yield from rules.running(_dispatchers(connection, context), max(lags.values(), default=timedelta(0)))


def _alike(connection: Connection, context: Context) -> Iterable[Finding]:
    yield from rules.alike(_dispatchers(connection, context))


def _settings(connection: Connection, context: Context) -> Iterable[Finding]:
    dispatchers = _dispatchers(connection, context)
    yield from rules.settings(dispatchers)
    yield from rules.retention(dispatchers)


def _registered(connection: Connection, context: Context) -> Iterable[Finding]:
    now = _now(connection)
    dispatchers, lags = _dispatchers(connection, context), read_lags(connection, context.tables, now)
    yield from rules.unregistered(read_unregistered(connection, context.tables, now, dispatchers, lags))


def _served(connection: Connection, context: Context) -> Iterable[Finding]:
    found = read_unserved(connection, context.tables, _now(connection))
    if found is None:
        raise NotChecked("this role may not read why entries wait")
    # What no live dispatcher has registered is the finding of another check.
    dispatchers = _dispatchers(connection, context)
    yield from rules.unserved(
        [each for each in found if not live(dispatchers) or is_served(each.operation, dispatchers)]
    )


def _callbacks(connection: Connection, context: Context) -> Iterable[Finding]:
    on_record = callback_registry.list_all(connection, context.tables)
    yield from rules.callbacks(on_record, _dispatchers(connection, context))


# --- the server


def _horizon(connection: Connection, context: Context) -> Iterable[Finding]:
    if not _is_postgresql(connection):
        return
    if not connection.execute(text("SELECT pg_has_role('pg_read_all_stats', 'USAGE')")).scalar_one():
        raise NotChecked("this role sees its own sessions only: GRANT pg_read_all_stats TO it")
    rows = connection.execute(_HOLDERS)
    yield from rules.horizon([Holder(row.what, row.held) for row in rows])


def _vacuum(connection: Connection, context: Context) -> Iterable[Finding]:
    if _is_postgresql(connection):
        tables = context.tables
        hot = [quoted_table(table) for table in (tables.queue, tables.entry, tables.settlement, tables.record)]
        rows = connection.execute(_HEALTH, {"tables": hot})
        yield from rules.vacuum([TableHealth(*row) for row in rows])


def _pooler(connection: Connection, context: Context) -> Iterable[Finding]:
    if _is_postgresql(connection):
        driver = connection.connection.driver_connection
        known, asked = backend_pid(driver), connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        # The command's own connection is used once: only a dispatcher's prepares what the next transaction may not find.
        prepares = context.own is not None and getattr(driver, "prepare_threshold", None) is not None
        yield from rules.pooler(is_between=known not in (None, asked), prepares=prepares)


def _clock(connection: Connection, context: Context) -> Iterable[Finding]:
    before = datetime.now(UTC)
    now = _now(connection)
    after = datetime.now(UTC)
    yield from rules.clock(now - after if now > after else min(now - before, timedelta(0)))


def _partitions(connection: Connection, context: Context) -> Iterable[Finding]:
    yield from rules.partitions(read_layout(connection, context.tables))


def _extras(connection: Connection, context: Context) -> Iterable[Finding]:
    yield from rules.extras(context.missing)


CHECKS: Mapping[str, Check] = {
    "schema": _schema,
    "environment": _environment,
    "secrets": _secrets,
    "key ids": _key_ids,
    "suspended": _suspended,
    "running": _running,
    "alike": _alike,
    "settings": _settings,
    "registered": _registered,
    "served": _served,
    "callbacks": _callbacks,
    "horizon": _horizon,
    "vacuum": _vacuum,
    "pooler": _pooler,
    "clock": _clock,
    "partitions": _partitions,
    "extras": _extras,
}
"""Every check, by the name under which it is reported."""

_HOLDERS = text("""
SELECT format('the %s session %s of %s', state, pid, usename) AS what, clock_timestamp() - xact_start AS held
FROM pg_stat_activity
WHERE backend_xmin IS NOT NULL AND xact_start IS NOT NULL AND pid <> pg_backend_pid() AND datname = current_database()
UNION ALL
SELECT format('the prepared transaction %s of %s', quote_literal(gid), owner), clock_timestamp() - prepared
FROM pg_prepared_xacts WHERE database = current_database()
UNION ALL
SELECT format('the replication slot %s, which nothing reads,', slot_name), NULL
FROM pg_replication_slots WHERE NOT active AND (xmin IS NOT NULL OR catalog_xmin IS NOT NULL)
""")

_HEALTH = text("""
SELECT c.relname AS name, s.n_live_tup AS alive, s.n_dead_tup AS dead,
    current_setting('autovacuum') = 'on' AND current_setting('track_counts') = 'on'
        AND NOT COALESCE('autovacuum_enabled=false' = ANY (c.reloptions), false) AS vacuums
FROM pg_class AS c JOIN pg_stat_all_tables AS s ON s.relid = c.oid
WHERE c.oid = ANY (CAST(CAST(:tables AS text[]) AS regclass[]))
ORDER BY c.relname
""")
