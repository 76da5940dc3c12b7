"""The dashboard over a large outbox: how long each page takes, and what its polling costs a dispatcher that drains.

Of each hundred entries 2 are uncertain, 38 are waiting and the rest have ended, over the last thirty days.
"""

import asyncio
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, LiteralString

import httpx
import psycopg
import sqlalchemy as sa

from benchmarks.contestants import DEFAULT, start
from benchmarks.harness import Series, Server, interleave
from benchmarks.scale import JOBS, ROUNDS, WITHOUT, fresh, scaled, timed
from benchmarks.waiting import PAYLOAD
from dispatchers.dashboard import Dashboard, Identity
from dispatchers.dashboard.pages import VIEWS

PART = "dashboard"
ENTRIES, ENTRIES_FULL = 250_000, 15_000_000
REQUESTS = 40  # of each page
WARM_UPS = 2
REFRESH_SECONDS = 5.0  # as an open page does: static/dashboard.js
SETTLING_SECONDS = 2.0

FILL: tuple[LiteralString, ...] = (
    """
    CREATE TABLE bench_rows AS SELECT n, md5('e' || n)::uuid AS id, md5('r' || n)::uuid AS parent_id,
        CASE WHEN n %% 50 = 0 THEN 'uncertain' WHEN n %% 50 < 20 THEN 'waiting' ELSE 'ended' END AS kind,
        (%(rows)s - n) * interval '30 days' / %(rows)s AS age,
        CASE WHEN n %% 50 BETWEEN 1 AND 19 THEN 'noop' ELSE 'service' || n %% 7 END AS destination
    FROM generate_series(1, %(rows)s) AS n
    """,
    """
    INSERT INTO outbox_entry (id, env, scope, source, parent, operation, discriminator, kid, tag, parent_id, record_id,
        destination, payload, options, headers, schema_version, due_at, created_at, ordering_key)
    SELECT id, 'bench', 'acct_' || n %% 1000, 'http', 'order:' || n, destination || '.send', '', 'k1',
        sha256(n::text::bytea), parent_id, CASE WHEN n %% 10 = 0 THEN parent_id END, destination, %(payload)s, '{}', '{}', 1,
        now() - age, now() - age, CASE WHEN n %% 500 = 7 THEN 'customer:' || n %% 20000 END
    FROM bench_rows
    """,
    """
    INSERT INTO outbox_queue (id, destination, state, due_at, deliveries, attempts, maybe_sent, in_doubt_since, key_epoch,
        first_leased_at, outcome, ordering_key, position)
    SELECT id, destination, CASE kind WHEN 'uncertain' THEN 'uncertain' ELSE 'pending' END,
        CASE WHEN kind = 'uncertain' OR n %% 500 = 7 THEN '9999-12-31Z' ELSE now() - age END,
        0, 0, kind = 'uncertain', CASE kind WHEN 'uncertain' THEN now() - age END, 0,
        CASE kind WHEN 'uncertain' THEN now() - age END,
        CASE kind WHEN 'uncertain' THEN '{"reason": "no answer within 30 s"}' END,
        CASE WHEN n %% 500 = 7 THEN 'customer:' || n %% 20000 END,
        CASE WHEN n %% 500 = 7 THEN nextval('outbox_position') END
    FROM bench_rows WHERE kind <> 'ended'
    """,
    """
    INSERT INTO outbox_settlement (id, state, result, reason, deliveries, attempts, key_epoch, settled_at)
    SELECT id, CASE WHEN n %% 500 = 21 THEN 'failed' ELSE 'delivered' END, '{"id": "pi_' || md5(n::text) || '"}',
        CASE WHEN n %% 500 = 21 THEN 'card_declined' END, 1, 1, 0, now() - age
    FROM bench_rows WHERE kind = 'ended'
    """,
    """
    INSERT INTO outbox_record (id, env, scope, source, parent, kid, state, fingerprint, fingerprint_version, status, body,
        headers, created_at, answered_at, replay_until, keep_until)
    SELECT parent_id, 'bench', 'acct_' || n %% 1000, 'http', 'order:' || n, 'k1', 'succeeded', sha256('r'), 1, 201, '',
        '{}', now() - age, now() - age, now() + interval '1 day' - age, now() + interval '40 days' - age
    FROM bench_rows WHERE n %% 10 = 0
    """,
    "INSERT INTO outbox_event (entry_id, at, kind, delivery, reason)"
    " SELECT id, now() - age, 'attempt', 1, 'no answer within 30 s' FROM bench_rows WHERE kind = 'uncertain'",
    "INSERT INTO outbox_blocked_group (ordering_key, entry_id, reason, since)"
    " SELECT 'customer:' || n %% 20000, max(id::text)::uuid, 'declined', now() FROM bench_rows WHERE n %% 5000 = 7 GROUP BY 1",
    """
    INSERT INTO outbox_send_count (minute, destination, result, bucket, sends)
    SELECT date_trunc('minute', now()) - m * interval '1 minute', 'service' || d, r, b, 100
    FROM generate_series(0, 59) AS m, generate_series(0, 19) AS d, unnest(ARRAY['delivered', 'rejected', 'waited']) AS r,
        generate_series(2, 6) AS b
    """,
    """
    INSERT INTO outbox_schedule (name, expression, since, enqueued_to, next_at, recent, paused)
    SELECT 'report' || n, '0 3 * * * UTC', now() - interval '30 days', now() - interval '1 hour', now() + interval '23 hours',
        '[]', false
    FROM generate_series(1, 100) AS n
    """,
    "DROP TABLE bench_rows",
)


def fill(connection: psycopg.Connection[Any], rows: int) -> None:
    for statement in FILL:
        connection.execute(statement, {"rows": rows, "payload": PAYLOAD}, prepare=False)


def pages(connection: psycopg.Connection[Any]) -> dict[str, str]:
    """The address of each page of the navigation, and of the filters and searches that find least."""
    queried = {
        "uncertain, filtered": "/?operation=service3",
        "entries, filtered": "/entries?operation=service3&state=pending",
        "entries, of a parent": "/entries?parent=order:7777",
        "entries, failed": "/entries?state=failed&since=30d&destination=service1",
        "find, by a key": "/search?text=order:123456",
        "find, nothing": "/search?text=pi_0000000000000000",
        "requests, filtered": "/requests?key=nothing",
        "ordering groups, all": "/groups?every=1",
        "ordering group": "/group?key=customer:7",
    }
    row = connection.execute("SELECT id FROM outbox_queue WHERE state = 'uncertain' LIMIT 1").fetchone()
    assert row is not None
    own = {view.title.lower(): view.path for view in VIEWS if view.in_navigation}
    return own | queried | {"entry": f"/entries/{row[0]}"}


def measure(server: Server, size: float, *, full: bool) -> Iterator[Series]:
    """The time of each page, and the drain with and without a dashboard that polls."""
    DEFAULT.install(server)
    jobs = scaled(JOBS // 2, size)  # of which six rounds take two thirds of what waits
    fresh(server, "bench_dashboard", partial(fill, rows=scaled(ENTRIES_FULL if full else ENTRIES, size)))
    yield from _timed_pages(server)
    yield from interleave(
        PART,
        "drain",
        {WITHOUT: partial(_drained, server, jobs), "beside a dashboard": partial(_drained, server, jobs, polled=True)},
        ROUNDS,
    )


def _timed_pages(server: Server) -> Iterator[Series]:
    with server.connect("bench_dashboard") as connection:
        wanted = pages(connection)
    engine = sa.create_engine(server.url("bench_dashboard"))
    app = Dashboard(engine, authenticate=_operator)
    for name, path in wanted.items():
        times = asyncio.run(_times(app, path))
        yield Series(PART, "pages", name, "p50_ms", [statistics.median(times)])
        yield Series(PART, "pages", name, "p95_ms", [statistics.quantiles(times, n=20)[-1]])
    app.close()
    engine.dispose()


async def _times(app: Any, path: str) -> list[float]:
    times = []
    async with client_of(app) as client:
        for number in range(-WARM_UPS, REQUESTS):
            began = time.perf_counter()
            answer = await client.get(path)
            if answer.status_code != 200:
                raise SystemExit(f"{path} answered {answer.status_code}: {answer.text[-1000:]}")
            if number >= 0:
                times.append((time.perf_counter() - began) * 1000)
    return times


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://dashboard", timeout=60)


def _operator(request: object) -> Identity:
    return Identity("bench", ["operator"])


# --- the drain


def _drained(server: Server, jobs: int, *, polled: bool = False) -> Mapping[str, float]:
    """Each round drains further ones of the entries that wait."""
    if not polled:
        return timed(server, "bench_dashboard", jobs)
    with _polling(server):
        return timed(server, "bench_dashboard", jobs)


@contextmanager
def _polling(server: Server) -> Iterator[None]:
    polling = start(DEFAULT, server.variables("bench_dashboard"), "poll", stdout=subprocess.DEVNULL)
    try:
        time.sleep(SETTLING_SECONDS)
        yield
        if polling.poll() is not None:
            raise SystemExit("the dashboard that polls has ended")
    finally:
        polling.kill()
        polling.wait()


async def poll(url: str) -> None:
    """Each page of the navigation that refreshes is open once, in a tab of its own, without an end."""
    app = Dashboard(url, authenticate=_operator)
    live = [view.path for view in VIEWS if view.in_navigation and view.is_live]
    async with client_of(app) as client:
        while True:
            for path in live:
                began = time.perf_counter()
                (await client.get(path)).raise_for_status()
                await asyncio.sleep(max(REFRESH_SECONDS / len(live) - (time.perf_counter() - began), 0))
