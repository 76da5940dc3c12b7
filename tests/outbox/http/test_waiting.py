"""Requests that wait for the one in flight: they are few, and no other request waits for them."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import Any

import anyio.to_thread
import httpx
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import AssertionPool, NullPool, Pool, QueuePool, SingletonThreadPool, StaticPool
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from support.database import NOTHING, Database, Order
from support.http_requests import Caller, caller_of, fastapi_sync_app, serving_asgi, starlette_app
from support.http_shop import Shop
from test_requests import until_a_session_waits

import outbox
from outbox.http import Policy, RequestTransaction
from outbox.http.starlette import Idempotency, IdempotencyMiddleware, reject

RETRIES = 60  # more than a server has threads (40), and far more than a pool has connections


@dataclass
class PooledShop(Shop):
    """A shop whose engines keep few connections."""

    pool: dict[str, Any] = field(default_factory=lambda: {"pool_size": 3, "max_overflow": 2})
    engines: list[AsyncEngine] = field(default_factory=list)

    def sessions(self) -> Any:
        return sessionmaker(self.database.new_engine(**self.pool))

    def async_sessions(self) -> Any:
        engine = create_async_engine(self.database.url, **self.pool)
        self.engines.append(engine)
        return async_sessionmaker(engine)


@pytest.fixture
def pooled(postgresql: Database, ob: outbox.Outbox) -> Iterator[Callable[..., Shop]]:
    """Makes shops, and closes in the end what their pools hold."""
    made: list[PooledShop] = []

    def make(*settings: Any, **more: Any) -> Shop:
        made.append(PooledShop(postgresql, ob, *settings, **more))
        return made[-1]

    yield make
    for engine in [engine for shop in made for engine in shop.engines]:
        asyncio.run(engine.dispose())


@pytest.fixture
def shop(pooled: Callable[..., Shop]) -> Shop:
    return pooled({"wait": timedelta(seconds=60)})


@pytest.mark.parametrize("make", [fastapi_sync_app, starlette_app])
def test_many_retries_of_one_key_leave_connections_and_threads_to_others(
    shop: Shop, make: Callable[[Shop], Any]
) -> None:
    """While the first works all but two of its retries get a Retry-After, and a request of another key is answered."""
    with serving_asgi(make(shop)) as url, ThreadPoolExecutor(RETRIES + 1) as pool, calling(url) as caller:
        first = pool.submit(caller.post, "wait")
        assert shop.entered.wait(60)
        retries = [pool.submit(caller.post, "wait") for _ in range(RETRIES)]
        refused = [retry.result() for retry in islice(as_completed(retries), RETRIES - 2)]
        until_a_session_waits(shop.database)
        other = caller.post(key="another")
        still = [retry for retry in retries if not retry.done()]
        shop.may_leave.set()

        assert {(answer.status_code, answer.headers["retry-after"]) for answer in refused} == {(409, "1")}
        assert other.status_code == 201
        assert len(still) == 2
        assert first.result().status_code == 201
        late = [retry.result() for retry in still]
        assert [answer.headers.get("idempotent-replayed") for answer in late] == ["true", "true"], [
            (answer.status_code, answer.text) for answer in late
        ]


@contextmanager
def calling(url: str) -> Iterator[Caller]:
    caller = Caller(url)
    try:
        yield caller
    finally:
        caller.close()


def test_a_commit_waits_for_none_of_the_threads_that_others_share(shop: Shop) -> None:
    """Each of these may wait for a row that the commit is to unlock."""
    committed = threading.Event()
    idempotency = Idempotency(shop.sessions(), scope=caller_of, policy=shop.policy)

    async def block_all_threads() -> list[asyncio.Task[bool]]:
        loop, started = asyncio.get_running_loop(), asyncio.Queue[None]()

        def block() -> bool:
            loop.call_soon_threadsafe(started.put_nowait, None)
            return committed.wait(60)

        tasks = [asyncio.create_task(run_in_threadpool(block)) for _ in range(2)]
        for _ in tasks:
            await started.get()
        return tasks

    async def undone(request: Request, error: Exception) -> Response:
        return JSONResponse({}, 418)

    async def handler(request: Request) -> Response:
        async with idempotency.claim(request) as claimed:
            await run_in_threadpool(claimed.session.add, Order(customer="ada", amount=2000))
            request.app.state.blocked = await block_all_threads()
            if request.headers.get("x-do") == "reject":
                return await reject(claimed, 402)
            if request.headers.get("x-do") == "raise":
                raise LookupError
            return JSONResponse({}, 201)

    app = Starlette(
        routes=[Route("/orders", handler, methods=["POST"])],
        middleware=[Middleware(IdempotencyMiddleware)],
        exception_handlers={LookupError: undone},
    )

    async def ask(do: str) -> tuple[int, list[bool]]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = 2
        committed.clear()
        headers = {"Authorization": "ada-token", "Idempotency-Key": do, "X-Do": do}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            answer = await client.post("/orders", headers=headers)
        committed.set()
        return answer.status_code, await asyncio.gather(*app.state.blocked)

    assert asyncio.run(ask("place")) == (201, [True, True])
    assert asyncio.run(ask("reject")) == (402, [True, True])
    assert asyncio.run(ask("raise")) == (418, [True, True])
    assert shop.database.counts() == NOTHING | {"orders": 1, "records": 2}


@pytest.mark.parametrize("make", [fastapi_sync_app, starlette_app])
def test_a_request_that_finds_no_connection_gets_a_retry_after(
    pooled: Callable[..., Shop], make: Callable[[Shop], Any], caplog: pytest.LogCaptureFixture
) -> None:
    shop = pooled(pool={"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.01})
    with serving_asgi(make(shop)) as url, ThreadPoolExecutor(1) as pool, calling(url) as caller:
        first = pool.submit(caller.post, "wait")
        assert shop.entered.wait(60)
        other = caller.post(key="another")
        shop.may_leave.set()

        assert (other.status_code, other.headers["retry-after"]) == (503, "1")
        assert other.json()["type"].endswith("request-undone")
        assert first.result().status_code == 201
    assert "no free connection in the pool" in caplog.text


@pytest.mark.parametrize("pool", [QueuePool, NullPool, StaticPool, SingletonThreadPool, AssertionPool])
def test_a_request_waits_on_a_connection_of_every_pool(
    postgresql: Database, ob: outbox.Outbox, pool: type[Pool]
) -> None:
    policy = Policy(outbox=ob, wait=timedelta(milliseconds=1))
    with postgresql.begin() as session, ob.idempotent(session, "retry-001", scope="ada", content=b"") as claim:
        with Session(postgresql.new_engine(poolclass=pool)) as other, pytest.raises(outbox.KeyInFlight):
            RequestTransaction(other, policy, "retry-001", "ada", b"")
        claim.respond(201)


@pytest.mark.parametrize("max_waiting", [0, -1, True, 1.5, None])
def test_a_number_of_waiting_requests_that_cannot_be_is_refused(max_waiting: Any) -> None:
    with pytest.raises(
        outbox.InvalidValue, match=r"^max_waiting .*: must be an int of at least 1; to let no request wait"
    ):
        Policy(max_waiting=max_waiting)
