"""The dashboard: a page for operators, and a JSON API under the same rights. `outbox web` runs it; an app can mount it.

    app.mount("/outbox", Dashboard(os.environ["DATABASE_URL"], authenticate=operator_of))

Everything that it shows or decides is a function in `dispatchers.admin`. `views.py` and `actions.py` hold what a page needs:
one line gives the page, the JSON answer and its part of the OpenAPI document. `pages/` holds the registrations.
"""

from outbox.extras import missing

try:
    from dispatchers.dashboard.access import Identity, Role
    from dispatchers.dashboard.app import Dashboard
    from dispatchers.dashboard.fleet import FleetDashboard
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("starlette", "jinja2", "anyio"):
        raise
    raise missing("dispatchers.dashboard", "dashboard", error) from error

__all__ = ["Dashboard", "FleetDashboard", "Identity", "Role"]
