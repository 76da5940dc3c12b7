"""A decision in bulk in words: the sentence that an operator confirms, and the equivalent command. Pure.

Both have every condition of the filter with its values in full, so that two different filters never have equal texts.
"""

import shlex
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from dispatchers.admin.decide.effects import Action
from dispatchers.admin.decide.rules import Verdict
from dispatchers.admin.read.entry_filter import Filter

VERBS: dict[Action, str] = {
    "retry": "make due now {}",
    "cancel": "cancel {}",
    "resolve": "record for {}",
    "release": "release {}",
    "again": "enqueue again {}",
}
VERDICTS: dict[Verdict, str] = {
    "happened": "that it happened",
    "did_not_happen": "that it did not happen and will not",
    "send_again": "that it must be sent again, and may then happen twice",
}


def sentence(action: Action, verdict: Verdict | None, wanted: Filter, count: int) -> str:
    """`cancel 1,284 entries that are pending or retry, of operation stripe.charges or below it`."""
    one = f"1 entry {conditions(wanted, be='is')}"
    said = VERBS[action].format(one if count == 1 else f"{count:,} entries {conditions(wanted)}")
    return f"{said}: {VERDICTS[verdict]}" if verdict else said


def asks_again(sentence: str) -> bool:
    """Whether it is the sentence of `again`, which only a process with the app's secret carries out."""
    return sentence.startswith(VERBS["again"].format(""))


def conditions(wanted: Filter, *, be: str = "are") -> str:
    """The filter in words: `that are failed, for destination 'crm', enqueued before 2026-01-31T12:00:00Z`."""
    return ", ".join(_conditions(wanted, be))


def _conditions(wanted: Filter, be: str) -> Iterator[str]:
    states = list(dict.fromkeys(wanted.states))
    yield f"that {be} {' or '.join([', '.join(states[:-1]), states[-1]] if len(states) > 1 else states)}"
    if wanted.suspended:
        yield f"that {be} suspended"
    if wanted.operation is not None:
        yield f"of operation {wanted.operation!r} or below it"
    if wanted.destination is not None:
        yield f"for destination {wanted.destination!r}"
    if wanted.parent is not None:
        names = {"key": "under parent", "env": "of env", "scope": "of scope", "source": "of source"}
        for name, words in names.items():
            if (value := getattr(wanted.parent, name)) is not None:
                yield f"{words} {value!r}"
    if wanted.parent_prefix is not None:
        yield f"under parents that begin with {wanted.parent_prefix!r}"
    for member in wanted.payload:
        yield f"with {member.path!r} = {member.value!r} in the payload"
    if wanted.ordering_key is not None:
        yield f"of ordering key {wanted.ordering_key!r}"
    if wanted.reason is not None:
        yield f"with {wanted.reason!r} in the reason"
    if wanted.since is not None:
        since = _moment(wanted.since)  # what waits may be due in the future
        yield f"ended since {since}" if wanted.is_ended else f"due at {since} or later"
    if wanted.enqueued_since is not None:
        yield f"enqueued since {_moment(wanted.enqueued_since)}"
    if wanted.enqueued_before is not None:
        yield f"enqueued before {_moment(wanted.enqueued_before)}"


def _moment(when: datetime | timedelta) -> str:
    if isinstance(when, timedelta):
        return f"{when.total_seconds():g} s ago"
    return when.astimezone(UTC).isoformat().replace("+00:00", "Z")


# --- the command


def command_line(action: Action, verdict: Verdict | None, wanted: Filter) -> str:
    """The command that decides about the same entries: `outbox cancel --destination crm --reason REASON`."""
    words = ["outbox", action, *_options(wanted)]
    if verdict is not None:
        words.append(f"--{verdict.replace('_', '-')}")
    return f"{shlex.join(words)} --reason REASON"


def _options(wanted: Filter) -> Iterator[str]:
    for state in dict.fromkeys(wanted.states):
        yield f"--state={state}"
    if wanted.suspended:
        yield "--suspended"
    parent = wanted.parent
    named = {"operation": wanted.operation, "destination": wanted.destination}
    named |= {} if parent is None else {"parent": parent.key, "env": parent.env}
    named |= {} if parent is None else {"scope": parent.scope, "source": parent.source}
    named |= {"parent-prefix": wanted.parent_prefix}
    named |= {"ordering-key": wanted.ordering_key, "reason-contains": wanted.reason}
    yield from (f"--{name}={value}" for name, value in named.items() if value is not None)
    yield from (f"--payload={member}" for member in wanted.payload)
    moments = {"since": wanted.since, "enqueued-since": wanted.enqueued_since}
    moments["enqueued-before"] = wanted.enqueued_before
    yield from (f"--{name}={_option(when)}" for name, when in moments.items() if when is not None)


def _option(when: datetime | timedelta) -> str:
    return f"{int(when.total_seconds())}s" if isinstance(when, timedelta) else _moment(when)
