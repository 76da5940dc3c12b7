"""Real sends, beside bare clients: `python3 dev.py bench sends`, in five to ten minutes.

A server in a process of its own answers each request after 20 ms. With 10, 100 and 1,000 requests in flight these send in turn
(A B A B), so that a machine whose speed drifts slows all: bare aiohttp, `HttpAdapter`, and a dispatcher with `HttpAdapter` that
drains a PostgreSQL; the first two over TLS as well; the bare `stripe` SDK over aiohttp, `StripeAdapter`, and a dispatcher with
it. Printed are medians of sends a second with their spread, the CPU of this process for each send, and both over the bare client.
"""

import argparse
import asyncio
import json
import os
import platform
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import stripe
from sqlalchemy import Engine, create_engine

from benchmarks import senders
from benchmarks.answering_server import ANSWER_SECONDS, raise_file_limit
from benchmarks.draining import database
from benchmarks.senders import Sender
from dispatchers.daemon import tuned_interpreter
from outbox import migrations

ROUNDS = 5
SENDS = {10: 1_000, 100: 4_000, 1000: 8_000}
HTTP_RATE_GOAL, HTTP_CPU_GOAL = 0.65, 2.5
STRIPE_RATE_GOAL = 0.7


@dataclass(frozen=True)
class Goal:
    """Over the bare client. rate: at least. cpu: at most; None for none."""

    rate: float
    cpu: float | None


HTTP, STRIPE = Goal(HTTP_RATE_GOAL, HTTP_CPU_GOAL), Goal(STRIPE_RATE_GOAL, None)


@dataclass(frozen=True)
class Figures:
    """rates: sends a second, one figure a round. cpu: microseconds a send, likewise."""

    name: str
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """What one contestant did beside the bare client, and whether that meets the goal."""

    scenario: str
    in_flight: int
    name: str
    per_second: float
    spread: float
    cpu_us: float
    rate_ratio: float | None = None
    rate_goal: float | None = None
    cpu_ratio: float | None = None
    cpu_goal: float | None = None

    @property
    def met(self) -> bool:
        rate = self.rate_ratio is None or self.rate_goal is None or self.rate_ratio >= self.rate_goal
        return rate and (self.cpu_ratio is None or self.cpu_goal is None or self.cpu_ratio <= self.cpu_goal)


def main() -> None:
    arguments = _arguments()
    raise_file_limit()
    with tempfile.TemporaryDirectory() as folder, database(arguments.database) as (url, origin):
        certificate, key = _certificate(Path(folder))
        migrations.upgrade(url)
        engine = create_engine(url)
        print(
            f"{origin}; Python {platform.python_version()}, aiohttp {aiohttp.__version__}, stripe {stripe.VERSION},"
            f" {os.cpu_count()} cores; {arguments.rounds} rounds, in turn; answers after {ANSWER_SECONDS * 1000:.0f} ms\n"
        )
        with _server(certificate, key) as (clear, encrypted), tuned_interpreter():
            benchmark = Benchmark(engine, ssl.create_default_context(cafile=certificate), arguments.rounds)
            results = asyncio.run(benchmark.run(clear, encrypted, arguments.in_flight))
        engine.dispose()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([{**asdict(each), "met": each.met} for each in results], indent=1) + "\n")
    sys.exit(0 if all(result.met for result in results) else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dev.py bench sends", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--in-flight", type=int, nargs="+", choices=list(SENDS), default=list(SENDS))
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--database", help="SQLAlchemy URL of a PostgreSQL database to use instead of a temporary one")
    return parser.parse_args()


@dataclass(frozen=True)
class Benchmark:
    engine: Engine
    tls: ssl.SSLContext
    rounds: int

    async def run(self, clear: str, encrypted: str, in_flight: Sequence[int]) -> list[Result]:
        print(f"{'':>9}{'':<32}{'a second':>9}{'spread':>8}{'ratio':>7}{'goal':>7}{'CPU us':>8}{'ratio':>7}{'goal':>7}")
        results: list[Result] = []
        for each in in_flight:
            results += await self._compare("HTTP", HTTP, each, self._http(clear))
            results += await self._compare("HTTP over TLS", HTTP, each, self._http_over_tls(encrypted))
            results += await self._compare("Stripe", STRIPE, each, self._stripe(clear))
        return results

    def _http(self, url: str) -> list[Sender]:
        bare, adapter = senders.BareAiohttp(url, self.tls), senders.http_alone(url, self.tls)
        return [bare, adapter, senders.http_dispatched(url, self.tls, self.engine)]

    def _http_over_tls(self, url: str) -> list[Sender]:
        return [senders.BareAiohttp(url, self.tls), senders.http_alone(url, self.tls)]

    def _stripe(self, url: str) -> list[Sender]:
        bare, adapter = senders.BareStripe(url, self.tls), senders.stripe_alone(url)
        return [bare, adapter, senders.stripe_dispatched(url, self.engine)]

    async def _compare(self, scenario: str, goal: Goal, in_flight: int, contestants: list[Sender]) -> list[Result]:
        sends = SENDS[in_flight]
        figures = [Figures(contestant.name) for contestant in contestants]
        for number in range(self.rounds + 1):
            for contestant, its in zip(contestants, figures, strict=True):
                await contestant.prepare(sends)
                started, cpu = time.perf_counter(), time.process_time()
                await contestant.send_all(sends, in_flight)
                if number:  # the first round warms up
                    its.rates.append(sends / (time.perf_counter() - started))
                    its.cpu.append((time.process_time() - cpu) / sends * 1e6)
        for contestant in contestants:
            await contestant.close()
        results = [_result(scenario, goal, in_flight, figures[0], its) for its in figures]
        for result in results:
            print(_row(result), flush=True)
        print()
        return results


def _result(scenario: str, goal: Goal, in_flight: int, bare: Figures, its: Figures) -> Result:
    median = statistics.median(its.rates)
    spread = (max(its.rates) - min(its.rates)) / median
    result = Result(scenario, in_flight, its.name, median, spread, statistics.median(its.cpu))
    if its is bare:
        return result
    rate = statistics.median(a / b for a, b in zip(its.rates, bare.rates, strict=True))
    cpu = statistics.median(a / b for a, b in zip(its.cpu, bare.cpu, strict=True))
    ratios = {"rate_ratio": rate, "rate_goal": goal.rate, "cpu_ratio": cpu, "cpu_goal": goal.cpu}
    return Result(**(asdict(result) | ratios))


def _row(result: Result) -> str:
    its = f"{result.per_second:>9.0f}{result.spread:>8.0%}"
    scenario = "TLS" if "TLS" in result.scenario else ""
    row = f"{result.in_flight:>5} {scenario:<3}{result.name:<32}{its}"
    if result.rate_ratio is None or result.cpu_ratio is None:
        return f"{row}{'':>14}{result.cpu_us:>8.0f}"
    cpu_goal = "" if result.cpu_goal is None else f"<={result.cpu_goal}"
    row += f"{result.rate_ratio:>7.2f}{f'>={result.rate_goal}':>7}{result.cpu_us:>8.0f}{result.cpu_ratio:>7.2f}{cpu_goal:>7}"
    return f"{row}  {'met' if result.met else 'MISSED'}"


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


if __name__ == "__main__":
    main()
