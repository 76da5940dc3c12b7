"""A view: one registration gives the page, the JSON answer and its part of the OpenAPI document."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, get_type_hints

from sqlalchemy import Connection

from dispatchers.admin.read.entries import EntrySummary
from dispatchers.dashboard.access import Identity, Role
from outbox.configuration import Configuration
from outbox.encryption import Encryption
from outbox.sql.schema.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What every view and action is given: who asks, and which decisions another operator must confirm.

    configuration: the app's, if this dashboard has its secret.
    """

    tables: Tables
    identity: Identity
    second_person: Collection[str] = ()
    configuration: Configuration | None = None


def encryption_of(context: Context) -> Encryption | None:
    """The app's data keys, if this dashboard has them."""
    return None if context.configuration is None else context.configuration.encryption


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Context):
    """What a view's function reads with: a connection that cannot write."""

    connection: Connection


class View:
    """One view of the dashboard: its page, and its JSON answer.

    name: of the JSON operation. read: returns what is shown; the JSON answer is its fields. Its annotations name the dataclass
        of the view's parameters, those of the path included, and that of the answer; its docstring begins with the summary.
    path: below the dashboard's prefix, with parameters such as `/entries/{id}`; by default the name. See `api_path` too.
    title: by default the name. template: the page, which gets the answer as `result`, and the parameters as `query`.
    in_navigation: whether the navigation lists it, by its title, in the order of registration.
    is_live: whether the page refreshes by itself.
    decides: whether the page offers decisions. Then it is read where decisions are written, for an identity that may decide: it
        must not be older than a replica, and the dashboard's role may not read what the decisions depend on.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[Reading, Any], Any],
        *,
        path: str | None = None,
        title: str | None = None,
        template: str | None = None,
        role: Role = Role.VIEWER,
        in_navigation: bool = True,
        is_live: bool = True,
        decides: bool = False,
    ) -> None:
        self.name = name
        self.read = read
        self.path = path or f"/{name}"
        self.title = title or name.capitalize()
        self.template = template or f"{name}.html"
        self.role = role
        self.in_navigation = in_navigation
        self.is_live = is_live
        self.decides = decides
        self.summary = summary_of(read, name)
        hints = get_type_hints(read)
        self.query: type = hints["query"]
        self.result: type = hints["return"]

    @property
    def api_path(self) -> str:
        """The path of the JSON answer, below `/api`: the page's own, and for the first page its name."""
        return f"/{self.name}" if self.path == "/" else self.path


def summary_of(function: Callable[..., Any], name: str) -> str:
    """The first line of its docstring; `name` where Python has removed it (`-OO`)."""
    return (function.__doc__ or name).partition("\n")[0].removesuffix(".")


def without_keys(value: Any) -> Any:
    """`value` without the child keys of its entries: with a key one may claim to be the sender."""
    if isinstance(value, list):
        return [without_keys(each) for each in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {each.name: without_keys(getattr(value, each.name)) for each in fields(value)}
    return replace(value, **changed | ({"child_key": None} if isinstance(value, EntrySummary) else {}))
