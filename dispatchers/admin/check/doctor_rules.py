"""The rules of `outbox doctor`: each finds what is wrong in what `doctor` has read. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, Literal

from dispatchers.admin.read.destinations import DestinationState
from dispatchers.admin.read.dispatchers import differences, live, readable
from dispatchers.admin.read.incidents import UNCLAIMED
from dispatchers.admin.read.overview import Unregistered, Unserved
from dispatchers.admin.read.schedules import ScheduleState
from dispatchers.admin.read.waiting_reasons import NO_CALLBACK, NO_DISPATCHER, SUSPENDED, UNSERVED
from dispatchers.names import prefixes
from dispatchers.store.app_code.callback_registry import CallbackOnRecord
from dispatchers.store.records.heartbeats import DispatcherSeen
from dispatchers.time_limits import CENTURY, backoff
from outbox.sql.schema.body_partitions import Layout
from outbox.sql.server_reports import Holder, TableHealth

MAX_NAMED = 5  # names in one finding
HORIZON_HELD = timedelta(minutes=5)
MAX_AGE_OF_FACTS = timedelta(days=365)
CLOCKS_APART = timedelta(seconds=5)  # the default margin
MAX_DEAD_ROWS = 100_000
ATTEMPTS_SUMMED = 10_000  # beyond it the wait is the longest one each time, and far beyond any window
OWN_CONNECTIONS = 3  # of a dispatcher: two that claim and settle, one for maintenance

Severity = Literal["error", "warning", "notice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check has found. error: entries are not sent, or a guarantee is at risk. warning: it will cost something.

    notice: nothing to do if it is meant so. meaning: what follows from it. remedy: what to do.
    """

    check: str
    severity: Severity
    text: str
    meaning: str
    remedy: str


# --- who runs


def running(dispatchers: Sequence[DispatcherSeen], waited: timedelta | None) -> Iterator[Finding]:
    """waited: for how long the oldest due entry has been waiting; None if none is due."""
    if waited is not None and not live(dispatchers):
        yield Finding(
            check="running",
            severity="error" if waited > UNCLAIMED else "notice",
            text=f"entries have been due for {_span(waited)} and no dispatcher is live",
            meaning="nothing is sent, unless a process without heartbeats does it: run_once(), or an older release",
            remedy="start `outbox run`, and see in its log why it stopped",
        )
    dead = sorted((each for each in dispatchers if not each.is_live), key=lambda each: each.seen_at, reverse=True)
    if dead:
        named = [f"{each.name} since {each.seen_at:%Y-%m-%d %H:%M:%SZ}" for each in dead[:MAX_NAMED]]
        more = f" and {len(dead) - MAX_NAMED} more" if len(dead) > MAX_NAMED else ""
        yield Finding(
            check="running",
            severity="warning",
            text=f"dispatchers that do not report any more: {len(dead)} ({', '.join(named)}{more})",
            meaning="they were killed, hang or do not reach the database; what they were sending is in doubt when their leases"
            " expire",
            remedy="see their logs and their supervisor; a row disappears an hour after its last report",
        )


def waiting(destinations: Sequence[DestinationState]) -> Iterator[Finding]:
    """Entries that wait for a budget, a rate or permits. What else may stop them is the finding of other checks."""
    late: dict[str, list[DestinationState]] = {}
    for each in destinations:
        waits = timedelta(seconds=each.oldest_due_seconds or 0)
        why = each.waits_because or ""
        has_longer = each.is_throttled and each.due  # what a pause or the like keeps may have waited longer
        is_of_others = why.startswith((NO_CALLBACK, NO_DISPATCHER, UNSERVED, SUSPENDED))
        if why and waits > UNCLAIMED and not (has_longer or is_of_others):
            late.setdefault(why, []).append(each)
    for why, states in late.items():
        longest = _seconds(max(each.oldest_due_seconds or 0 for each in states))
        names = ", ".join(each.name for each in states[:MAX_NAMED])
        more = f" and {len(states) - MAX_NAMED} more" if len(states) > MAX_NAMED else ""
        yield Finding(
            check="waiting",
            severity="warning",
            text=f"entries have been due for up to {longest}: {why}; destinations: {names}{more}",
            meaning="entries come faster than they are sent or settled",
            remedy="raise the setting that is named, make the callbacks or the service faster, or start more dispatchers",
        )


def alike(dispatchers: Sequence[DispatcherSeen]) -> Iterator[Finding]:
    for difference in differences(dispatchers):
        yield Finding(
            check="alike",
            severity="warning",
            text=f"live dispatchers of the same operation differ in {difference.text}",
            meaning="an entry is treated by the settings of the process that happens to claim it",
            remedy="nothing during a deploy; else restart the dispatchers that were left on the old settings",
        )


def unreadable(dispatchers: Sequence[DispatcherSeen]) -> Iterator[Finding]:
    for each in live(dispatchers):
        if not each.is_readable:
            yield Finding(
                check="settings",
                severity="warning",
                text=f"the settings of dispatcher {each.name}, version {each.version}, cannot be read",
                meaning="it is of another release; its settings, operations and callbacks are not checked",
                remedy="run the `outbox doctor` of its release",
            )


def unregistered(waiting: Sequence[Unregistered]) -> Iterator[Finding]:
    for each in waiting:
        yield _nobody_serves(each.operation, each.entries, each.has_more, "no live dispatcher has registered it")


def unserved(waiting: Sequence[Unserved]) -> Iterator[Finding]:
    for each in waiting:
        if each.unread:
            yield _nobody_reads(each)
        else:
            yield _nobody_serves(each.operation, each.entries, each.has_more, each.reason)


def _nobody_reads(waiting: Unserved) -> Finding:
    return Finding(
        check="served",
        severity="error",
        text=f"{waiting.entries}{' or more' if waiting.has_more else ''} entries of {waiting.operation} wait: {waiting.reason}",
        meaning="no dispatcher that claimed them can read their payload; they wait until one can, and never fail",
        remedy="deploy a dispatcher whose type or upcaster reads it, or withdraw the entries with `outbox cancel`",
    )


def _nobody_serves(operation: str, entries: int, has_more: bool, reason: str) -> Finding:
    return Finding(
        check="served",
        severity="error",
        text=f"{entries}{' or more' if has_more else ''} entries of {operation} wait: {reason}",
        meaning="they wait until a dispatcher serves the operation; they never fail",
        remedy="deploy a dispatcher that registers the operation, or withdraw the entries with `outbox cancel`",
    )


def encryption(unopened: int, *, has_more: bool) -> Iterator[Finding]:
    """unopened: how many entries could not be decrypted when a dispatcher last claimed them. has_more: there may be more."""
    if unopened:
        yield Finding(
            check="encryption",
            severity="error",
            text=f"{unopened}{' or more' if has_more else ''} entries cannot be decrypted",
            meaning="they wait, are tried again every 30 seconds, and never fail",
            remedy="give the dispatchers the data key that `outbox show` names in the reason; end an entry whose key is lost with"
            " `outbox cancel` or `outbox resolve`: see docs/encryption.md",
        )


def callbacks(on_record: Sequence[CallbackOnRecord], dispatchers: Sequence[DispatcherSeen]) -> Iterator[Finding]:
    """Callbacks on record that no live dispatcher has, and callbacks of operations that none serves."""
    fleet = readable(dispatchers)
    if len(fleet) < len(live(dispatchers)) or not fleet:  # one whose settings cannot be read may have any callback
        return
    had = {name for each in fleet for name in each.settings["callbacks"]}
    served = {operation for each in fleet for operation in each.operations}
    for callback in on_record:
        operation = callback.name.partition(" ")[2]
        if callback.name not in had:
            yield Finding(
                check="callbacks",
                severity="error" if callback.waiting else "warning",
                text=f"no live dispatcher has the callback {callback.name!r}; {callback.waiting} entries wait for it",
                meaning="entries of its operation are sent, but settle only in a dispatcher that has the callback",
                remedy=f"start the dispatcher that has it; if it was removed: `outbox callbacks forget '{callback.name}'`",
            )
        elif not _covers(operation, served):
            yield Finding(
                check="callbacks",
                severity="warning",
                text=f"the callback {callback.name!r} fits no operation that a live dispatcher serves",
                meaning="it is never called",
                remedy="correct its name, or register the operation",
            )


def _covers(name: str, served: Collection[str]) -> bool:
    return any(prefix in served for prefix in prefixes(name)) or any(each.startswith(f"{name}.") for each in served)


# --- settings


def settings(dispatchers: Sequence[DispatcherSeen]) -> Iterator[Finding]:
    for each in _distinct(dispatchers):
        for operation, declared in each.settings["operations"].items():
            yield from _lease(each, operation, declared)
            yield from _retries(each, operation, declared)
        yield from _pool(each)


def dates(dispatchers: Sequence[DispatcherSeen], now: datetime) -> Iterator[Finding]:
    """Adapters whose declarations were compared with the service's documentation more than a year ago."""
    days = {
        operation: str(day)
        for each in readable(dispatchers)
        for operation, declared in each.settings["operations"].items()
        if (day := declared.get("as_of")) and now.date() - date.fromisoformat(day) > MAX_AGE_OF_FACTS
    }
    if days:
        named = ", ".join(f"{operation} ({day})" for operation, day in sorted(days.items())[:MAX_NAMED])
        more = f" and {len(days) - MAX_NAMED} more" if len(days) > MAX_NAMED else ""
        yield Finding(
            check="dates",
            severity="notice",
            text=f"what a service guarantees about keys was last checked more than a year ago: {named}{more}",
            meaning="the service may have shortened its window since, and may execute a late attempt twice",
            remedy="read the sources that docs/providers.md lists, give the adapter window=..., or install a newer release",
        )


def _distinct(dispatchers: Sequence[DispatcherSeen]) -> Collection[DispatcherSeen]:
    return {each.settings_digest: each for each in readable(dispatchers)}.values()


def _lease(dispatcher: DispatcherSeen, operation: str, declared: Mapping[str, Any]) -> Iterator[Finding]:
    lease, margin = dispatcher.settings["lease"], dispatcher.settings["margin"]
    if declared["timeout"] + margin >= lease:
        yield Finding(
            check="lease",
            severity="error",
            text=f"{operation} in {dispatcher.name}: timeout {declared['timeout']:g} s and margin {margin:g} s do not fit into"
            f" the lease of {lease:g} s",
            meaning="a send can outlive its lease, and another dispatcher then sends at the same time",
            remedy="shorten the adapter's timeout, or give Dispatcher(lease=...)",
        )


def _retries(dispatcher: DispatcherSeen, operation: str, declared: Mapping[str, Any]) -> Iterator[Finding]:
    window = declared["window"]
    if not isinstance(window, int | float):
        return
    usable = window - declared["timeout"] - dispatcher.settings["margin"]
    needed = min(declared["max_age"], _retrying_seconds(declared["max_attempts"], declared["timeout"]))
    if needed > usable:
        yield Finding(
            check="retries",
            severity="warning",
            text=f"{operation} in {dispatcher.name}: its {declared['max_attempts']} attempts can take"
            f" {_seconds(needed)}, and the service remembers a key for {_seconds(window)}",
            meaning="an entry in doubt becomes uncertain when the window closes, before its attempts are used",
            remedy="lower max_attempts or max_age; if the service remembers longer, declare a longer window",
        )


def _retrying_seconds(max_attempts: int, timeout: float) -> float:
    """How long the attempts take at most, with the dispatcher's own waits between them.

    A service's Retry-After can make a wait longer, but not beyond the window: the last attempt is then made before it closes.
    """
    waits = (backoff(tries, 1.0).total_seconds() for tries in range(1, min(max_attempts, ATTEMPTS_SUMMED)))
    return sum(waits) + max_attempts * timeout


def _pool(dispatcher: DispatcherSeen) -> Iterator[Finding]:
    most = dispatcher.settings["max_connections"]
    kinds = bool(dispatcher.settings["callbacks"]) + bool(dispatcher.schedules)
    calls = dispatcher.settings["callback_concurrency"] * kinds
    if most is not None and most < OWN_CONNECTIONS + calls:
        yield Finding(
            check="pool",
            severity="warning",
            text=f"{dispatcher.name}: its engine's pool gives {most} connections; {OWN_CONNECTIONS + calls} may be in use",
            meaning="claims, maintenance and callbacks wait for one another, and may time out",
            remedy="raise pool_size or max_overflow of the engine, or lower callback_concurrency",
        )


def retention(dispatchers: Sequence[DispatcherSeen]) -> Iterator[Finding]:
    """Any dispatcher deletes the entries of all: each checks its own adapters at its start, and no other's."""
    windows = {
        operation: declared["window"]
        for each in _distinct(dispatchers)
        for operation, declared in each.settings["operations"].items()
        if isinstance(declared["window"], int | float)
    }
    if not windows:
        return
    operation = max(windows, key=lambda name: windows[name])
    for each in _distinct(dispatchers):
        if each.settings["retention"] <= windows[operation]:
            yield Finding(
                check="retention",
                severity="error",
                text=f"{each.name} deletes entries {_seconds(each.settings['retention'])} after they settled; the"
                f" service of {operation} remembers keys for {_seconds(windows[operation])}",
                meaning="a request that is repeated after that is sent under a key that the service still remembers",
                remedy="give every dispatcher of this database a `retention` longer than the longest window of all adapters",
            )


def schedules(states: Sequence[ScheduleState]) -> Iterator[Finding]:
    if unserved := [each.name for each in states if not (each.served_by or each.paused)]:
        yield Finding(
            check="schedules",
            severity="warning",
            text=f"no live dispatcher has the schedules {_named(unserved)}",
            meaning="their instants are not enqueued",
            remedy="start a dispatcher with them; if they were removed from the code, `outbox schedules forget`",
        )
    failing = [each for each in states if each.failures]
    for each in failing[:MAX_NAMED]:
        yield Finding(
            check="schedules",
            severity="error",
            text=f"the schedule {each.name} fails: {'; '.join(each.failures[:MAX_NAMED])}",
            meaning="nothing of its next instant is enqueued; the other schedules are not affected",
            remedy="read the dispatchers' log for the trace, and mend the schedule's function or its trigger",
        )
    late = [each for each in states if each.served_by and (each.behind_seconds or 0) > UNCLAIMED.total_seconds()]
    for each in [each for each in late if not each.failures][:MAX_NAMED]:
        yield Finding(
            check="schedules",
            severity="error",
            text=f"the schedule {each.name} has been due for {_seconds(each.behind_seconds or 0)}",
            meaning="its function raises, or takes longer than callback_timeout: nothing of it is enqueued",
            remedy="read the dispatchers' log",
        )


def _named(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


# --- the database


def refused(check: str, text: str) -> Finding:
    """What a process refuses at its start, in its own words."""
    meaning, remedy = {
        "schema": (
            "the processes of this release do not start",
            "what the finding says: it names what creates the tables, or the rights that this user lacks",
        ),
        "environment": (
            "a process with this OUTBOX_ENV refuses to start",
            "set OUTBOX_ENV as the dispatchers have it; if this is a copy of the database, follow docs/restore.md",
        ),
        "secrets": (
            "a process with this OUTBOX_SECRET refuses to start, because keys would differ between attempts",
            "set OUTBOX_SECRET as the other processes have it",
        ),
        "encryption": (
            "a process with these OUTBOX_DATA_KEYS refuses to start, because it could not read what the others encrypt",
            "set OUTBOX_DATA_KEYS as the other processes have them",
        ),
        "key ids": (
            "the keys of these entries cannot be derived, so no dispatcher with this OUTBOX_SECRET starts",
            "keep an old secret in OUTBOX_SECRET until its last entry has settled",
        ),
    }[check]
    return Finding(check=check, severity="error", text=text, meaning=meaning, remedy=remedy)


def suspended(reason: str | None) -> Iterator[Finding]:
    if reason is not None:
        yield Finding(
            check="suspended",
            severity="error",
            text=f"sending is suspended: {reason}",
            meaning="no dispatcher of this database sends",
            remedy="follow docs/restore.md, then `outbox resume --after-restore`",
        )


def horizon(holders: Sequence[Holder]) -> Iterator[Finding]:
    for holder in holders:
        held = None if holder.held_seconds is None else timedelta(seconds=holder.held_seconds)
        if held is None or held > HORIZON_HELD:
            since = "" if held is None else f" for {_span(held)}"
            yield Finding(
                check="horizon",
                severity="warning",
                text=f"{holder.what} holds back the removal of dead rows{since}",
                meaning="the queue's table and indexes grow, and claims read what is dead",
                remedy="end it (pg_terminate_backend, ROLLBACK PREPARED, pg_drop_replication_slot; KILL on MariaDB), or let it"
                " commit sooner",
            )


def vacuum(tables: Sequence[TableHealth]) -> Iterator[Finding]:
    if off := [table.name for table in tables if not table.vacuums]:  # one setting of the server, often
        yield Finding(
            check="vacuum",
            severity="warning",
            text=f"autovacuum is off for {', '.join(off)}",
            meaning="dead rows are never removed: the tables grow and claims become slow",
            remedy="turn on `autovacuum`, and RESET (autovacuum_enabled) of each table that has it",
        )
    for table in tables:
        if table.vacuums and table.dead > max(MAX_DEAD_ROWS, table.alive / 2):
            yield Finding(
                check="vacuum",
                severity="warning",
                text=f"{table.name} has {table.dead} dead rows and {table.alive} live ones: autovacuum lags",
                meaning="the table grows and claims become slow",
                remedy="see the check `horizon`; else give autovacuum more workers or a higher cost limit",
            )


def pooler(*, is_between: bool, prepares: bool) -> Iterator[Finding]:
    """prepares: whether this connection's driver prepares statements by itself."""
    if is_between:
        yield Finding(
            check="pooler",
            severity="warning" if prepares else "notice",
            text="the connection leads to a pooler, such as PgBouncer",
            meaning="no hints arrive here, so that a dispatcher polls; in transaction mode prepared statements fail",
            remedy="give dispatchers a URL that leads straight to the server, or connect_args={'prepare_threshold': None}",
        )


def clock(ahead: timedelta) -> Iterator[Finding]:
    """ahead: by how much the database's clock is ahead of this host's, at least."""
    if abs(ahead) > CLOCKS_APART:
        yield Finding(
            check="clock",
            severity="warning",
            text=f"the database's clock is {_span(abs(ahead))} {'ahead of' if ahead > timedelta(0) else 'behind'} this host's",
            meaning="leases and windows follow the database's clock alone; a `due` that the app computes is off by as much",
            remedy="synchronise both clocks (NTP)",
        )


def partitions(layout: Layout | None) -> Iterator[Finding]:
    if layout is not None and layout.lacks_days:
        yield Finding(
            check="partitions",
            severity="error" if layout.alarm else "warning",
            text=layout.alarm or f"body partitions exist for {layout.ahead} days ahead only",
            meaning="bodies of a day without a partition stay in the records, whose table then grows",
            remedy="run `outbox maintenance`, or a dispatcher, with the rights of `outbox db roles`",
        )


def extras(missing: Mapping[str, str]) -> Iterator[Finding]:
    """missing: packages that are not installed here, each with the extra that brings it."""
    for package, extra in missing.items():
        yield Finding(
            check="extras",
            severity="warning",
            text=f"the package {package!r} is not installed here",
            meaning="a dispatcher cannot run in this environment with this URL",
            remedy=f"pip install 'sqlalchemy-outbox[{extra}]'",
        )


def _seconds(seconds: float) -> str:
    return _span(timedelta(seconds=min(seconds, CENTURY.total_seconds())))


def _span(length: timedelta) -> str:
    return str(timedelta(seconds=round(length.total_seconds())))
