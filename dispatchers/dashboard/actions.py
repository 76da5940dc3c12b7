"""An action: one registration gives the form's POST, the JSON API's POST and its part of the OpenAPI document."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints
from uuid import UUID

from sqlalchemy import Connection, Engine

from dispatchers.admin.decide.again import why_no_keys
from dispatchers.admin.decide.entry_version import what_changed
from dispatchers.dashboard.access import Role
from dispatchers.dashboard.failures import Failure
from dispatchers.dashboard.views import Context, summary_of
from outbox.configuration import Configuration

VERSION = "The entry's `version`, as its view returned it: the decision is refused if the entry has changed since."


@dataclass(frozen=True, slots=True, kw_only=True)
class Deciding(Context):
    """What an action's function decides with: a connection in a transaction."""

    connection: Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidingInBatches(Context):
    """What an action's function decides with, if it makes several transactions: each statement has the dashboard's limit."""

    engine: Engine


class Action:
    """One action of the dashboard: a form, and a POST of the JSON API.

    path: below the dashboard's prefix; the JSON API has it at `/api` and this path.
    run: decides, and returns what the JSON API answers with. It raises for what it refuses. Its annotations name the dataclass of
        the parameters, those of the path included, and that of the answer; its docstring begins with the summary.
    done: what the page reports after it.
    template: if given, the form is answered by this page, with the answer as `result`; else by a redirect to the page that it
        came from.
    in_batches: whether `run` makes its own transactions; then it gets a `DecidingInBatches`.
    """

    def __init__(
        self,
        name: str,
        path: str,
        run: Callable[[Any, Any], Any],
        *,
        done: str = "",
        role: Role = Role.OPERATOR,
        template: str | None = None,
        in_batches: bool = False,
    ) -> None:
        self.name = name
        self.path = path
        self.run = run
        self.done = done
        self.role = role
        self.template = template
        self.in_batches = in_batches
        self.summary = summary_of(run, name)
        hints = get_type_hints(run)
        self.form: type = hints["form"]
        self.result: type = hints["return"]


def require_alone(deciding: Context, decision: str) -> None:
    """Refuse a decision that needs a second person."""
    needed = "send_again" if decision == "new_key" else decision
    if needed in deciding.second_person:
        raise Failure(
            409,
            "second_person",
            f"{decision!r} needs a second person here: propose {needed!r}, and another operator confirms",
        )


def require_version(deciding: Deciding, id: UUID, decision: str, version: str | None) -> None:
    """Refuse a decision about an entry that has changed since the operator read it. None: the client did not say what it read."""
    if version is None:
        return
    changed = what_changed(deciding.connection, deciding.tables, id, version, may_have_ended=decision == "again")
    if changed is not None:
        raise Failure(409, "changed", f"{changed}; read it again before you decide", page=f"/entries/{id}")


def require_keys(context: Context, connection: Connection) -> Configuration:
    """The app's configuration, to derive keys. Refuse to ask again in a dashboard that has not the app's secret."""
    why = why_no_keys(connection, context.tables, context.configuration)
    if context.configuration is None or why is not None:
        raise no_keys(why)
    return context.configuration


def no_keys(why: str | None) -> Failure:
    """why: as of `why_no_keys`."""
    return Failure(409, "secret", f"{why}; nothing was changed")
