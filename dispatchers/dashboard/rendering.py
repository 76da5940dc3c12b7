"""The pages' templates, and the functions that they use: addresses under the prefix, times, and the equivalent command."""

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request

from dispatchers.admin.decide.again import ASKED_ALREADY
from dispatchers.admin.read.plain_values import instant
from dispatchers.dashboard.charts import durations_chart, sends_chart
from dispatchers.dashboard.decision_texts import BULK, TEXTS
from dispatchers.dashboard.units import bytes_text, duration_text, limited_text, number_text, relative_text

HERE = Path(__file__).parent
STATIC = HERE / "static"
STAMP = sha256(b"".join(path.read_bytes() for path in sorted(STATIC.rglob("*")) if path.is_file())).hexdigest()[:10]
"""A hash of the scripts and styles: part of their addresses, so that a browser may keep each version."""

HEADER_WIDTH = 990
"""Of the header in pixels, without what differs: the badges, the database, the user's name and the link to sign out."""
SIGN_OUT_WIDTH, BADGE_MARGIN, CHARACTER_WIDTH = 60, 16, 8
DATABASE_CHARACTERS, NAME_CHARACTERS = 26, 16
"""The header shows so much of a name: `.database` and `.who` in dashboard.css."""


@cache
def environment() -> Environment:
    """The templates, which escape every value. They are compiled once, for all dashboards of the process."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"instant": instant, "json": pretty_json}
    made.filters |= {"bytes": bytes_text, "number": number_text, "duration": duration_text, "limited": limited_text}
    made.globals |= {
        "time": time_element,
        "menu_width": menu_width,
        "sends_chart": sends_chart,
        "durations_chart": durations_chart,
        "command": command_text,
        "options": command_options,
        "decision_texts": TEXTS,
        "bulk_texts": BULK,
        "asked_already": ASKED_ALREADY,
    }
    return made


def prefix_of(request: Request) -> str:
    """The path under which the dashboard is mounted; empty at the root."""
    path: str = request.scope.get("root_path", "")
    return path.rstrip("/")


def address(prefix: str, path: str, query: Mapping[str, Any] | None = None) -> str:
    """A page's address. query: its parameters; those without a value are left out."""
    pairs = [
        (name, each)
        for name, value in (query or {}).items()
        for each in (value if isinstance(value, list | tuple) else [value])
        if each not in (None, "", False)
    ]
    return f"{prefix}{path}" + (f"?{urlencode(pairs)}" if pairs else "")


def local(back: str) -> str:
    """A page of the dashboard by its path below the prefix; the first page for anything else, such as another site."""
    return back if back.startswith("/") and not back.startswith(("//", "/\\")) else "/"


def with_done(prefix: str, back: str, action: str) -> str:
    """The address of the page that an action came from, which then reports the action."""
    path, _, query = local(back).partition("?")
    kept = [(name, value) for name, value in parse_qsl(query) if name != "done"]
    return f"{prefix}{path}?{urlencode([*kept, ('done', action)])}"


def back_of(request: Request) -> str | None:
    """The page of this dashboard that sent the request, by its path below the prefix."""
    referer, prefix = urlsplit(request.headers.get("referer", "")), prefix_of(request)
    if referer.netloc != request.headers.get("host") or not referer.path.startswith(f"{prefix}/"):
        return None
    return local(referer.path.removeprefix(prefix) + (f"?{referer.query}" if referer.query else ""))


def time_element(at: datetime | None, now: datetime, empty: str = "") -> Markup:
    """An instant as `3 min ago` or `in 3 min`, by the database's clock. A script counts on from `data-now`, because the reader's
    clock may differ, and shows the exact time in the reader's time zone.
    """
    if at is None:
        return Markup("{}").format(empty)
    element = Markup('<time datetime="{0}" title="{0}" data-now="{1}">{2}</time>')
    return element.format(instant(at), instant(now), relative_text(at, now))


def menu_width(badges: Mapping[str, str], database: str | None, name: str, sign_out: str | None) -> int:
    """Up to this width of the screen, in pixels, the pages are in a menu: else the header would not show all of them in its row.

    database: which one, if there are several. name: of the user; empty without one.
    """
    width = HEADER_WIDTH + sum(BADGE_MARGIN + CHARACTER_WIDTH * len(text) for text in badges.values() if text)
    width += CHARACTER_WIDTH * min(len(name), NAME_CHARACTERS) + (SIGN_OUT_WIDTH if sign_out else 0)
    if database is not None:
        width += CHARACTER_WIDTH * min(len(f"Database: {database}  "), DATABASE_CHARACTERS + 2)
    return width


def command_text(*words: Any) -> str:
    """A command line as a shell reads it."""
    return shlex.join(str(word) for word in words if word is not None)


def command_options(query: Mapping[str, Sequence[Any]], *flags: str) -> list[str]:
    """A page's parameters as options of a command. flags: those without a value."""
    given = [(name, value) for name, values in query.items() for value in values if value]
    return [word for name, value in given for word in ([option(name)] if name in flags else [option(name), str(value)])]


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def pretty_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
