"""What became of a request: the read side of a status URL."""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from outbox.accepted import poll_after
from outbox.configuration import Configuration
from outbox.databases import clock, stored_body
from outbox.keys import check_field, check_id
from outbox.responses import Response
from outbox.status import EntryStatus, entries_of_request

RequestState = Literal["accepted", "leased", "succeeded", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """One request as it stands.

    state: succeeded and failed are final, as `response.status` says; accepted: it waits for its entries.
    entries: what it caused, oldest first.
    response: the final one, as a retry gets it; None until there is one, or if its body's day was dropped by hand.
    retry_after: when to ask again; None if it has a response.
    """

    id: UUID
    state: RequestState
    entries: list[EntryStatus]
    response: Response | None
    retry_after: timedelta | None
    created_at: datetime
    answered_at: datetime | None


def read_request(configuration: Configuration, session: Session, id: UUID, scope: str) -> RequestStatus | None:
    """The request of this id, if it is of this scope."""
    check_id("id", id)
    check_field("scope", scope)
    session.flush()
    tables = configuration.tables
    record = tables.record
    mine = (record.c.id == id, record.c.env == configuration.env, record.c.scope == scope)
    asked = select(record, stored_body(record).label("answer"), clock().label("now")).where(*mine)
    row = session.connection().execute(asked).one_or_none()
    if row is None:
        return None
    is_final = row.answered_at is not None
    return RequestStatus(
        id=row.id,
        state=row.state,
        entries=entries_of_request(session.connection(), tables, id),
        response=None
        if not is_final or row.answer is None
        else Response(row.status, row.answer, json.loads(row.headers)),
        retry_after=None if is_final else poll_after(row.now - row.created_at),
        created_at=row.created_at,
        answered_at=row.answered_at,
    )
