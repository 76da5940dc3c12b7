"""DBOS Transact as a contestant, in the drain only: its queues poll. `benchmarks/contestants.py` says what each command does."""

import os
import sys
import threading

from dbos import DBOS, DBOSConfig

CONCURRENCY = 1_000
POLL_SECONDS = 0.1
PADDING = "." * 200
URL = "postgresql://{PGUSER}@/{PGDATABASE}?host={PGHOST}&port={PGPORT}".format_map(os.environ)
config: DBOSConfig = {"name": "bench", "system_database_url": URL, "log_level": "ERROR", "application_version": "1"}
step = count = 0


async def noop(padding: str) -> None:
    global count
    if step and count % step == 0:
        print(f"{os.getpid()}\n", end="", flush=True)
    count += 1


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    DBOS(config=config)
    workflow = DBOS.workflow(name="noop")(noop)
    if command == "drain":
        step = int(rest[0])
    else:
        DBOS.listen_queues([])  # nothing must run here
    DBOS.launch()
    DBOS.register_queue("noop", worker_concurrency=CONCURRENCY, polling_interval_sec=POLL_SECONDS)
    if command == "fill":
        for _ in range(int(rest[0])):
            DBOS.enqueue_workflow("noop", workflow, PADDING)
    if command == "drain":
        threading.Event().wait()
    DBOS.destroy()
