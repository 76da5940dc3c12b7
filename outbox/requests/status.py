"""The outcome of a request: the read side of a status URL."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from outbox.configuration import Configuration
from outbox.entries.status import EntryStatus, entries_of_request
from outbox.errors import InvalidValue
from outbox.keys import check_field, check_id
from outbox.requests.accepted import poll_after
from outbox.requests.responses import Response, answer_of
from outbox.sessions.session import flush_all
from outbox.sql.clock import clock
from outbox.sql.connections.requirements import require_connection
from outbox.sql.statements import stored_body

RequestState = Literal["accepted", "leased", "succeeded", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """The present status of one request.

    state: succeeded and failed are final, as `response.status` shows. accepted: the request waits for its entries.
    entries: the entries that it caused, oldest first.
    response: the final response, as a retry gets it. None until there is one, or if the partition of its body was dropped by
        hand.
    """

    id: UUID
    state: RequestState
    entries: list[EntryStatus]
    response: Response | None
    retry_after: timedelta | None
    created_at: datetime
    answered_at: datetime | None


def check_sources(sources: object) -> None:
    """Raise `InvalidValue` unless these are names of sources."""
    if isinstance(sources, str) or not isinstance(sources, Collection):
        raise InvalidValue("sources", sources, "must be a collection of names, such as ('http',)")
    for source in sources:
        check_field("source", source)


def read_request(
    configuration: Configuration, session: Session, id: UUID, scope: str, sources: Collection[str]
) -> RequestStatus | None:
    """The request with this id, if it has this scope and one of these sources."""
    check_id("id", id)
    check_field("scope", scope)
    check_sources(sources)
    flush_all(session)
    tables = configuration.tables
    record = tables.record
    # Requests with a `BodyKey` have the source with the suffix `.body`.
    stored = [*sources, *(f"{source}.body" for source in sources)]
    mine = (record.c.id == id, record.c.env == configuration.env, record.c.scope == scope, record.c.source.in_(stored))
    asked = select(record, stored_body(record).label("answer"), clock().label("now")).where(*mine)
    connection = session.connection()
    require_connection(connection, configuration.schema)
    row = connection.execute(asked).one_or_none()
    if row is None:
        return None
    is_final = row.answered_at is not None
    return RequestStatus(
        id=row.id,
        state=row.state,
        entries=entries_of_request(connection, configuration, id),
        response=None
        if not is_final or row.answer is None
        else answer_of(configuration, row.id, row.status, row.answer, row.headers),
        retry_after=None if is_final else poll_after(row.now - row.created_at),
        created_at=row.created_at,
        answered_at=row.answered_at,
    )
