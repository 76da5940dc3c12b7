"""Which messages NatsAdapter takes for refused when the server forbids their subject, with an imitation of the server."""

import asyncio
from collections.abc import Sequence

from support.deliveries import batch_sent, delivery
from support.fake_nats import STORED, STREAM, FakeNats

from dispatchers import Deferred, Delivered, Outcome
from dispatchers.adapters import NatsAdapter


class Revoking(FakeNats):
    """Takes the first message and forbids the later ones. Its answer to the first one comes last, as from a slow disk."""

    def __init__(self, messages: int) -> None:
        super().__init__()
        self._messages = messages
        self._first = ""

    async def _take(self, subject: str, reply: str, writer: asyncio.StreamWriter) -> None:
        if not self._first:
            self._first = reply
            return
        writer.write(b"-ERR 'Permissions Violation for Publish to \"%s\"'\r\n" % subject.encode())
        if len(self.requests) == self._messages:
            self._say(writer, self._first, STORED)


def test_a_message_that_was_taken_before_the_refusals_is_not_refused() -> None:
    outcomes = sent_to(Revoking(3), ["orders.placed"] * 3)

    assert [type(outcome) for outcome in outcomes] == [Delivered, Deferred, Deferred]


def test_a_forbidden_subject_with_capital_letters_is_recognised() -> None:
    """The client reports the subject in small letters."""
    server = FakeNats()
    server.behave({"publish": "forbidden"})

    outcomes = sent_to(server, ["ORDERS.placed", "orders.placed"])

    assert [type(outcome) for outcome in outcomes] == [Deferred, Deferred]
    assert isinstance(outcomes[0], Deferred)
    assert outcomes[0].reason == "the server's permissions forbid to publish to 'ORDERS.placed'"


def sent_to(server: FakeNats, subjects: Sequence[str]) -> list[Outcome]:
    """The outcomes of one batch, with a message for each subject."""
    with server:
        adapter = NatsAdapter(urls=f"nats://127.0.0.1:{server.port}", stream=STREAM)
        return batch_sent(adapter, *(delivery(options={"subject": subject}) for subject in subjects))
