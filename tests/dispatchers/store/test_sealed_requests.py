"""Encrypted answers and fingerprints of requests on each database, and the completion of requests with encrypted results."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from support.database import REQUEST, Client, Database
from support.encrypted import D1, D2, SECRET, FakeService, answering, outbox_with, stored
from support.entries import dispatcher, put_one, run_once

import outbox
from dispatchers import Delivered, Operations
from dispatchers.adapters import MemoryAdapter
from outbox.encryption import Encryption
from outbox.requests.body_key import body_key

pytestmark = [pytest.mark.on_mariadb]


@pytest.fixture
def ob() -> outbox.Outbox:
    return outbox_with(D1)


def respond(session: Any, claim: outbox.Claim) -> None:
    claim.respond(201, {"answer": SECRET}, headers={"Location": f"/{SECRET}"})


def test_a_stored_answer_is_encrypted_and_replayed(database: Database, client: Client) -> None:
    first = client.request(respond)

    (record,) = database.records
    assert SECRET not in stored(database)
    assert record.fingerprint_version == 2
    assert client.request(respond) == first
    with pytest.raises(outbox.RequestMismatch):
        client.request(respond, content={**REQUEST, "amount": 1})
    with database.begin() as session:
        client_ob: outbox.Outbox = client._ob
        shown = client_ob.request_status(session, record.id, scope="acct_1")
    assert shown is not None
    assert shown.response == first


def test_fingerprints_of_equal_requests_differ(database: Database, client: Client) -> None:
    for key in ("retry-1", "retry-2"):
        client.request(respond, key=key)

    plain = outbox.Fingerprint.json(REQUEST).digest
    fingerprints = [bytes(row.fingerprint) for row in database.records]
    assert len(set(fingerprints)) == 2
    assert plain not in fingerprints


def test_a_fingerprint_is_compared_after_rotations_and_without_encryption(database: Database) -> None:
    secrets = {"k1": bytes(range(32)), "k2": bytes(range(2, 34))}
    old = Client(database, outbox_with(D1), is_async=False)
    old.request(respond)
    for current, keys in (("k2", {**D2, **D1}), ("k1", None)):
        encryption = Encryption(keys, current="d2") if keys else None
        later = outbox.Outbox(outbox.Keyring(secrets, current=current), env="test", encryption=encryption)
        with pytest.raises(outbox.RequestMismatch):
            Client(database, later, is_async=False).request(respond, content={"other": 1})
    only_new = outbox.Outbox(outbox.Keyring({"k2": secrets["k2"]}), env="test", encryption=Encryption(D1))
    # a fingerprint under a secret that is gone cannot be compared: an honest client is answered
    assert Client(database, only_new, is_async=False).request(respond).status == 201


BODY = outbox.BodyKey(timedelta(minutes=10))


def test_no_key_of_a_body_can_be_guessed_or_compared(database: Database) -> None:
    ob = outbox_with(D1)
    for scope in ("acct_1", "acct_2"):
        with database.begin() as session, ob.idempotent(session, BODY, scope=scope, content=REQUEST) as claim:
            claim.respond(201)

    fingerprint, now = outbox.Fingerprint.json(REQUEST).digest, database.records[0].created_at
    keys = {row.parent for row in database.records}
    assert len(keys) == 2
    assert keys.isdisjoint(body_key(fingerprint, BODY.window, now))


def test_a_repeated_body_is_recognised_after_rotations_and_when_turned_off(database: Database) -> None:
    secrets = {"k1": bytes(range(32)), "k2": bytes(range(2, 34))}
    on, off = Encryption(D1), Encryption(D1, encrypts=False)
    steps = [("k1", off), ("k1", on), ("k2", on), ("k1", on), ("k2", off), ("k1", off)]
    for first, later in [(steps[0], steps), (steps[1], steps), (steps[2], steps)]:
        for current, encryption in [first, *later]:
            ob = outbox.Outbox(outbox.Keyring(secrets, current=current), env="test", encryption=encryption)
            content = {"first": first[0], "on": first[1].encrypts}
            with database.begin() as session, ob.idempotent(session, BODY, scope="ada", content=content) as claim:
                if claim.response is None:
                    claim.respond(201)

    assert len(database.records) == 3


def test_an_answer_without_its_key_is_an_error_of_its_own(database: Database, client: Client) -> None:
    client.request(respond)

    with pytest.raises(outbox.CannotDecrypt, match="OUTBOX_DATA_KEYS"):
        Client(database, outbox_with(None), is_async=False).request(respond)


def test_a_plain_answer_that_looks_encrypted_is_replayed_as_it_is(database: Database) -> None:
    plain = Client(database, outbox_with(None), is_async=False)

    def look_alike(session: Any, claim: outbox.Claim) -> None:
        claim.respond(200, b"obx1:d1::AAAA")

    assert plain.request(look_alike) == plain.request(look_alike)
    assert Client(database, outbox_with(D1), is_async=False).request(look_alike).body == b"obx1:d1::AAAA"


@pytest.mark.parametrize("keys", [None, D1], ids=["off", "on"])
def test_a_payload_that_looks_encrypted_is_refused(database: Database, keys: Any) -> None:
    with pytest.raises(outbox.InvalidValue, match="begins as an encrypted payload"):
        put_one(database, outbox_with(keys), payload="obx1:d1::AAAA")


def test_an_old_unkeyed_fingerprint_is_still_compared(database: Database, client: Client) -> None:
    first = Client(database, outbox_with(None), is_async=False).request(respond)

    assert client.request(respond) == first
    with pytest.raises(outbox.RequestMismatch):
        client.request(respond, content={**REQUEST, "amount": 1})


def test_a_leased_and_an_accepted_request_are_answered_encrypted(database: Database, ob: outbox.Outbox) -> None:
    with ob.leased(database.engine, "job-1", scope="ada", content=b"{}") as claim:
        claim.respond(201, {"answer": SECRET})
    effects = Operations()

    @effects.on_completed("order")
    def completed(session: Any, request: Any) -> None:
        request.respond(200, {"results": [entry.result for entry in request.entries]})

    with database.begin() as session, ob.idempotent(session, "r", scope="ada", content=b"{}") as accepted:
        ob.enqueue(session, "crm.upsert", {"card": SECRET})
        accepted.accept(completion="order", headers={"Location": "/x"})
    run_once(database, ob, include=[effects], adapters={"crm": answering(Delivered({"answer": SECRET}))})

    assert SECRET not in stored(database)
    with database.begin() as session, ob.idempotent(session, "r", scope="ada", content=b"{}") as again:
        assert again.require_response().json() == {"results": [{"answer": SECRET}]}
    with ob.leased(database.engine, "job-1", scope="ada", content=b"{}") as again_leased:
        assert again_leased.require_response().json() == {"answer": SECRET}


def test_an_accepted_request_completes_although_a_result_is_unreadable(database: Database, ob: outbox.Outbox) -> None:
    effects, seen = Operations(), list[Any]()

    @effects.on_completed("order")
    def completed(session: Any, request: Any) -> None:
        (entry,) = request.entries
        with pytest.raises(outbox.CannotDecrypt, match="no data key 'd1'"):
            _ = entry.result
        seen.append(repr(entry))
        request.respond(200, {"state": entry.state})

    with database.begin() as session, ob.idempotent(session, "r", scope="ada", content=b"{}") as accepted:
        ob.enqueue(session, "crm.upsert", {"card": SECRET})
        accepted.accept(completion="order", headers={"Location": "/x"})
    run_once(database, ob, adapters={"crm": answering(Delivered({"answer": SECRET}))})
    run_once(database, outbox_with(D2), include=[effects], adapters={"crm": MemoryAdapter()})

    with (
        database.begin() as session,
        outbox_with(D2).idempotent(session, "r", scope="ada", content=b"{}") as again,
    ):
        assert again.require_response().json() == {"state": "delivered"}
    assert [SECRET in text for text in seen] == [False]


@pytest.mark.parametrize("driver", ["psycopg_async", "asyncpg"])
def test_an_async_dispatcher_and_app_open_without_blocking_their_loop(postgresql: Database, driver: str) -> None:
    """The result, the stored answer and the status are under data keys that these processes do not have yet."""
    loops, calls = list[asyncio.AbstractEventLoop](), list[str]()

    class Service(FakeService):
        """Answers only if the event loop is not blocked meanwhile."""

        def _answer(self, method: str, data: bytes) -> bytes:
            calls.append(method)
            for loop in loops:
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(5)
            return super()._answer(method, data)

    def ob_of(service: FakeService) -> outbox.Outbox:
        return outbox_with({"kms": service})

    effects = Operations()

    @effects.on_completed("order")
    async def completed(session: Any, request: Any) -> None:
        request.respond(200, {"results": [entry.result for entry in request.entries]})

    first, crm = ob_of(Service()), {"crm": answering(Delivered({"answer": SECRET}))}
    with postgresql.begin() as session, first.idempotent(session, "r", scope="ada", content=b"{}") as accepted:
        first.enqueue(session, "crm.upsert", {"card": SECRET})
        accepted.accept(completion="order", headers={"Location": "/x"})
    run_once(postgresql, ob_of(Service()), adapters=crm)
    record_id = postgresql.records[0].id
    calls.clear()

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        url = postgresql.dispatchers_async_engine().url.set(drivername=f"postgresql+{driver}")
        engine = create_async_engine(url)
        working = dispatcher(engine, ob_of(Service()), include=[effects], adapters=crm)
        await working.run_once()
        await working.close()
        await engine.dispose()
        engine = create_async_engine(postgresql.engine.url.set(drivername=f"postgresql+{driver}"))
        app, later = ob_of(Service()), ob_of(Service())
        replaying = AsyncSession(engine)
        async with replaying.begin(), app.idempotent(replaying, "r", scope="ada", content=b"{}") as again:
            assert again.require_response().json() == {"results": [{"answer": SECRET}]}
        await replaying.close()
        async with AsyncSession(engine) as session:
            shown = await later.request_status(session, record_id, scope="ada")
            assert shown.entries[0].result == {"answer": SECRET}
        await engine.dispose()

    asyncio.run(main())
    assert calls.count("unwrap") >= 4
