"""The generated part of docs/providers.md: what each profile states. `python3 dev.py providers` writes it."""

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from dispatchers.adapters.providers import (
    PROVIDERS,
    BodyField,
    GraphQLArgument,
    Header,
    NaturalKey,
    NoKey,
    Operation,
    Profile,
    QueryField,
)
from dispatchers.time_limits import FOREVER, Window

PAGE = Path(__file__).parents[2] / "docs" / "providers.md"
MARK = "<!-- From here on this page is generated: python3 dev.py providers -->"

STORED = {
    "all": "every answer",
    "2xx": "successes",
    "success": "successes",
    "current_state": "gives the present state",
    "duplicate_refused": "refuses the duplicate",
    "nothing": "nothing",
}
COMPARED = {"parameters": "parameters", "body": "the body", "nothing": "nothing", "unknown": "not stated"}


def generated() -> str:
    """The page from the mark on."""
    profiles = sorted(PROVIDERS.values(), key=lambda profile: profile.title.lower())
    parts = [MARK, "", "## All services", "", *_table(profiles), ""]
    for profile in profiles:
        parts += [*_section(profile), ""]
    return "\n".join(parts).rstrip() + "\n"


def write_page() -> None:
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + generated())


def _table(profiles: list[Profile]) -> Iterator[str]:
    yield "| service | key | window | stores | compares | checked |"
    yield "|---|---|---|---|---|---|"
    for each in profiles:
        link = f"[{each.title}](#{re.sub(r'[^a-z0-9 -]', '', each.title.lower()).replace(' ', '-')})"
        windows = dict.fromkeys(_window(each, operation) for operation in each.operations.values())
        compared = COMPARED[each.compares] if each.stores != "nothing" else "-"
        yield f"| {link} | {_place(each)} | {', '.join(windows)} | {STORED[each.stores]} | {compared} | {each.as_of} |"


def _section(profile: Profile) -> Iterator[str]:
    settings = ", ".join(f"{name}=..." for name in profile.settings())
    yield f"### {profile.title}"
    yield ""
    yield f"`from dispatchers.adapters.providers import {profile.name}`, then `{profile.name}({settings})`."
    yield ""
    if profile.window is None and profile.stores != "nothing":
        yield "It publishes no window, so you must give `window=`."
        yield ""
    yield "| operation | request | key | window |"
    yield "|---|---|---|---|"
    for name, each in profile.operations.items():
        route = f"{each.method} {each.path}".rstrip()
        yield f"| `{profile.name}.{name}` | `{route}` | {_place(profile, each)} | {_window(profile, each)} |"
    yield ""
    for name, each in profile.operations.items():
        if each.pause is not None:
            yield f"- After an unknown outcome, `{profile.name}.{name}` waits {_span(each.pause)} before the next attempt."
    for note in profile.notes:
        yield f"- {note}"
    if isinstance(profile.key, NoKey) and profile.key.search:
        yield f"- Search for an entry in doubt: {profile.key.search.replace('{key}', '*the child key*')}."
    yield f"- Sources, read until {profile.as_of}: {', '.join(f'<{source}>' for source in profile.sources)}."


def _place(profile: Profile, operation: Operation | None = None) -> str:
    place = profile.key if operation is None else profile.place_of(operation)
    match place:
        case Header(name=name):
            return f"header `{name}`"
        case BodyField(path=path):
            return f"member `{path}`"
        case QueryField(name=name):
            return f"parameter `{name}`"
        case GraphQLArgument(path=path):
            return f"variable `{path}`"
        case NaturalKey(what=what):
            return f"the request's own: {what}"
        case NoKey():
            return "none"


def _window(profile: Profile, operation: Operation) -> str:
    window: Window = profile.window_of(operation)
    if window is FOREVER:
        return "no end"
    if isinstance(window, timedelta):
        return _span(window)
    return "none" if isinstance(profile.place_of(operation), NoKey) else "not published"


def _span(window: timedelta) -> str:
    minutes = int(window.total_seconds() // 60)
    for size, unit in ((24 * 60, "d"), (60, "h"), (1, "min")):
        if minutes % size == 0 and (unit != "d" or minutes > size):
            return f"{minutes // size} {unit}"
    return str(window)


if __name__ == "__main__":
    write_page()
