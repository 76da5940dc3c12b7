"""What the simulation is asked: the measured points again, and larger layouts."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.harness import Report, Series
from benchmarks.scaling_model import Layout, Times, entries_per_second

PART = "scaling"
DRAIN, ENQUEUE, SIZE, SERVER = "drain", "enqueue", "size", "server"
"""The cases of what is measured."""
PROCESSES = (1, 2, 4, 8)
DISPATCHERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
COMPUTED = "computed: "
HERE = f"{COMPUTED}this machine"

ROUND_TRIP = 500.0  # microseconds: machines of one network
FLUSH = 500.0  # at least, of a disk that is not this machine's
CORES = 8
SEND = (
    200.0  # about what `HttpAdapter` uses of the dispatcher's processor for a send: docs/performance.md, "Real sends"
)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number > 1 else ''}"


dispatchers = partial(counted, noun="dispatcher")


@dataclass(frozen=True)
class Curve:
    """layout: without its dispatchers. send: microseconds of the dispatcher's CPU that each send takes."""

    group: str
    label: str
    layout: Layout
    send: float = 0.0

    @property
    def case(self) -> str:
        return f"{COMPUTED}{self.group}, {self.label}"


def _layout(databases: int = 1, cores: int = CORES) -> Layout:
    return Layout(dispatchers=1, databases=databases, cores=cores, round_trip=ROUND_TRIP)


ONE, MANY, SENDS = "one database", "databases of 8 cores", "databases of 8 cores, real sends"
DATABASES = (1, 4, 16, 64)
CURVES = (
    *(Curve(ONE, f"{cores} cores", _layout(cores=cores)) for cores in (2, 8, 32)),
    *(Curve(MANY, counted(n, "database"), _layout(n)) for n in DATABASES),
    *(Curve(SENDS, counted(n, "database"), _layout(n), SEND) for n in DATABASES),
)


def times_of(report: Report) -> Times:
    """The times of an exchange and of each of its entries, from the large exchanges of one dispatcher and the small of eight."""
    one, eight = (partial(median, report, DRAIN, dispatchers(number)) for number in (1, 8))
    sizes = one("entries_per_exchange"), eight("entries_per_exchange")
    client, server = (_parts(one(cpu), eight(cpu), *sizes) for cpu in ("client_us", "server_us"))
    return Times(
        client_exchange=client[0],
        client_entry=client[1],
        server_exchange=server[0],
        server_entry=server[1],
        locked_row=median(report, SERVER, "locked row", "passed_us"),
        leased_row=median(report, SERVER, "leased row", "passed_us"),
        flush=median(report, SERVER, "flush of the WAL", "flush_us"),
    )


def _parts(one: float, small: float, entries: float, few: float) -> tuple[float, float]:
    """What an exchange costs, and each of its entries. one, small: of an entry, in exchanges of so many, and of so few."""
    exchange = min(max(0.0, (small - one) * entries * few / max(entries - few, 1.0)), one * entries)
    return exchange, one - exchange / entries


def median(report: Report, case: str, side: str, metric: str) -> float:
    found = report.find(PART, case, side, metric)
    assert found is not None, f"{case}, {side}, {metric} was not measured"
    return found.median


def computed(report: Report) -> Iterator[Series]:
    """Each point by the simulation. report: with what was measured."""
    for number in PROCESSES:
        yield Series(PART, HERE, dispatchers(number), "per_second", [computed_here(report, number)])
    for curve in CURVES:
        for number in DISPATCHERS:
            yield Series(PART, curve.case, dispatchers(number), "per_second", [computed_at(report, curve, number)])


def computed_here(report: Report, number: int) -> float:
    """On the measured machine, of whose cores other programs used a part."""
    others = median(report, DRAIN, dispatchers(number), "cores_others")
    cores = float(report.machine["cores"]) - others
    return entries_per_second(times_of(report), Layout(dispatchers=number, cores=cores, is_one_machine=True))


def computed_at(report: Report, curve: Curve, number: int) -> float:
    times = times_of(report)
    times = replace(times, client_entry=times.client_entry + curve.send, flush=max(times.flush, FLUSH))
    return entries_per_second(times, replace(curve.layout, dispatchers=number))


def points(report: Report, case: str, numbers: Sequence[int] = DISPATCHERS) -> list[tuple[float, float]]:
    """Dispatchers, and entries a second."""
    return [(number, median(report, case, dispatchers(number), "per_second")) for number in numbers]


def of_this_machine(measured: list[Series]) -> Report:
    return Report({"cores": str(os.cpu_count())}, measured, {}, [])
