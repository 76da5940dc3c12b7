"""How fast jobs that do nothing are drained, beside the peers and the least that PostgreSQL could do."""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import psycopg

from benchmarks.contestants import DEFAULT, TUNED, TWO, Contestant, available, variables, working
from benchmarks.harness import Series, Server, Usage, interleave, process_cpu, run
from benchmarks.waiting import add_waiting

PART = "drain"
ROUNDS = 3
STEPS = 100  # reports of progress in a round
POLL_SECONDS = 0.002
LIMIT = "server-side limit"
LIMIT_JOBS = 100_000
LIMIT_BATCH = 1000
LIMIT_DATABASE = "bench_limit"


def measure(server: Server, size: float) -> Iterator[Series]:
    return compare(server, size, [DEFAULT, TUNED, TWO, *available()])


def measure_quickly(server: Server, size: float) -> Iterator[Series]:
    """Without the peers."""
    return compare(server, size, [DEFAULT, TUNED])


def compare(server: Server, size: float, contestants: Sequence[Contestant]) -> Iterator[Series]:
    for each in {each.installed: each for each in contestants}.values():
        each.install(server)
    sides = {each.name: partial(drained, server, each, size) for each in contestants}
    sides[LIMIT] = partial(limit, server, size)
    yield from interleave(PART, "", sides, ROUNDS)


def limit(server: Server, size: float) -> Mapping[str, float]:
    """What PostgreSQL itself could do: claim and settle a batch in one call, without a client that sends anything."""
    jobs = max(int(LIMIT_JOBS * size), LIMIT_BATCH)
    server.create(LIMIT_DATABASE, DEFAULT.installed)
    with server.connect(LIMIT_DATABASE) as connection:
        add_waiting(connection, jobs)
        connection.execute(CLAIM_AND_SETTLE)
        server.tidy(LIMIT_DATABASE)
        before, began = Usage.now(server, connection), time.perf_counter()
        while connection.execute("SELECT claim_and_settle(%s)", [LIMIT_BATCH]).fetchone() != (0,):
            pass
        return figures(jobs, time.perf_counter() - began, 0, before, Usage.now(server, connection))


CLAIM_AND_SETTLE = """
CREATE FUNCTION claim_and_settle(most int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE claimed uuid[];
BEGIN
    WITH leased AS (
        UPDATE outbox_queue SET lease_until = now() + interval '1 minute', lease_token = gen_random_uuid(),
            leased_at = now(), state = 'sending', deliveries = deliveries + 1
        WHERE id = ANY (ARRAY(
            SELECT id FROM outbox_queue WHERE destination = 'noop' AND due_at <= now()
            AND (lease_until IS NULL OR lease_until < now()) ORDER BY due_at LIMIT most FOR UPDATE SKIP LOCKED))
        RETURNING id
    ) SELECT array_agg(id) INTO claimed FROM leased;
    INSERT INTO outbox_settlement (id, state, deliveries, attempts, key_epoch, settled_at)
        SELECT id, 'delivered', 1, 1, 0, now() FROM unnest(claimed) AS id;
    DELETE FROM outbox_queue WHERE id = ANY (claimed);
    RETURN COALESCE(cardinality(claimed), 0);
END $$
"""


def drained(server: Server, contestant: Contestant, size: float) -> Mapping[str, float]:
    """From the start of the first job until no job is left; CPU and WAL for each job."""
    jobs = max(int(contestant.jobs * size), STEPS)
    server.create(contestant.database, contestant.installed)
    given = server.variables(contestant.database)
    run([*contestant.command, "fill", str(jobs)], variables(given))
    server.tidy(contestant.database)
    step = jobs // STEPS
    arguments = ["drain", str(step), *contestant.settings]
    with server.connect(contestant.database) as connection:
        before = Usage.now(server, connection)
        with working(contestant, given, *arguments) as progress:
            began, at_first = 0.0, dict[int, float]()
            for line in islice(progress, jobs // step - contestant.workers):
                began = began or time.perf_counter()
                at_first.setdefault(int(line), process_cpu(int(line)))
            wait_until_done(connection, contestant.left)
            seconds = time.perf_counter() - began
            after = Usage.now(server, connection)
            client = sum(process_cpu(pid) - cpu for pid, cpu in at_first.items())
    return figures(jobs, seconds, client, before, after)


def figures(jobs: int, seconds: float, client: float, before: Usage, after: Usage) -> Mapping[str, float]:
    server = after.cpu - before.cpu
    return {
        "per_second": jobs / seconds,
        "client_us": client / jobs * 1e6,
        "server_us": server / jobs * 1e6,
        "cpu_us": (client + server) / jobs * 1e6,
        "wal_bytes": (after.wal - before.wal) / jobs,
    }


def wait_until_done(connection: psycopg.Connection[tuple[bool]], left: str) -> None:
    while True:
        row = connection.execute(left.encode()).fetchone()
        if row is None or not row[0]:
            return
        time.sleep(POLL_SECONDS)
