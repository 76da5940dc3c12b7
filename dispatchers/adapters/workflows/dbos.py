"""DBOS: enqueues each entry as one workflow in DBOS's tables, with the child key as the workflow's id.

    orders = DbosAdapter(engine=os.environ["DATABASE_URL"], queue="orders", window=FOREVER)
    Dispatcher(..., adapters={"orders": orders})

    outbox.enqueue(session, "orders.fulfil", {"number": "C-1"}, parent="order:C-1")     # to the workflow `orders.fulfil`

The workflow gets the payload as its only argument. The id is a primary key of DBOS. So a second insert of a key fails while DBOS
has the row, and waits while the transaction of the first one is open.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import sqlalchemy as sa
from dbos import DBOSClient, EnqueueOptions, WorkflowSerializationFormat
from dbos import error as dbos_error
from sqlalchemy import exc

from dispatchers.adapters.places import OPERATION, Places, PlacesAdapter, Unsendable
from dispatchers.delivery import (
    Absent,
    CannotTell,
    Deferred,
    Delivered,
    Delivery,
    Finding,
    Found,
    KeyConflict,
    Outcome,
    Rejected,
    Unknown,
)
from dispatchers.steady_clock import steady_clock
from dispatchers.threads import on_own_thread
from dispatchers.time_limits import DEFAULT_RETRY, RetryPolicy, Window
from outbox.errors import ConfigurationError
from outbox.sql.dialect import dialect_of

THREAD: Final = "outbox-dbos"
CONNECT_SECONDS_MIN: Final = 2  # libpq takes no shorter time
LIMITS: Final = sa.text(
    "SELECT set_config('statement_timeout', :limit, true), set_config('lock_timeout', :limit, true),"
    " set_config('idle_in_transaction_session_timeout', :limit, true)"
)
"""For this transaction only, so that a pooler's other clients are not concerned. They end an insert that takes too long, and the
transaction of a process that was stopped before its commit. No setting limits a commit."""


class OutOfTime(Exception):
    """The deadline came before the commit. The transaction is rolled back."""


@dataclass(frozen=True, slots=True)
class Start:
    """One workflow to be enqueued. latest: when its commit may begin at the latest, by `steady_clock`."""

    key: str
    workflow: str
    payload: Any
    latest: float


class DbosAdapter(PlacesAdapter):
    """Enqueues workflows. An app of yours runs them: DBOS's tables must exist, and a worker must listen to the queue.

    engine: the URL of DBOS's system database on PostgreSQL, or an `Engine`, which the adapter does not dispose of.
    queue: the queue of all workflows.
    window: how long DBOS keeps a workflow after its end: FOREVER if nothing deletes workflows; else the shortest time of your own
        clean-up or of Conductor's retention policy.
    workflow: the name of each operation's workflow: a template with `{operation}`, or a mapping from operations to names. An
        entry's `options={"workflow": ...}` replaces it.
    schema: the schema of DBOS's tables. application: the application that owns the workflows, if several share the tables.
    max_connections: the size of the pool that the adapter makes for a URL. Each send takes a connection and a thread.
    """

    def __init__(
        self,
        *,
        engine: str | sa.URL | sa.Engine,
        queue: str,
        window: Window,
        workflow: str | Mapping[str, str] = OPERATION,
        schema: str = "dbos",
        application: str | None = None,
        timeout: timedelta = timedelta(seconds=10),
        retry: RetryPolicy = DEFAULT_RETRY,
        max_connections: int = 5,
    ) -> None:
        if not isinstance(queue, str) or not queue:
            raise ConfigurationError(f"queue={queue!r} must be the name of a DBOS queue")
        if window is None:
            raise ConfigurationError("window=None: DBOS keeps the id of a workflow: give the time, or FOREVER")
        self.window = window
        self.timeout = timeout
        self.retry = retry
        self._queue = queue
        self._application = application
        self._places = Places("workflow", workflow)
        self._own_engine = not isinstance(engine, sa.Engine)
        self._engine = _engine(engine, timeout, max_connections)
        self._client = DBOSClient(
            system_database_engine=self._engine,
            dbos_system_schema=schema,
            lazy=True,
            retry_connection_errors=False,
        )
        self.pinned = f"dbos {self._engine.url.database} {schema}"

    def __repr__(self) -> str:
        return f"DbosAdapter(queue={self._queue!r}, window={self.window!r})"

    async def send(self, delivery: Delivery) -> Outcome:
        try:
            start = self._start(delivery)
        except Unsendable as problem:
            return Rejected(str(problem))
        outcome: Outcome = await on_own_thread(THREAD, self._enqueue, start)
        return outcome

    async def find(self, delivery: Delivery) -> Finding:
        """Insert the workflow, and roll back. A query would not see an earlier attempt whose transaction is still open."""
        try:
            start = self._start(delivery)
        except Unsendable as problem:
            return CannotTell(str(problem))
        finding: Finding = await on_own_thread(THREAD, self._probe, start)
        if finding == Absent() and isinstance(self.window, timedelta) and delivery.age > self.window:
            return CannotTell(f"DBOS has no such workflow, and may have deleted one after {self.window}")
        return finding

    async def aclose(self) -> None:
        """Close the connections. You may use the adapter again afterwards."""
        if self._own_engine:
            self._engine.dispose()

    def _start(self, delivery: Delivery) -> Start:
        workflow = self._places.of(delivery)
        try:
            payload = delivery.payload
        except (ValueError, RecursionError):
            raise Unsendable("the payload cannot be read as JSON") from None
        seconds = delivery.deadline - asyncio.get_running_loop().time()
        return Start(delivery.key, workflow, payload, steady_clock() + seconds * 0.9)

    # --- on a thread

    def _enqueue(self, start: Start) -> Outcome:
        committing = False
        try:
            with self._engine.connect() as connection, connection.begin() as transaction:
                self._insert(connection, start)
                _left(start.latest)  # a thread that is late must not commit: the entry may be sent again
                committing = True
                transaction.commit()
        except dbos_error.DBOSWorkflowIDInUseError as found:
            if found.workflow_name != start.workflow:
                return KeyConflict("another workflow has this id")
            return Delivered(_result(start.key, found), replayed=True)
        except Exception as error:
            return Unknown(f"no answer to the commit: {_name(error)}") if committing else _not_inserted(error)
        return Delivered({"workflow_id": start.key, "status": "ENQUEUED"})

    def _probe(self, start: Start) -> Finding:
        try:
            with self._engine.connect() as connection, connection.begin() as transaction:
                self._insert(connection, start)
                transaction.rollback()
        except dbos_error.DBOSWorkflowIDInUseError as found:
            if found.workflow_name != start.workflow:
                return CannotTell("another workflow has this id")
            return Found(_result(start.key, found))
        except Exception as error:
            return CannotTell(_name(error))
        return Absent()

    def _insert(self, connection: sa.Connection, start: Start) -> None:
        """Insert the workflow's row. Raises `DBOSWorkflowIDInUseError` if there is one."""
        connection.execute(LIMITS, {"limit": f"{int(_left(start.latest) * 1000) + 1}ms"})
        options: EnqueueOptions = {
            "workflow_name": start.workflow,
            "queue_name": self._queue,
            "workflow_id": start.key,
            "workflow_id_reuse_policy": "reject",
            "serialization_type": WorkflowSerializationFormat.PORTABLE,
        }
        if self._application is not None:
            options["application_name"] = self._application
        self._client.enqueue_in_transaction(connection, options, start.payload)


def _engine(given: str | sa.URL | sa.Engine, timeout: timedelta, max_connections: int) -> sa.Engine:
    seconds = timeout.total_seconds() / 3
    if isinstance(given, sa.Engine):
        engine = given
    else:
        try:
            url = sa.make_url(given)
        except exc.ArgumentError:
            raise ConfigurationError(
                "engine must be a URL such as postgresql+psycopg://... (it is not shown)"
            ) from None
        if url.drivername in ("postgresql", "postgres"):
            url = url.set(drivername="postgresql+psycopg")
        if url.drivername != "postgresql+psycopg":
            raise ConfigurationError(f"engine has the driver {url.drivername!r}: DBOS needs postgresql+psycopg")
        engine = sa.create_engine(
            url,
            pool_size=max_connections,
            max_overflow=0,
            pool_timeout=seconds,
            connect_args={"connect_timeout": max(CONNECT_SECONDS_MIN, int(seconds))},
        )
    if not dialect_of(engine).has_catalog:
        raise ConfigurationError(
            f"engine is {dialect_of(engine).name}: only PostgreSQL waits for an open insert of the same id"
        )
    return engine


def _left(latest: float) -> float:
    """The seconds until `latest`. Raises `OutOfTime`."""
    left = latest - steady_clock()
    if left <= 0:
        raise OutOfTime
    return left


def _not_inserted(error: Exception) -> Outcome:
    """What an error before the commit means: the transaction was rolled back."""
    reason = f"nothing was committed: {_name(error)}"
    if isinstance(error, exc.DataError):
        return Rejected(reason)
    return Deferred(reason, cooldown=isinstance(error, exc.ProgrammingError))


def _name(error: Exception) -> str:
    """The error without its text, which may quote the payload."""
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    return f"{type(error).__name__} {state}" if state else type(error).__name__


def _result(key: str, found: dbos_error.DBOSWorkflowIDInUseError) -> dict[str, str]:
    return {"workflow_id": key, "status": found.workflow_status}
