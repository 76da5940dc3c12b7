"""HttpAdapter against servers that do what they should not, over real sockets, and under the dispatcher."""

import asyncio
import json
from datetime import timedelta
from typing import Any

from support.database import Database
from support.entries import age, dispatcher, put_one, queue_row, settlement_row
from support.loopback import Answer as Server
from support.loopback import answering, listening, say, say_without_end, whole_request

from dispatchers.adapters import HttpAdapter
from outbox import Outbox

# --- under the dispatcher


def run_once_against(server: Server, database: Database, ob: Outbox, *, times: int = 1, **settings: Any) -> None:
    """A dispatcher's `run_once` with an adapter for `server`, again an hour later."""

    async def scenario() -> None:
        async with listening(server) as url:
            crm = HttpAdapter(base_url=url, **{"timeout": timedelta(seconds=5), **settings})
            for _ in range(times):
                working = dispatcher(database, ob, adapters={"crm": crm})
                await working.run_once()
                await working.close()
                age(database, timedelta(hours=1))

    asyncio.run(scenario())


def losing_the_first(seen: list[bytes]) -> Server:
    """A server that loses its first answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await whole_request(reader))
        if len(seen) > 1:
            await say(writer, 201, b'{"id": 7}')

    return answer


def test_every_attempt_at_an_entry_carries_its_child_key_and_bytes(sqlite: Database, ob: Outbox) -> None:
    seen: list[bytes] = []
    with sqlite.begin() as session:
        payload = {"url": "/contacts", "json": {"name": "né", "share": 1.10}}
        entry = ob.enqueue(session, "crm.contacts.create", payload, parent="customer:7")

    run_once_against(losing_the_first(seen), sqlite, ob, times=2, window=timedelta(days=7))

    settled = settlement_row(sqlite, entry.id)
    assert (settled.state, settled.attempts) == ("delivered", 2)
    assert json.loads(settled.result) == {"status": 201, "body": {"id": 7}}
    first, second = seen
    assert first == second
    assert f"Idempotency-Key: {entry.child_key}\r\n".encode() in first


def test_an_entry_in_doubt_is_not_sent_to_another_place(sqlite: Database, ob: Outbox) -> None:
    """The server that answers there does not know its key."""
    seen: list[bytes] = []
    id = put_one(sqlite, ob, payload={"text": "once"})

    for _ in range(2):  # each time on a port of its own
        run_once_against(losing_the_first(seen), sqlite, ob, window=timedelta(days=7))

    assert queue_row(sqlite, id).state == "retry"
    assert len(seen) == 1


def test_a_lost_answer_without_keys_is_uncertain_and_never_sent_again(sqlite: Database, ob: Outbox) -> None:
    seen: list[bytes] = []
    id = put_one(sqlite, ob, payload={"text": "once"})

    async def lose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await whole_request(reader))

    run_once_against(lose, sqlite, ob, times=2, key_header=None)

    assert queue_row(sqlite, id).state == "uncertain"
    assert len(seen) == 1


def test_a_malformed_payload_fails_and_says_why(sqlite: Database, ob: Outbox) -> None:
    seen: list[bytes] = []
    id = put_one(sqlite, ob, payload={"method": "GET"})

    run_once_against(answering(seen=seen), sqlite, ob)

    settled = settlement_row(sqlite, id)
    assert (settled.state, settled.reason[:23]) == ("failed", "payload field 'method' ")
    assert seen == []


def test_the_adapter_knows_more_at_the_deadline_than_the_dispatcher_would(sqlite: Database, ob: Outbox) -> None:
    """Cancelled by the dispatcher, a success that drips would be in doubt. Of 2 s on, the two limits are 0.1 s apart."""
    id = put_one(sqlite, ob, payload={"text": "x"})

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole_request(reader)
        await say_without_end(writer, b"HTTP/1.1 200 OK\r\n\r\n", b" ", pause=0.01)

    run_once_against(drip, sqlite, ob, timeout=timedelta(seconds=2))

    assert settlement_row(sqlite, id).state == "delivered"
