"""The page docs/scaling.md and its charts, from the figures that `benchmarks.scaling` measured and computed."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.charts import Line, line_chart
from benchmarks.harness import Report
from benchmarks.report import machine_line, markdown, tables
from benchmarks.scaling_curves import (
    CORES,
    CURVES,
    DRAIN,
    ENQUEUE,
    FLUSH,
    HERE,
    MANY,
    ONE,
    PART,
    PROCESSES,
    ROUND_TRIP,
    SEND,
    SENDS,
    SIZE,
    dispatchers,
    median,
    points,
    times_of,
)
from dispatchers.settings import KEEP

HERE_CHART = "one server"
FLUSH_OF_A_DISK = 20.0  # microseconds at least
NEAR = 0.9  # of a curve's highest point: there it bends
POSTGRES_CONNECTIONS = 100  # the default of max_connections
A_DAY = 1_000_000  # entries, in the example

HEAD = """# How far it goes

This page shows what one database server carries, measured, and where more dispatchers or more databases stop helping,
computed by a simulation. `python3 dev.py bench scaling` measures and computes all of it again on your machine. The
figures are for entries whose send costs nothing, unless the text says otherwise: they show the bounds of the queue.
A real send costs more than the queue, so most apps are bounded by their services.
"""

ADD = """## When to add what

**Dispatchers**, when entries wait although the service and the database have room, and for safety: run two at least.
Real sends use most of a dispatcher's processor, so that a database carries many dispatchers. A dispatcher uses one core.
Before the next process, raise `concurrency`: with more sends at a time a dispatcher claims more entries in an exchange.

**Not more dispatchers than the bend.** Each dispatcher passes over the rows that the others have claimed, and the fewer
entries a dispatcher gets, the fewer it claims in an exchange. Both cost the server. After the bend, another dispatcher
makes all of them slower.

**Databases**, when the server's processors are full, when the tables outgrow its memory, or when it runs out of
connections. Split them by a key that the app's own transactions never cross, such as the tenant: an entry commits with the
rows of its own database. Then [one fleet](fleet.md) serves them all. Databases share nothing, so twice as many carry twice
as much, until something else is shared: the service, the network, or one process that serves them all.

**A broker**, when many consumers need each message, or when consumers come and go. A broker does not raise these bounds:
the outbox still writes and settles each entry, and [relays it](brokers.md). It takes the fan-out and the storage of
messages off the database: one entry for a message instead of one for each consumer.
"""

LEFT_OUT = """## What the simulation leaves out

- **Processors only.** A server is also bounded by the bandwidth of its WAL, by locks inside PostgreSQL that many cores
  compete for, and by vacuum. None of them was measured above this machine's rates: a real server may bend earlier.
- **Enqueue** uses the same processors. The simulated servers only drain.
- **The queue is never empty.** With little to do, hints wake all dispatchers for each commit, and each of them sweeps every
  five seconds: hundreds of idle dispatchers cost the server more than a few busy ones.
- **Services** always have room. Rate limits, `concurrency` and slow answers are left out.
- **Connections.** Hundreds of dispatchers on one server need a pooler, which is left out.
- **Memory and disk reads.** All rows are in the cache.
- **A dispatcher of several databases** divides its `concurrency` and `in_flight_max` evenly among them. This is not measured.
- The time of an exchange varies exponentially around its mean: an assumption, which the row of one dispatcher tests.
- **Switching** between many processes on few cores is a part of the measured time of an exchange, so that machines with a core
  for each process may do better than computed.
"""


def scaling_page(report: Report) -> str:
    """The text of docs/scaling.md."""
    measured = report.conditions[PART]
    shown = dict(tables(report, PART))
    sections = [
        HEAD,
        f"{machine_line(report)} Measured on {measured}.{_without_disk(report)}\n",
        *("## In short\n", _short(report)),
        ADD,
        *("## One server, measured\n", _drain(report), markdown(shown[DRAIN]), "", _enqueue(report)),
        *(markdown(shown[ENQUEUE]), "", _size(report), markdown(shown[SIZE]), ""),
        *("## Does the simulation agree?\n", _agreement(report), markdown(agreement_rows(report)), ""),
        *("## Larger machines, computed\n", _larger(report), markdown(bend_rows(report)), ""),
        LEFT_OUT,
    ]
    return "\n".join(sections)


def _without_disk(report: Report) -> str:
    if times_of(report).flush >= FLUSH_OF_A_DISK:
        return ""
    return " The server's files were in memory: its commits waited for no disk."


def _short(report: Report) -> str:
    server = median(report, DRAIN, dispatchers(1), "server_us")
    written = median(report, ENQUEUE, "1 writer, 1 at once", "server_us")
    most = max(points(report, DRAIN, PROCESSES), key=lambda point: point[1])
    of_connections = median(report, DRAIN, dispatchers(8), "connections") / 8
    waiting, delivered = (_bytes(report, side) for side in ("an entry that waits", "a delivered entry"))
    cores = report.machine["cores"]
    return f"""- {cores} cores, shared by the server and {dispatchers(int(most[0]))}, drain {most[1]:,.0f} entries a second.
- A core of the server settles {1e6 / server:,.0f} entries a second that were enqueued before, or enqueues and settles
  {1e6 / (server + written):,.0f} a second, each in a transaction of its own.
- A dispatcher holds {of_connections:.0f} connections: {POSTGRES_CONNECTIONS // of_connections:.0f} dispatchers use up the
  {POSTGRES_CONNECTIONS} that PostgreSQL allows by default.
- An entry takes {waiting:,.0f} bytes while it waits and {delivered:,.0f} when it is delivered, with its indexes and a payload of
  100 bytes: a million entries a day, kept for {KEEP.days} days, are {delivered * A_DAY * KEEP.days / 1e9:.0f} GB.
"""


def _bytes(report: Report, side: str) -> float:
    return sum(median(report, SIZE, side, metric) for metric in ("table_bytes", "index_bytes"))


def _drain(report: Report) -> str:
    return f"""Entries that do nothing, drained by dispatchers with default settings on the server's own machine. All dispatchers
are idle when the entries are committed.

{_picture(HERE_CHART)}
"""


def _enqueue(report: Report) -> str:
    return """
Processes that enqueue as fast as they can, with 1 or 100 entries in a transaction. The figures are for an entry:
"""


def _size(report: Report) -> str:
    return """
Bytes on the disk for an entry, with a payload of 100 bytes:
"""


def _agreement(report: Report) -> str:
    times = times_of(report)
    others = max(median(report, DRAIN, dispatchers(number), "cores_others") for number in PROCESSES)
    return f"""The simulation is a closed queueing network of the measured times. It was given the CPU of 1 and of 8 dispatchers,
not their rates, and computed the rates of 1, 2, 4 and 8. The CPU of 2 and 4 is a prediction, too:

| what | µs |
| --- | --: |
| CPU of the dispatcher for an exchange | {times.client_exchange:,.0f} |
| and for each of its entries | {times.client_entry:.1f} |
| CPU of the server for an exchange: settle, claim, commit | {times.server_exchange:,.0f} |
| and for each of its entries | {times.server_entry:.1f} |
| CPU of the server to pass over a row that another open transaction claims | {times.locked_row:.2f} |
| and over one that another dispatcher has leased | {times.leased_row:.2f} |
| flush of the WAL, which all commits that wait share | {times.flush:,.0f} |

How many entries a dispatcher claims at once follows the library's own rule. When all cores are busy, a rate is the
cores divided by the CPU of an entry, so these rows test how the CPU grows with the dispatchers.
Other programs used up to {others:.1f} of the machine's cores meanwhile; the simulation was given the rest.
"""


def agreement_rows(report: Report) -> list[list[str]]:
    rows = [["", "measured, a second", "computed, a second", "difference"]]
    for number, share in differences(report).items():
        side = dispatchers(number)
        rates = (median(report, case, side, "per_second") for case in (DRAIN, HERE))
        rows.append([side, *(f"{rate:,.0f}" for rate in rates), f"{share:+.0%}"])
    return rows


def differences(report: Report) -> dict[int, float]:
    """By how much the computed rate differs from the measured one, by the number of dispatchers."""
    pairs = zip(points(report, DRAIN, PROCESSES), points(report, HERE, PROCESSES), strict=True)
    return {int(number): computed / measured - 1 for (number, measured), (_, computed) in pairs}


def _larger(report: Report) -> str:
    return f"""**All of this is computed, none of it is measured.** Each dispatcher has a core of its own. Each database has a
server of its own, {ROUND_TRIP / 1000:g} ms away, whose cores are as fast as the measured ones. A flush of the WAL takes
{FLUSH / 1000:g} ms at least. The dispatchers share the databases evenly. In the third picture each send takes
{SEND:g} µs of its dispatcher's CPU, about as an HTTP request does.

{_picture(ONE)}

{_picture(MANY)}

{_picture(SENDS)}

A curve bends at the first number of dispatchers that reaches {NEAR:.0%} of its highest rate:
"""


def bend_rows(report: Report) -> list[list[str]]:
    rows = [["", "bends at, dispatchers", "entries a second there", "with 1,000 dispatchers"]]
    for curve in CURVES:
        line = points(report, curve.case)
        most = max(rate for _, rate in line)
        number, rate = next(point for point in line if point[1] >= NEAR * most)
        rows.append([f"{curve.group}: {curve.label}", f"{number:,.0f}", f"{rate:,.0f}", f"{line[-1][1]:,.0f}"])
    return rows


# --- the charts


TITLES = {
    HERE_CHART: "One server: measured and computed",
    ONE: "Computed: one database, on a server of 2, 8 or 32 cores",
    MANY: f"Computed: 1 to 64 databases, each on {CORES} cores",
    SENDS: f"Computed: the same, and each send takes {SEND:g} µs of CPU",
}


def charts(report: Report) -> Iterator[tuple[str, str]]:
    """File and SVG of each chart."""
    here = [
        Line("measured", points(report, DRAIN, PROCESSES)),
        Line("computed", points(report, HERE, PROCESSES), is_dashed=True),
    ]
    groups = {HERE_CHART: here} | {
        group: [Line(each.label, points(report, each.case), is_dashed=True) for each in CURVES if each.group == group]
        for group in (ONE, MANY, SENDS)
    }
    for group, lines in groups.items():
        yield _file(group), line_chart(TITLES[group], "entries a second", "dispatchers", lines)


def _file(group: str) -> str:
    return f"{PART}-{group.replace(',', '').replace(' ', '-')}.svg"


def _picture(group: str) -> str:
    return f"![{TITLES[group]}](performance/{_file(group)})"


def add_to(folder: Path, report: Report) -> None:
    """Write scaling.md, and its charts beside those of performance.md, if the report has its figures."""
    if PART not in report.conditions:
        return
    for file, svg in charts(report):
        (folder / "performance" / file).write_text(svg)
    (folder / "scaling.md").write_text(scaling_page(report))
