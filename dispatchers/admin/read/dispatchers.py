"""Whether the dispatchers that run are alike, and whether one of them serves an operation. Pure."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatchers.names import prefixes
from dispatchers.store.records.heartbeats import DispatcherSeen

MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting that live dispatchers of the same operations have differently. values: each with the dispatchers that have it."""

    setting: str
    values: list[tuple[Any, list[str]]]

    @property
    def text(self) -> str:
        """A text such as `lease: 60.0 (web-1:812) or 90.0 (web-2:77)`. Of lists: what some of them have, and others have not."""
        shown = _own_members([value for value, _ in self.values]) or [json.dumps(value) for value, _ in self.values]
        texts = [f"{value} ({some_of(names)})" for value, (_, names) in zip(shown, self.values, strict=True)]
        more = len(texts) - MAX_NAMED
        values = " or ".join(texts[:MAX_NAMED]) + (f" or {more} other values" if more > 0 else "")
        return f"{self.setting}: {values}"


def _own_members(values: Sequence[Any]) -> list[str] | None:
    """Of each list what not all of them have; None if these are no lists of different members."""
    if not all(isinstance(value, list) for value in values):
        return None
    common = set.intersection(*map(set, values))
    own = [sorted(set(value) - common) for value in values]
    return [f"with {some_of(each)}" if each else "without" for each in own] if any(own) else None


def some_of(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def live(dispatchers: Collection[DispatcherSeen]) -> list[DispatcherSeen]:
    return [each for each in dispatchers if each.is_live]


def readable(dispatchers: Collection[DispatcherSeen]) -> list[DispatcherSeen]:
    """The live ones whose settings this release can read."""
    return [each for each in live(dispatchers) if each.is_readable]


def differences(dispatchers: Collection[DispatcherSeen]) -> list[Difference]:
    """The differences between live dispatchers that share an operation. One that only some of them serve is no difference."""
    fleet = readable(dispatchers)
    flat = {each.settings_digest: _flat(each.settings) for each in fleet}
    serving: dict[str, set[str]] = {}  # digests: a fleet of a thousand has a few
    for each in fleet:
        for operation in each.operations:
            serving.setdefault(operation, set()).add(each.settings_digest)
    differing = {
        setting for digests in serving.values() for setting in _differing([flat[digest] for digest in digests])
    }
    return [Difference(setting=setting, values=_values(fleet, setting, flat)) for setting in sorted(differing)]


def _differing(fleet: Sequence[Mapping[str, Any]]) -> set[str]:
    """The settings that two of them have differently."""
    first: dict[str, Any] = {}
    return {
        setting
        for settings in fleet
        for setting, value in settings.items()
        if first.setdefault(setting, value) != value
    }


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Each setting by its name; those of an operation as `stripe: timeout`, those of a schedule as `schedule report: jitter`."""
    flat = {name: value for name, value in settings.items() if name not in ("operations", "schedules")}
    for schedule, declared in settings.get("schedules", {}).items():
        flat |= {f"schedule {schedule}: {name}": value for name, value in declared.items()}
    for operation, declared in settings["operations"].items():
        flat |= {f"{operation}: {name}": value for name, value in declared.items()}
    return flat


def _values(
    dispatchers: Sequence[DispatcherSeen], setting: str, flat: Mapping[str, Mapping[str, Any]]
) -> list[tuple[Any, list[str]]]:
    named: dict[str, tuple[Any, list[str]]] = {}
    for each in dispatchers:
        settings = flat[each.settings_digest]
        if setting in settings:
            value = settings[setting]
            named.setdefault(json.dumps(value, sort_keys=True), (value, []))[1].append(each.name)
    return list(named.values())


def failure_fields(operation: str, dispatchers: Collection[DispatcherSeen]) -> frozenset[str]:
    """The members of a failed answer that every live dispatcher of the operation declares readable; none without one."""
    found = [set(declared.get("failure_fields", ())) for declared in _declared(operation, dispatchers)]
    return frozenset(set.intersection(*found) if found else ())


def search_of(operation: str, dispatchers: Collection[DispatcherSeen]) -> str | None:
    """Where at the service an operator finds the effect, as a live dispatcher declares it, with `{key}` in it."""
    found = (declared.get("search") for declared in _declared(operation, dispatchers))
    return next((str(search) for search in found if search), None)


def _declared(operation: str, dispatchers: Collection[DispatcherSeen]) -> Iterator[Mapping[str, Any]]:
    """What each live dispatcher that serves the operation declares of it."""
    for each in live(dispatchers):
        registered = each.settings.get("operations", {})
        name = next((name for name in prefixes(operation) if name in registered), None)
        if name is not None:
            yield registered[name]


def served_destinations(dispatchers: Collection[DispatcherSeen]) -> set[str]:
    """The destinations that the operations of live dispatchers have by default, also those for which nothing waits."""
    return {operation.partition(".")[0] for each in live(dispatchers) for operation in each.operations}


def is_served(operation: str, dispatchers: Collection[DispatcherSeen]) -> bool:
    """Whether a live dispatcher has registered the operation, or a prefix of it; or may have, if its settings cannot be read."""
    names = list(prefixes(operation))
    return any(not each.is_readable or any(name in each.operations for name in names) for each in live(dispatchers))
