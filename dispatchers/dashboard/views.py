"""A view: one registration gives the page, the JSON answer and its part of the OpenAPI document."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from sqlalchemy import Connection

from dispatchers.admin.read.entries import EntrySummary
from dispatchers.dashboard.access import Identity, Role
from dispatchers.dashboard.parameters import Nothing
from outbox.configuration import Configuration
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Context):
    """What a view's function reads with: a connection that cannot write."""

    connection: Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One view of the dashboard.

    path: below the dashboard's prefix, with parameters such as `/entries/{id}`; see `api_path` too.
    query: the dataclass of its parameters, those of the path included.
    read: returns what is shown, an instance of `result`; the JSON answer is its fields.
    template: the page, which gets it as `result`, and the parameters as `query`.
    in_navigation: whether the navigation lists it, by its title, in the order of registration.
    is_live: whether the page refreshes by itself.
    decides: whether the page offers decisions. Then it is read where decisions are written, for an identity that may decide: it
        must not be older than a replica, and the dashboard's role may not read what the decisions depend on.
    """

    name: str
    path: str
    title: str
    summary: str
    read: Callable[[Reading, Any], Any]
    result: type
    template: str
    query: type = Nothing
    role: Role = Role.VIEWER
    in_navigation: bool = True
    is_live: bool = True
    decides: bool = False

    @property
    def api_path(self) -> str:
        """The path of the JSON answer, below `/api`: the page's own, and for the first page its name."""
        return f"/{self.name}" if self.path == "/" else self.path


def without_keys(value: Any) -> Any:
    """`value` without the child keys of its entries: with a key one may claim to be the sender."""
    if isinstance(value, list):
        return [without_keys(each) for each in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {each.name: without_keys(getattr(value, each.name)) for each in fields(value)}
    return replace(value, **changed | ({"child_key": None} if isinstance(value, EntrySummary) else {}))
