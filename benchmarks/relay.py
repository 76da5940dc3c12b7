"""How fast waiting entries reach a message broker, beside a drain that does nothing.

Between the two is a side that publishes nothing either, but waits for an answer and stores a result as the broker's adapter does.
The difference from it to the broker's side is the broker's client, and its server on the same cores.
"""

import asyncio
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import nats
from nats.errors import Error, NoServersError
from nats.js.errors import NotFoundError

from benchmarks.contestants import OUTBOX, TUNED, Contestant
from benchmarks.drain import STEPS, drained
from benchmarks.harness import Series, Server, interleave, process_cpu
from benchmarks.outbox_side import ANSWERED

PART = "relay"
ROUNDS = 5
NOTHING, WAITING, NATS = "no-op", "no-op that waits and has a result", "NATS JetStream"
STREAM = "RELAY"
MAX_READY_SECONDS = 20
JOBS = 40_000


def measure(server: Server, size: float) -> Iterator[Series]:
    program = shutil.which("nats-server") or shutil.which("/usr/sbin/nats-server")
    if program is None:
        print("THERE IS NO nats-server: the relay is not measured", flush=True)
        return
    TUNED.install(server)
    with _nats_server(program) as (url, broker):
        relay = Contestant(NATS, OUTBOX, TUNED.left, JOBS, (*TUNED.settings, url, STREAM))
        nothing = Contestant(NOTHING, OUTBOX, TUNED.left, JOBS, TUNED.settings)
        waiting = Contestant(WAITING, OUTBOX, TUNED.left, JOBS, (*TUNED.settings, ANSWERED))
        sides = {
            NOTHING: partial(drained, server, nothing, size),
            WAITING: partial(drained, server, waiting, size),
            NATS: partial(_relayed, server, relay, size, url, broker),
        }
        yield from interleave(PART, "", sides, ROUNDS)


def _relayed(server: Server, contestant: Contestant, size: float, url: str, broker: int) -> Mapping[str, float]:
    """Into a new stream: each round enqueues entries with the same keys. broker: the process of its server."""
    asyncio.run(_renew_stream(url))
    before = process_cpu(broker)
    figures = drained(server, contestant, size)
    return {**figures, "broker_us": (process_cpu(broker) - before) / max(JOBS * size, STEPS) * 1e6}


async def _renew_stream(url: str) -> None:
    client = await nats.connect(url)
    js = client.jetstream(timeout=MAX_READY_SECONDS)
    with suppress(NotFoundError):
        await js.delete_stream(STREAM)
    await js.add_stream(name=STREAM, subjects=["noop.>"], duplicate_window=3600)
    await client.close()


@contextmanager
def _nats_server(program: str) -> Iterator[tuple[str, int]]:
    """The URL and the process of one server, with its messages in files. It does not wait for the disk, by its defaults."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [program, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", folder, "-l", str(log)]
        with subprocess.Popen(command) as process:
            url = f"nats://127.0.0.1:{port}"
            until = time.monotonic() + MAX_READY_SECONDS
            while not asyncio.run(_answers(url)):
                if time.monotonic() > until:
                    raise SystemExit(f"nats-server did not start: {log.read_text()[-2000:]}")
                time.sleep(0.05)
            try:
                yield url, process.pid
            finally:
                process.terminate()


async def _answers(url: str) -> bool:
    async def ignore(error: Exception) -> None:
        """A refused connection would be logged as an error."""

    try:
        client = await nats.connect(url, allow_reconnect=False, max_reconnect_attempts=1, error_cb=ignore)
        await client.jetstream().account_info()
        await client.close()
    except (Error, NoServersError, OSError):
        return False
    return True
