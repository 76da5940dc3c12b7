"""The function of a schedule, in the transaction that records its instant as enqueued."""

from sqlalchemy import Connection
from sqlalchemy.orm import Session, SessionTransaction

from dispatchers.callbacks import Cause, ScheduleFailed
from dispatchers.errors import CallbackError
from dispatchers.periodic.schedules import Schedule, Tick
from dispatchers.store.app_code.callback_plan import Call, Calling
from dispatchers.store.records.schedules import has_entries, lock_tick, record_tick
from outbox.configuration import Configuration
from outbox.keys import parent_id
from outbox.sessions.session import state_of


class TickCause(Cause):
    """The open claim of the session: entries that the function enqueues derive from the schedule and its instant."""

    def before_commit(self, committed: SessionTransaction | None) -> None:
        if committed is None:
            raise CallbackError(
                "the function of a schedule must not commit: what it writes commits together with the record of its instant"
            )


def call_tick(
    connection: Connection, configuration: Configuration, session: Session, schedule: Schedule, tick: Tick
) -> Calling:
    """Call the schedule's function for `tick`, and record it. Do nothing if it was recorded, or another dispatcher is at it.

    If its parent has entries, the row was lost or is older than they are: the function is not called again.
    """
    tables = configuration.tables
    row = lock_tick(connection, tables, tick)
    if row is None:
        return False
    id = parent_id(configuration.env, tick.parent)
    if not has_entries(connection, tables, id):
        state_of(session).claim = TickCause(configuration, configuration.keyring.current, tick.parent, None)
        yield Call(schedule.function, tick, ScheduleFailed)
    if not record_tick(connection, tables, schedule, tick, row, id):
        raise ConnectionError(f"schedule {schedule.name!r}: another dispatcher has recorded the instant meanwhile")
    return True
