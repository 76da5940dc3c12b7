"""The options that select entries: the same for `list` and for decisions in bulk."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from dispatchers.admin.read.plain_values import instant, span
from dispatchers.cli import options

if TYPE_CHECKING:
    from dispatchers.admin.read.entry_filter import Filter, ParentWanted

WAITING = ("pending", "sending", "retry", "uncertain")
ENDED = ("delivered", "failed", "cancelled")

Given: TypeAlias = Mapping[str, Any]
"""The values of the options, by their names in Python."""

_OPTIONS = (
    click.option(
        "--state", "states", multiple=True, type=click.Choice([*WAITING, *ENDED]), help="Only this state; repeatable."
    ),
    options.once_option(
        "--operation", help="Only this operation and those below it: stripe, or stripe.refunds.create."
    ),
    options.once_option("--destination", help="Only entries for this destination."),
    options.once_option("--parent", help="Only entries under this parent key, e.g. an Idempotency-Key."),
    options.once_option("--parent-prefix", help="Only entries whose parent key begins with this: campaign-7:."),
    click.option(
        "--payload",
        multiple=True,
        metavar="MEMBER=VALUE",
        help="Only entries whose payload has this: campaign=spring, or order.country=FR; repeatable.",
    ),
    options.env_option,
    options.any_scope_option,
    options.any_source_option,
    options.once_option("--ordering-key", help="Only entries of this ordering key."),
    click.option("--suspended", is_flag=True, help="Only entries that an operator or a check suspended."),
    options.once_option("--reason-contains", help="Only entries whose reason contains this text."),
    options.once_option(
        "--since",
        type=options.Since(),
        help="Only entries that became due, or finished, since then: 15m, 2h, 7d or an instant.",
    ),
    options.once_option("--enqueued-since", type=options.Since(), help="Only entries enqueued since then."),
    options.once_option(
        "--enqueued-before", type=options.Since(), help="Only entries enqueued before then: older than 2h."
    ),
)
_NAMES = (
    *("states", "operation", "destination", "parent", "parent_prefix", "payload", "env", "scope", "source"),
    *("ordering_key", "suspended", "reason_contains", "since", "enqueued_since", "enqueued_before"),
)


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command gets them as one mapping, `given`."""

    @wraps(command)
    def with_given(**values: Any) -> Any:
        given = {name: values.pop(name) for name in _NAMES}
        return command(given=given, **values)

    for option in reversed(_OPTIONS):
        with_given = option(with_given)
    return with_given


def is_empty(given: Given, *, env_selects: bool = True) -> bool:
    """Whether no option was given that selects entries. An empty text and `0s` are values. OUTBOX_ENV selects nothing: it names
    the env of a parent.
    """
    if env_selects and was_given("env"):
        return False
    return all(value in (None, (), False) for name, value in given.items() if name != "env")


def as_options(given: Given) -> str:
    """The given options that select entries, as on the command line. Without `--since`, which the list itself states."""
    parts = []
    for name in _NAMES:
        value = given[name]
        if value in (None, (), False) or name == "since" or (name == "env" and not was_given("env")):
            continue
        option = "--state" if name == "states" else "--" + name.replace("_", "-")
        values = value if isinstance(value, tuple) else (value,)
        parts += [option if each is True else f"{option} {_written(each)}" for each in values]
    return " ".join(parts)


def _written(value: Any) -> str:
    match value:
        case timedelta():
            return span(value)
        case datetime():
            return instant(value)
        case _:
            return shlex.quote(str(value))


def has_only(given: Given, option: str) -> bool:
    return given[option] is not None and is_empty({**given, option: None})


def filter_of(given: Given, states: Sequence[str]) -> "Filter":
    """The filter that the options make. states: those that it has unless some are given."""
    from dispatchers.admin.read.entry_filter import Filter
    from dispatchers.admin.read.payload_filter import Member
    from outbox.keys import check_field

    fields = {"operation": "operation", "destination": "destination", "ordering_key": "ordering_key"}
    for name, field in (fields | {"parent_prefix": "parent"}).items():
        if given[name] is not None:
            check_field(field, given[name])
    env = given["env"]
    if given["parent"] is None and not was_given("env"):
        env = None  # the variable names the env of a parent; entries of another env must be found too
    parent = env, given["parent"], given["scope"], given["source"]
    names = (*fields, "parent_prefix", "suspended", "since", "enqueued_since", "enqueued_before")
    return Filter(
        states=given["states"] or states,
        parent=parent_wanted(*parent) if any(value is not None for value in parent) else None,
        payload=tuple(Member.parse(text) for text in given["payload"]),
        reason=given["reason_contains"],
        **{name: given[name] for name in names},
    )


def parent_wanted(env: str | None, parent: str | None, scope: str | None, source: str | None) -> "ParentWanted":
    from dispatchers.admin.read.entry_filter import ParentWanted
    from outbox.keys import ParentKey, check_field

    for name, value in (("env", env), ("parent", parent), ("scope", scope), ("source", source)):
        if value is not None:
            check_field(name, value)
    if parent is not None and scope is not None and source is not None:
        ParentKey(parent, scope=scope, source=source)  # raises for what no parent can be
    return ParentWanted(parent, env or None, scope, source)


def was_given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is click.core.ParameterSource.COMMANDLINE
