"""Draws what was read as text and tables: the overview, lists, one entry."""

import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dispatchers.admin.read.plain_values import instant, span
from dispatchers.cli.output import cell, is_screen, json_text, pairs, prose, short, state_cell, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from dispatchers.admin.read.destinations import DestinationState, DestinationStates
    from dispatchers.admin.read.entries import EntryDetails, EntrySummary, Page
    from dispatchers.admin.read.overview import DestinationOverview, Overview
    from dispatchers.admin.read.search import Found

WAITING = ("pending", "sending", "retry", "uncertain")
SEND_AGAIN = "send_again"
ALL = sys.maxsize
OVERDUE_SHOWN = 5
DESTINATIONS_SHOWN = 30  # those that need attention most; `--all` and `--json` print all of them
UNCLAIMED_SECONDS = 60


def overview(found: "Overview", *, is_whole: bool) -> "Iterator[RenderableType]":
    """is_whole: whether all destinations are shown, however many there are."""
    max_shown = ALL if is_whole else DESTINATIONS_SHOWN
    if found.suspended_reason:
        yield prose(f"sending is suspended: {found.suspended_reason}", "bold red")
    if found.resumed:
        ago = span(found.at - found.resumed.at)
        yield prose(f"resumed {ago} ago by {found.resumed.by}: {found.resumed.reason}")
    yield from _queue(found, max_shown)
    yield from _dispatchers(found)


def _queue(found: "Overview", max_shown: int) -> "Iterator[RenderableType]":
    from dispatchers.admin.read.overview import most_urgent

    if not found.destinations:
        yield prose("the queue is empty")
        return
    numbers = [*map(str.upper, WAITING), "SUSPENDED", "OLDEST DUE"]
    drawn = table("DESTINATION", *numbers, "NOTE", elastic=["DESTINATION", "NOTE"], right=numbers)
    for destination in most_urgent(found, max_shown):
        drawn.add_row(
            cell(destination.name),
            *(cell(destination.states.get(state, 0)) for state in WAITING),
            cell(destination.suspended),
            _age(destination.oldest_due_seconds),
            cell(_note(destination, found.at)),
        )
    yield drawn
    yield from _left_out(len(found.destinations) - max_shown)
    if found.decided:
        yield prose(decided(found.decided, found), "yellow")
    if found.uncertain:
        yield prose(f"{found.uncertain} uncertain: `outbox list --state uncertain` shows them", "yellow")
    if found.suspended:
        yield prose(f"{found.suspended} suspended: `outbox list --suspended` shows them")
    if found.blocked:
        yield prose(f"{found.blocked} blocked by an earlier entry of their ordering group")
    if found.overdue:
        shown = ", ".join(str(lease.id) for lease in found.overdue[:OVERDUE_SHOWN])
        more = ", ..." if len(found.overdue) > OVERDUE_SHOWN else ""
        longest = span(timedelta(seconds=found.overdue[0].over_seconds))
        yield prose(
            f"{len(found.overdue)} with a lease that expired up to {longest} ago: {shown}{more}; no dispatcher serves them, or"
            " an open transaction has locked their rows (pg_stat_activity shows it)",
            "yellow",
        )
    for unserved in found.unserved or ():
        yield prose(unserved.text, "yellow")
    named = {(unserved.operation, unserved.destination) for unserved in found.unserved or ()}
    for waiting in found.unregistered:
        if (waiting.operation, waiting.destination) not in named:
            entries = f"{waiting.entries} or more" if waiting.has_more else str(waiting.entries)
            yield prose(f"{entries} of {waiting.operation} wait: no live dispatcher has registered it", "yellow")
    for group in found.blocked_groups:
        since = span(found.at - group.since)
        text = f"ordering group {group.ordering_key} blocked {since} ago by {group.entry_id}: {group.reason}"
        yield prose(text, "yellow")


def _left_out(count: int) -> "Iterator[RenderableType]":
    if count > 0:
        yield prose(f"and {count:,} more destinations: --all or --json shows them", "yellow")


def decided(count: int, found: "Overview") -> str:
    """How many entries are decided and not settled, and what they wait for."""
    many = f"{count:,} decided and not settled yet"
    if found.suspended_reason:
        return f"{many}: a dispatcher settles them after `outbox resume --after-restore`"
    if not any(each.is_live for each in found.dispatchers):
        return f"{many}: no running dispatcher reports itself; the next one settles them without a send"
    return f"{many}: a running dispatcher settles them without a send; `outbox destinations` says what they wait for"


def _dispatchers(found: "Overview") -> "Iterator[RenderableType]":
    if found.dispatchers:
        columns = ("DISPATCHER", "VERSION", "STARTED", "SEEN", "IN FLIGHT", "SETTINGS", "SERVES")
        drawn = table(*columns, elastic=["DISPATCHER", "SERVES"], right=["IN FLIGHT"])
        for each in found.dispatchers:
            seen = f"{span(found.at - each.seen_at)} ago"
            drawn.add_row(
                cell(each.name),
                cell(each.version),
                cell(f"{span(found.at - each.since)} ago"),
                cell(seen) if each.is_live else cell(f"{seen}, dead", "red"),
                cell(each.in_flight),
                cell(each.settings_digest),
                cell(", ".join(each.operations)),
            )
        yield drawn
    for difference in found.differences:
        yield prose(f"live dispatchers differ in {difference.text}", "yellow")
    longest = max((each.oldest_due_seconds or 0 for each in found.destinations), default=0)
    if longest > UNCLAIMED_SECONDS and not any(each.is_live for each in found.dispatchers):
        yield prose(
            f"entries have been due for {span(timedelta(seconds=longest))} and no running dispatcher reports itself"
            " (`run_once()` and older releases do not)",
            "yellow",
        )


def destinations(found: "DestinationStates", *, is_whole: bool) -> "Iterator[RenderableType]":
    """is_whole: as of `overview`."""
    from dispatchers.admin.read.destinations import most_urgent

    max_shown = ALL if is_whole else DESTINATIONS_SHOWN
    if not found.destinations:
        yield prose("the queue is empty")
        return
    numbers = ["DUE", "OLDEST DUE", "RATE"]
    drawn = table("DESTINATION", *numbers, "NOTE", elastic=["DESTINATION", "NOTE"], right=numbers)
    for state in most_urgent(found.destinations, max_shown):
        rate = state.rate_per_second
        drawn.add_row(
            cell(state.name),
            cell(state.due if state.due_is_exact else f"~{state.due}"),
            _age(state.oldest_due_seconds),
            cell("-" if rate is None else f"{rate:g}/s"),
            prose(_throttling(state, found.at)),
        )
    yield drawn
    yield from _left_out(len(found.destinations) - max_shown)


def _age(seconds: float | None) -> "Text":
    return cell("-" if seconds is None else span(timedelta(seconds=seconds)))


def _throttling(state: "DestinationState", at: datetime) -> str:
    notes = []
    if state.paused and state.decided_at is not None:
        since = span(at - state.decided_at)
        notes.append(f"paused {since} ago by {state.decided_by}: {state.paused_reason or 'no reason given'}")
    if state.cooldown_until is not None:
        notes.append(f"cooldown for another {span(state.cooldown_until - at)}")
    if state.breaker != "closed":
        left = f" for {span(state.breaker_until - at)}" if state.breaker_until and state.breaker_until > at else ""
        notes.append(f"breaker {state.breaker.replace('_', '-')}{left} after {state.breaker_failures} failures")
    if state.decided:
        notes.append(f"{state.decided:,} decided, not settled yet")
    if state.permits_taken:
        notes.append(f"{state.permits_taken} of {state.max_permits} permits in use")
    if state.waits_because is not None:
        notes.append(f"waits: {state.waits_because}")
    return ", ".join(notes)


def _note(destination: "DestinationOverview", at: datetime) -> str:
    notes = []
    if not destination.is_whole:
        notes.append(f"only the {destination.counted:,} due last are counted")
    if destination.paused:
        notes.append(f"paused: {destination.paused_reason or 'no reason given'}")
    if destination.breaker != "closed":
        notes.append(f"breaker {destination.breaker.replace('_', '-')}")
    if destination.cooldown_until is not None and destination.cooldown_until > at:
        notes.append(f"cooldown for another {span(destination.cooldown_until - at)}")
    return ", ".join(notes)


def entries_of_parent(entries: "Sequence[EntrySummary]") -> "RenderableType":
    has_sources = any((entry.source, entry.scope) != ("app", "") for entry in entries)
    whose = ["SOURCE", "SCOPE"] if has_sources else []
    drawn = table(
        *("ID", "STATE", *whose, "OPERATION", "ATTEMPTS", "CREATED", "REASON"),
        elastic=["SCOPE", "OPERATION", "REASON"],
        right=["ATTEMPTS"],
    )
    for entry in entries:
        drawn.add_row(
            cell(short(entry.id)),
            state_cell(entry.state),
            *([cell(entry.source), cell(entry.scope)] if has_sources else []),
            cell(_effect(entry)),
            cell(entry.attempts),
            cell(entry.created_at.strftime("%Y-%m-%d %H:%M:%SZ")),
            cell(_why(entry)),
        )
    return drawn


def _effect(entry: "EntrySummary") -> str:
    return f"{entry.operation} ({entry.discriminator})" if entry.discriminator else entry.operation


def _why(entry: "EntrySummary") -> str:
    if entry.suspended_reason is not None:
        return f"suspended: {entry.suspended_reason}"
    if entry.known is not None:
        reason = entry.reason or ""
        if entry.known == SEND_AGAIN:
            return f"will be sent again: {reason}"
        word = "" if reason.startswith(entry.known) else f"{entry.known}, "
        return f"{word}not settled yet: {reason}"
    if entry.blocked_by is not None:
        return f"blocked by {short(entry.blocked_by)} in its ordering group"
    return entry.reason or ""


def found(found: "Found") -> "Iterator[RenderableType]":
    """What a search found, and how far it went."""
    if found.entries:
        yield entries_of_parent(found.entries)
    for request in found.requests:
        count = request.mismatches
        refused = f"; refused {count:,} other request{'s' if count != 1 else ''} with its key" if count else ""
        yield prose(f"request {request.id} of {request.source} {request.key}: {request.state}{refused}")
    if found.has_more:
        yield prose("and more: a longer text finds fewer", "yellow")
    if unread := _unread(found):
        yield prose(unread, "dim")


def not_found(text: str, found: "Found") -> str:
    return f"nothing has the id, key or answer {text!r}" + (f"; {unread}" if (unread := _unread(found)) else "")


def _unread(found: "Found") -> str:
    """Which lists were not searched to their end."""
    lists = [f"{each.rows:,} {each.list}" for each in found.searched if not each.is_whole]
    withheld = [f"this role may not read {name}" for name in found.withheld]
    return "; ".join([*([f"searched only {', '.join(lists)}"] if lists else []), *withheld])


def page(found: "Page", *, ended: bool, env: str | None, selected: str) -> "Iterator[RenderableType]":
    """env: the deployment's own, if it is known: an entry's env is shown if it differs. selected: the options that select."""
    if found.entries:
        elastic = ["OPERATION", "PARENT", "REASON"]
        has_envs = len({entry.env for entry in found.entries} | ({env} if env else set())) > 1
        envs, when = ["ENV"] if has_envs else [], "ENDED" if ended else "DUE"
        drawn = table("ID", "STATE", *envs, "OPERATION", "PARENT", when, "REASON", elastic=elastic)
        for entry in found.entries:
            drawn.add_row(
                cell(short(entry.id)),
                state_cell(entry.state),
                *([cell(entry.env)] if has_envs else []),
                cell(_effect(entry)),
                cell(entry.parent),
                cell(_when(entry, found.at)),
                cell(_why(entry)),
            )
        yield drawn
    else:
        yield prose(_none(found, ended=ended, selected=selected))
    if found.next and is_screen():
        yield prose("next page: repeat the command with", "dim")
        yield prose(f"--after {found.next}", "dim")  # on its own line, so that it can be copied


def with_parents(entries: "Sequence[EntrySummary]") -> "RenderableType":
    """Entries of several parents, with their whole ids."""
    drawn = table("ID", "STATE", "OPERATION", "PARENT", "REASON", elastic=["OPERATION", "PARENT", "REASON"])
    for each in entries:
        drawn.add_row(cell(each.id), state_cell(each.state), *map(cell, (_effect(each), each.parent, _why(each))))
    return drawn


def _none(page: "Page", *, ended: bool, selected: str) -> str:
    if page.next is not None:
        return f"none among the entries compared so far; --after {page.next} continues"
    entry = f"no {'finished' if ended else 'unfinished'} entry" + (f" with {selected}" if selected else "")
    if page.since is not None:
        longer = "; --since 30d lists older ones" if ended else ""
        return f"{entry} {'ended' if ended else 'became due'} since {instant(page.since)}{longer}"
    return entry if selected else f"{entry}; for finished ones: --state delivered, failed or cancelled"


def _when(entry: "EntrySummary", at: datetime) -> str:
    if entry.settled_at is not None:
        return f"{span(at - entry.settled_at)} ago"
    if entry.state == "sending" and entry.lease_until is not None:
        left = entry.lease_until - at
        return f"lease {span(left)}" if entry.lease_until > at else f"expired {span(left)} ago"
    if entry.due_at is None:
        return "-"
    return f"in {span(entry.due_at - at)}" if entry.due_at > at else f"{span(at - entry.due_at)} ago"


def details(entry: "EntryDetails", payload: Any, *, with_payload: bool) -> "Iterator[RenderableType]":
    yield pairs(_fields(entry))
    if entry.events:
        yield prose("")
        drawn = table("AT", "WHAT", "BY", "REASON", elastic=["REASON"])
        for event in entry.events:
            what = event.kind if event.delivery is None else f"{event.kind}, delivery {event.delivery}"
            drawn.add_row(cell(instant(event.at)), cell(what), cell(event.actor or ""), prose(event.reason or ""))
        yield drawn
    if with_payload:
        yield prose("")
        yield json_text(payload)


def _fields(entry: "EntryDetails") -> Iterator[tuple[str, Any]]:
    from dispatchers.admin.decide.again import first_of

    yield "id", entry.id
    yield "state", state_cell(entry.state)
    yield "reason", entry.reason
    yield "recorded", entry.known and _recorded(entry.known)
    yield "suspended", entry.suspended_reason
    yield "blocked by", entry.blocked_by
    yield "operation", entry.operation
    yield "discriminator", entry.discriminator or None
    yield "again after", first_of(entry.discriminator)
    yield "destination", entry.destination
    yield "parent", entry.parent
    yield "scope", entry.scope or None
    yield "source", entry.source
    yield "env", entry.env
    epoch = entry.key_epoch
    yield "child key", f"{entry.child_key} (of epoch 0)" if epoch and entry.child_key else entry.child_key
    yield "kid", entry.kid
    yield "epoch", f"{epoch}: `outbox keys derive --epoch {epoch}` prints its key" if epoch else None
    yield "sent as", entry.sent_as
    yield "search for", entry.search
    yield "ordering key", entry.ordering_key
    yield "position", entry.position
    yield "created", instant(entry.created_at)
    yield "due", entry.due_at and f"{instant(entry.due_at)} ({_when(entry, entry.at)})"
    yield "first leased", entry.first_leased_at and instant(entry.first_leased_at)
    yield (
        "lease",
        entry.lease_until and entry.leased_at and f"{instant(entry.leased_at)} to {instant(entry.lease_until)}",
    )
    yield "deliveries", f"{entry.deliveries} (how often a dispatcher claimed it)"
    yield "attempts", f"{entry.attempts} (how many sends may have left)"
    yield "maybe sent", None if entry.maybe_sent is None else ("yes" if entry.maybe_sent else "no")
    yield "in doubt since", entry.in_doubt_since and instant(entry.in_doubt_since)
    yield "settled", entry.settled_at and instant(entry.settled_at)
    yield "result", None if entry.result is None else json_text(entry.result)
    yield "payload version", entry.payload_version
    yield "options", json_text(entry.options) if entry.options else None
    yield "headers", json_text(entry.headers) if entry.headers else None
    yield "record", entry.record_id
    yield "payload", None if entry.payload_bytes is None else f"{entry.payload_bytes} bytes"


def _recorded(known: str) -> str:
    if known == SEND_AGAIN:
        return "a running dispatcher will send it again"
    return f"{known}; a running dispatcher will settle it"
