"""Whether the dispatchers that run are alike, and whether one of them serves an operation. Pure."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from dispatchers.names import prefixes
from dispatchers.store.heartbeats import DispatcherSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting that live dispatchers of the same operations have differently. values: each with the dispatchers that have it."""

    setting: str
    values: list[tuple[Any, list[str]]]

    @property
    def text(self) -> str:
        """As in `lease: 60.0 (web-1:812) or 90.0 (web-2:77)`."""
        values = " or ".join(f"{json.dumps(value)} ({', '.join(names)})" for value, names in self.values)
        return f"{self.setting}: {values}"


def live(dispatchers: Collection[DispatcherSeen]) -> list[DispatcherSeen]:
    return [each for each in dispatchers if each.is_live]


def differences(dispatchers: Collection[DispatcherSeen]) -> list[Difference]:
    """In what live dispatchers differ that share an operation. What only some of them serve is no difference."""
    alike = {each.settings_digest: each for each in live(dispatchers)}
    differing = {
        setting
        for one, other in combinations(alike.values(), 2)
        if set(one.operations) & set(other.operations)
        for setting, value in _flat(one.settings).items()
        if value != _flat(other.settings).get(setting, value)
    }
    return [Difference(setting=setting, values=_values(live(dispatchers), setting)) for setting in sorted(differing)]


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Each setting by its name; those of an operation as `stripe.timeout`."""
    flat = {name: value for name, value in settings.items() if name != "operations"}
    for operation, declared in settings["operations"].items():
        flat |= {f"{operation}: {name}": value for name, value in declared.items()}
    return flat


def _values(dispatchers: Sequence[DispatcherSeen], setting: str) -> list[tuple[Any, list[str]]]:
    values: list[tuple[Any, list[str]]] = []
    for each in dispatchers:
        if setting not in (settings := _flat(each.settings)):
            continue
        names = next((names for value, names in values if value == settings[setting]), None)
        if names is None:
            values.append((settings[setting], [each.name]))
        else:
            names.append(each.name)
    return values


def is_served(operation: str, dispatchers: Collection[DispatcherSeen]) -> bool:
    """Whether a live dispatcher has registered the operation, or a prefix of it."""
    return any(name in each.operations for each in live(dispatchers) for name in prefixes(operation))
