"""The ordering groups: which are blocked and by what, what waits in one; and the decision to release one."""

from dataclasses import dataclass
from uuid import UUID

from dispatchers.admin.decide import decisions
from dispatchers.admin.read.groups import GroupDetails, GroupPage, list_groups, read_group
from dispatchers.dashboard.actions import Action, Deciding
from dispatchers.dashboard.parameters import parameter
from dispatchers.dashboard.views import Reading, View

GROUPS_DEFAULT = 25
MAX_GROUPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsQuery:
    """Which groups, and from where."""

    every: bool = parameter("Every group in which entries wait, not only the blocked ones.", False)
    after: str | None = parameter("The ordering key where the previous page ended.", None)
    limit: int = parameter("How many groups at most.", GROUPS_DEFAULT, minimum=1, maximum=MAX_GROUPS)


def read(reading: Reading, query: GroupsQuery) -> GroupPage:
    """List the ordering groups that are blocked, or all."""
    connection, tables = reading.connection, reading.tables
    return list_groups(connection, tables, max_groups=query.limit, after=query.after, only_blocked=not query.every)


VIEW = View("groups", read, title="Ordering groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuery:
    """Which group."""

    key: str = parameter("The ordering key.")


def read_one(reading: Reading, query: GroupQuery) -> GroupDetails:
    """Show one ordering group with the first entries that wait in it."""
    return read_group(reading.connection, reading.tables, query.key)


GROUP = View("group", read_one, title="Ordering group", in_navigation=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelease:
    """About one ordering group."""

    key: str = parameter("The ordering key.")
    reason: str = parameter("Why; it is recorded with your name.")
    blocked_by: UUID | None = parameter(
        "The entry that blocks it, as the view returned it: the release is refused if another one blocks it now.", None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReleased:
    """A release that is recorded: the group's next entry is due now."""

    key: str
    actor: str


def _release(deciding: Deciding, form: GroupRelease) -> GroupReleased:
    """Release a blocked ordering group: its next entry is sent."""
    actor, where = deciding.identity.name, (deciding.connection, deciding.tables)
    decisions.release_group(*where, form.key, actor=actor, reason=form.reason, blocked_by=form.blocked_by)
    return GroupReleased(key=form.key, actor=actor)


ACTIONS = (
    Action(
        "release-group", "/groups/release", _release, done="The ordering group is released. Its next entry is due now."
    ),
)
