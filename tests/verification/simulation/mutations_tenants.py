"""The guards of accounts and scopes that share a service, each removed by itself."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import partialmethod
from typing import Any

from dispatchers.delivery import Deferred
from dispatchers.flow_control.state import News
from dispatchers.pipeline import flow_monitor
from dispatchers.pipeline.scheduler import Turns
from outbox import keys
from simulation.mutants import Patch, around, without


def refused_as_a_whole(original: Any, outcome: Any, destination: str) -> Any:
    return original(replace(outcome, account=None) if isinstance(outcome, Deferred) else outcome, destination)


def accepted_everywhere(original: Any, outcome: Any, destination: str) -> Any:
    is_of_account = isinstance(outcome, Deferred) and outcome.account is not None
    return News(answered=True) if is_of_account else original(outcome, destination)


def without_scope(original: Any, env: str, scope: str, source: str, key: str) -> Any:
    return original(env, "", source, key)


def from_the_first_on(turns: Turns, original: Any, *, with_held: bool) -> Iterator[str]:
    """Whatever the last claim has asked."""
    turns._names = OrderedDict.fromkeys(sorted(turns._names))
    yield from original(turns, with_held=with_held)


TENANT_MUTANTS: dict[str, Patch] = {
    "a refused account holds the whole destination": around(flow_monitor, "news_of", refused_as_a_whole),
    "the scope is no part of a key": around(keys, "_known_parent", without_scope),
    "a refused account does not hold its own destination": around(flow_monitor, "news_of", accepted_everywhere),
    "each claim begins with the same destination": without(Turns, "next", partialmethod(from_the_first_on, Turns.next)),
}
