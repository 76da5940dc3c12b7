"""The pages, in the order of the navigation, and the actions."""

from dispatchers.dashboard.actions import Action
from dispatchers.dashboard.pages import (
    audit,
    bulk,
    destinations,
    dispatchers,
    entries,
    entry,
    groups,
    overview,
    proposals,
    requests,
    schedules,
    search,
    tables,
    uncertain,
)
from dispatchers.dashboard.views import View

VIEWS: tuple[View, ...] = (
    uncertain.VIEW,
    overview.VIEW,
    entries.VIEW,
    entry.VIEW,
    bulk.VIEW,
    proposals.VIEW,
    proposals.PROPOSAL,
    destinations.VIEW,
    groups.VIEW,
    groups.GROUP,
    requests.VIEW,
    requests.REQUEST,
    schedules.VIEW,
    schedules.SCHEDULE,
    dispatchers.VIEW,
    tables.VIEW,
    audit.VIEW,
    search.VIEW,
)
ACTIONS: tuple[Action, ...] = (
    *entry.ACTIONS,
    *bulk.ACTIONS,
    *proposals.ACTIONS,
    *destinations.ACTIONS,
    *groups.ACTIONS,
    *schedules.ACTIONS,
)
