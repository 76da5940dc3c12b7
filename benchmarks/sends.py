"""Real sends to a server in a process of its own that answers each request after 20 ms, beside bare clients."""

import asyncio
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import Engine, create_engine

from benchmarks import senders
from benchmarks.answering_server import raise_file_limit
from benchmarks.harness import Series, Server, interleave
from benchmarks.senders import Sender
from dispatchers.adapters.providers import BodyField
from dispatchers.process.daemon import tuned_interpreter
from outbox import migrations

PART = "sends"
DATABASE = "bench_sends"
ROUNDS = 3
SENDS = {10: 500, 100: 4_000, 1000: 8_000}
"""How many in a round, by how many are in flight."""


def measure(server: Server, size: float) -> Iterator[Series]:
    raise_file_limit()
    server.create(DATABASE)
    migrations.upgrade(server.url(DATABASE))
    engine = create_engine(server.url(DATABASE))
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = _certificate(Path(folder))
        tls = ssl.create_default_context(cafile=certificate)
        with _server(certificate, key) as urls, tuned_interpreter(), asyncio.Runner() as runner:
            for in_flight, sends in SENDS.items():
                for scenario, contestants in runner.run(_scenarios(engine, *urls, tls)).items():
                    sides = {
                        each.name: partial(sent, runner, each, max(int(sends * size), in_flight), in_flight)
                        for each in contestants
                    }
                    yield from interleave(PART, f"{scenario}, {in_flight} in flight", sides, ROUNDS, warm_ups=1)
                    for each in contestants:
                        runner.run(each.close())
    engine.dispose()


async def _scenarios(engine: Engine, clear: str, encrypted: str, tls: ssl.SSLContext) -> dict[str, list[Sender]]:
    """New clients for each: those of aiohttp belong to the running loop."""
    return {
        "HTTP": [
            senders.BareAiohttp(clear, tls),
            senders.http_alone(clear, tls),
            senders.http_dispatched(clear, tls, engine),
            senders.profile_alone(clear, tls),
            senders.profile_alone(clear, tls, BodyField("idempotency_key")),
        ],
        "HTTP over TLS": [senders.BareAiohttp(encrypted, tls), senders.http_alone(encrypted, tls)],
        "Stripe": [
            senders.BareStripe(clear, tls),
            senders.stripe_alone(clear),
            senders.stripe_dispatched(clear, engine),
        ],
    }


def sent(runner: asyncio.Runner, sender: Sender, sends: int, in_flight: int) -> Mapping[str, float]:
    runner.run(sender.prepare(sends))
    started, cpu = time.perf_counter(), time.process_time()
    runner.run(sender.send_all(sends, in_flight))
    return {
        "per_second": sends / (time.perf_counter() - started),
        "client_us": (time.process_time() - cpu) / sends * 1e6,
    }


@contextmanager
def _server(certificate: str, key: str) -> Iterator[tuple[str, str]]:
    """Where the server answers, in clear and over TLS."""
    command = [sys.executable, "-m", "benchmarks.answering_server", certificate, key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        clear, encrypted = process.stdout.readline().split()
        yield f"http://127.0.0.1:{clear}", f"https://127.0.0.1:{encrypted}"
        process.stdin.close()


def _certificate(folder: Path) -> tuple[str, str]:
    """One for 127.0.0.1 that is its own authority."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=bench"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    return str(certificate), str(key)
