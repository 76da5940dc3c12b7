"""Handle a consumed message once: a record like that of a request, without an answer.

The record, the consumer's rows and its entries commit together, and only then is the message acknowledged. After a crash
between the two the message comes again, and the record shows that it was handled. Recipes: docs/inbox-recipes.md.
"""

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.orm import Session

from outbox.configuration import Configuration
from outbox.errors import ClaimLost, ClaimOpen, InvalidValue, KeyExpired, KeyInFlight
from outbox.keys import ParentKey, check_field
from outbox.observer import ClaimObservation
from outbox.requests.body_key import choose_key
from outbox.requests.claim_block import ClaimBlock
from outbox.requests.idempotency import OpenRequest
from outbox.requests.records import RecordKey, claim_key
from outbox.requests.responses import Response
from outbox.times import check_span

SOURCE = "inbox:"

INBOX_RETENTION = timedelta(days=35)
"""SQS, whose limit is the longest among managed queues' own, keeps a message for 14 days, and its dead-letter queue for 14 more
(MessageRetentionPeriod in the SQS API reference, SetQueueAttributes); a week to spare."""

HANDLED = Response(204)
"""What is stored instead of an answer: nothing."""

NO_FINGERPRINT = b""
"""A message is known by its id alone: a redelivery may differ in its headers, a redrive in its encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxMessage:
    """A consumed message, in the `outbox.inbox` block that handles it.

    parent: the parent key of the block's entries: the message's scope, the source `inbox:<consumer>`, and the message's id.
    duplicate: whether this consumer has handled the message before. Then write nothing, and acknowledge the message.
    """

    parent: ParentKey
    duplicate: bool


def message_key(
    configuration: Configuration, *, consumer: str, message_id: str, scope: str, retention: timedelta
) -> RecordKey:
    """The record of one message for one consumer. Raises `InvalidValue`."""
    check_field("consumer", consumer)
    check_field("message_id", message_id)
    if not scope:
        raise InvalidValue("scope", scope, "must name the producer of these message ids")
    check_span("retention", retention)
    parent = ParentKey(message_id, scope=scope, source=SOURCE + consumer)
    return RecordKey.of(configuration, parent, NO_FINGERPRINT, retention)


class _OpenMessage(OpenRequest):
    """A claim that is answered from the start, and speaks of messages."""

    def open(self) -> None:
        super().open()
        self.response = HANDLED

    def _open(self) -> ClaimOpen:
        return ClaimOpen(
            f"the session was committed inside the outbox.inbox block of message {self.parent.key!r}: the record, the"
            " rows and the entries must commit together, so commit after the block"
        )

    def _statement_failed(self) -> ClaimLost:
        return ClaimLost(
            f"a statement failed inside the outbox.inbox block of message {self.parent.key!r}, and the handler continued: nothing"
            " of the block is kept. Let its error leave the block, and leave the message for redelivery"
        )

    def _lost(self) -> ClaimLost:
        return ClaimLost(
            f"the transaction of message {self.parent.key!r} was rolled back, closed or committed inside its outbox.inbox"
            " block, and cannot be committed any more: roll the session back after the block, and acknowledge none of the"
            " messages that were handled in this transaction, so that all of them are redelivered"
        )

    def _misuse(self) -> str:
        consumer = self.parent.source.removeprefix(SOURCE)
        return (
            f"consumer {consumer!r} has handled message {self.parent.key!r} before."
            " Check message.duplicate first, and acknowledge the message"
        )


class InboxBlock(ClaimBlock[InboxMessage]):
    """What `outbox.inbox` returns: `with` it on a Session, `async with` it on an AsyncSession."""

    def _entered(self, claim: OpenRequest) -> InboxMessage:
        return InboxMessage(parent=claim.parent, duplicate=claim.replayed)

    def _open(self, session: Session) -> OpenRequest:
        try:
            return super()._open(session)
        except KeyInFlight as error:
            raise KeyInFlight(
                f"message {self._key.name!r} is being handled by another transaction now:"
                " leave it unacknowledged, so that it is redelivered",
                error.retry_after,
            ) from error

    def _take(self, session: Session, observation: ClaimObservation | None) -> OpenRequest:
        connection = self._begin(session)
        key = choose_key(connection, self._key, self._wait)
        try:
            response = claim_key(connection, key, self._wait, observation)
        except KeyExpired:
            # What it caused is remembered still, so it was handled. Unlike a client's key, a message's id is not used again.
            response = HANDLED
        return _OpenMessage(session, connection, key, response, self._options.savepoint_of)
