"""`outbox doctor`: reads the state that `doctor_rules` check, each in a read-only transaction with its own time limit.

It changes nothing. What this role may not read, or what takes too long, is reported as not checked.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import CTE, Connection, Select, func, select, text
from sqlalchemy.exc import DBAPIError

from dispatchers.admin.check import doctor_mariadb
from dispatchers.admin.check import doctor_rules as rules
from dispatchers.admin.check.doctor_rules import Finding
from dispatchers.admin.read.destinations import read_destinations
from dispatchers.admin.read.dispatchers import is_served, live
from dispatchers.admin.read.overview import read_unregistered, read_unserved
from dispatchers.admin.read.schedules import list_schedules
from dispatchers.admin.read.table_health import read_tables
from dispatchers.store.app_code import callback_registry
from dispatchers.store.connections.guards import Guards
from dispatchers.store.connections.outage_log import cause_of, is_outage
from dispatchers.store.protocol import Run
from dispatchers.store.records.heartbeats import DispatcherSeen, read_dispatchers
from dispatchers.store.records.queries import RELEASED_WITHIN, read_lags, rows_of_each, unreadable
from outbox import migrations
from outbox.encryption import UNOPENED, Encryption
from outbox.errors import ConfigurationError, SchemaError
from outbox.keys import Keyring
from outbox.sql import deployment
from outbox.sql.clock import clock
from outbox.sql.connections.separate_connections import backend_pid
from outbox.sql.dialect import dialect_of
from outbox.sql.errors.driver import INSUFFICIENT_PRIVILEGE, sqlstate
from outbox.sql.schema.body_partitions import read_layout
from outbox.sql.schema.tables import Tables

CHECK_LIMITS = Guards(lock_wait=timedelta(seconds=1), statement=timedelta(seconds=5), silence=timedelta(seconds=30))

MAX_COUNTED = 10_000  # entries of one kind

REASONS = {
    INSUFFICIENT_PRIVILEGE: "this role may not read it",
    "55P03": "another transaction has locked a table",
    "57014": "a statement took too long",
}
"""PostgreSQL, appendix A: insufficient_privilege, lock_not_available, query_canceled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the caller knows. env, keyring: None where they are not set. malformed: why OUTBOX_SECRET cannot be
    read. encryption: the data keys. own: the dispatcher that asks, if one does.

    missing: packages that are not installed, each with its extra.
    """

    tables: Tables
    prefix: str
    env: str | None = None
    keyring: Keyring | None = None
    malformed: str | None = None
    encryption: Encryption | None = None
    own: DispatcherSeen | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """A check that could not be made, and why.

    failed: whether a lock, a time limit or an error ended it. Else a setting or a right is missing here, or a table.
    """

    check: str
    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The findings, errors first, and what could not be checked. checked: the names of the checks that were made."""

    findings: list[Finding]
    checked: list[str]
    unchecked: list[Unchecked]

    @property
    def is_healthy(self) -> bool:
        """Whether there is neither an error nor a warning, and no check has failed."""
        is_quiet = all(finding.severity == "notice" for finding in self.findings)
        return is_quiet and not any(each.failed for each in self.unchecked)


class NotChecked(Exception):
    """A check cannot be made here."""


Check = Callable[[Connection, Context], Iterable[Finding]]


async def diagnose(run: Run, context: Context, names: Collection[str] | None = None) -> Diagnosis:
    """Make every check, or those with these names. Raises what an unavailable database raises."""
    findings: list[Finding] = []
    checked: list[str] = []
    unchecked: list[Unchecked] = []
    for name, check in [(name, CHECKS[name]) for name in names or CHECKS]:
        try:
            findings += await run(partial(_limited, check, context))
        except NotChecked as why:
            unchecked.append(Unchecked(check=name, reason=str(why)))
        except SchemaError:
            unchecked.append(Unchecked(check=name, reason="a table is missing: see the finding of `schema`"))
        except Exception as error:  # a defect of one check must not hide what the others find
            if is_outage(error):
                raise
            unchecked.append(_failure(name, error))
        else:
            checked.append(name)
    findings.sort(key=lambda finding: ("error", "warning", "notice").index(finding.severity))
    return Diagnosis(findings=findings, checked=checked, unchecked=unchecked)


def _failure(check: str, error: Exception) -> Unchecked:
    if not isinstance(error, DBAPIError):
        return Unchecked(check=check, reason=f"internal error: {type(error).__name__}", failed=True)
    code = sqlstate(error.orig) or getattr(error.orig, "sqlite_errorname", None)
    reason = REASONS.get(code or "") or (
        code if isinstance(code, str) and code.startswith("SQLITE") else cause_of(error)
    )
    return Unchecked(check=check, reason=reason, failed=code != INSUFFICIENT_PRIVILEGE)


def _limited(check: Check, context: Context, connection: Connection) -> list[Finding]:
    if dialect_of(connection).has_limits:
        connection.execute(text(f"SELECT set_config('transaction_read_only', 'on', true), {CHECK_LIMITS.sql}"))
    return list(check(connection, context))


def _now(connection: Connection) -> datetime:
    now: datetime = connection.execute(select(clock())).scalar_one()
    return now


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
    if context.malformed is not None:
        yield rules.refused("secrets", context.malformed)
        return
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
    if context.malformed is not None:
        raise NotChecked("OUTBOX_SECRET cannot be read: see the finding of `secrets`")
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
    yield from rules.running(_dispatchers(connection, context), max(lags.values(), default=None))


def _waiting(connection: Connection, context: Context) -> Iterable[Finding]:
    yield from rules.waiting(read_destinations(connection, context.tables).destinations)


def _alike(connection: Connection, context: Context) -> Iterable[Finding]:
    yield from rules.alike(_dispatchers(connection, context))


def _settings(connection: Connection, context: Context) -> Iterable[Finding]:
    dispatchers = _dispatchers(connection, context)
    yield from rules.unreadable(dispatchers)
    yield from rules.settings(dispatchers)
    yield from rules.retention(dispatchers)
    yield from rules.dates(dispatchers, _now(connection))


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


def _encryption(connection: Connection, context: Context) -> Iterable[Finding]:
    queue = context.tables.queue
    if unreadable(connection, [queue.c.outcome]):
        raise NotChecked("this role may not read why entries wait")
    if not unreadable(connection, [context.tables.kid.c.secret_check]):
        try:
            deployment.require_data_keys(connection, context.tables, context.encryption)
        except ConfigurationError as error:
            yield rules.refused("encryption", str(error))
    now = _now(connection)
    waiting = sorted(read_lags(connection, context.tables, now))
    most = MAX_COUNTED // max(len(waiting), 1)

    def unopened(name: Any, names: CTE) -> Select[Any]:
        """They are among the first: a dispatcher tries them again within `RELEASED_WITHIN`."""
        due = select(queue.c.outcome).where(queue.c.destination == name, queue.c.due_at <= now + RELEASED_WITHIN)
        first = due.order_by(queue.c.due_at).limit(most).correlate(names).subquery("first")
        is_unopened = first.c.outcome.contains(f'"reason": "{UNOPENED}')
        return select(func.count().label("number")).select_from(first).where(is_unopened)

    counts = [number for _, number in rows_of_each(connection, context.tables, waiting, unopened)]
    yield from rules.encryption(sum(counts), has_more=most in counts)


def _callbacks(connection: Connection, context: Context) -> Iterable[Finding]:
    on_record = callback_registry.list_all(connection, context.tables)
    yield from rules.callbacks(on_record, _dispatchers(connection, context))


def _schedules(connection: Connection, context: Context) -> Iterable[Finding]:
    own = {} if context.own is None else context.own.schedules
    found = list_schedules(connection, context.tables).schedules
    yield from rules.schedules([each for each in found if each.name not in own])


# --- the server


def _horizon(connection: Connection, context: Context) -> Iterable[Finding]:
    dialect = dialect_of(connection)
    if (right := dialect.sessions_right) is None:
        return
    holders = dialect.read_holders(connection)
    if holders is None:
        raise NotChecked(f"this role sees its own sessions only: {right}")
    yield from rules.horizon(holders)


def _vacuum(connection: Connection, context: Context) -> Iterable[Finding]:
    dialect = dialect_of(connection)
    if dialect.has_catalog:
        yield from rules.vacuum(read_tables(connection, context.tables))
    if (history := dialect.read_history(connection)) is not None:
        yield from doctor_mariadb.purge(history)


def _pooler(connection: Connection, context: Context) -> Iterable[Finding]:
    if (asked := dialect_of(connection).serving_pid(connection)) is not None:
        driver = connection.connection.driver_connection
        known = backend_pid(driver)
        # The command's own connection prepares nothing: only a dispatcher's prepares what the next transaction may not find.
        prepares = context.own is not None and getattr(driver, "prepare_threshold", None) is not None
        yield from rules.pooler(is_between=known not in (None, asked), prepares=prepares)


def _server(connection: Connection, context: Context) -> Iterable[Finding]:
    if found := dialect_of(connection).server_settings(connection):
        yield from doctor_mariadb.server(found)


def _galera(connection: Connection, context: Context) -> Iterable[Finding]:
    settings = dialect_of(connection).cluster_settings(connection)
    if settings.get("wsrep_provider", "none") not in ("", "none"):
        yield from doctor_mariadb.galera(settings | doctor_mariadb.options(settings.pop("wsrep_provider_options", "")))


def _clock(connection: Connection, context: Context) -> Iterable[Finding]:
    before = datetime.now(UTC)
    now = _now(connection)
    after = datetime.now(UTC)
    yield from rules.clock(now - after if now > after else min(now - before, timedelta(0)))


def _partitions(connection: Connection, context: Context) -> Iterable[Finding]:
    yield from rules.partitions(read_layout(connection, context.tables))


def _extras(connection: Connection, context: Context) -> Iterable[Finding]:
    yield from rules.extras(context.missing)


OF_SERVER = ("server", "galera")
"""The checks of the server's settings, by dialect: a dispatcher makes them at its start too."""

CHECKS: Mapping[str, Check] = {
    "schema": _schema,
    "environment": _environment,
    "secrets": _secrets,
    "key ids": _key_ids,
    "suspended": _suspended,
    "running": _running,
    "waiting": _waiting,
    "alike": _alike,
    "settings": _settings,
    "registered": _registered,
    "served": _served,
    "encryption": _encryption,
    "callbacks": _callbacks,
    "schedules": _schedules,
    "horizon": _horizon,
    "vacuum": _vacuum,
    "pooler": _pooler,
    "server": _server,
    "galera": _galera,
    "clock": _clock,
    "partitions": _partitions,
    "extras": _extras,
}
"""Every check, by the name under which it is reported."""
