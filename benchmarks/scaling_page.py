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
from dispatchers.settings import RETENTION

HERE_CHART = "one server"
FLUSH_OF_A_DISK = 20.0  # microseconds at least
NEAR = 0.9  # of a curve's highest point: there it bends
POSTGRES_CONNECTIONS = 100  # the default of max_connections
A_DAY = 1_000_000  # entries, in the example

HEAD = """# Scaling

This page shows how many entries one database server can handle, and when to add dispatchers, databases or a broker. The
figures of one server are measured. The figures of larger machines are computed by a simulation. `python3 dev.py bench
scaling` measures and computes all figures again on your machine.

Unless the text says otherwise, a send costs nothing. So the figures show the limits of the queue. A real send costs more
than the queue, and the services of most apps are slower than the queue.
"""

ADD = """## When to add what

**Run at least two dispatchers**, so that one machine may fail.

**Add a dispatcher** when entries wait although the service and the database have room. A dispatcher uses one core, and real
sends use most of it. First raise `concurrency`: with more sends at a time, a dispatcher claims more entries in one
*exchange*, which is one round of settling and claiming with the database.

**Do not add dispatchers beyond the bend** of the curves below. Each dispatcher passes over the rows that the others have
claimed. And if each dispatcher gets fewer entries, it claims fewer entries in an exchange. Both cost the server CPU. Beyond
the bend, another dispatcher makes all of them slower.

**Add a database** when the server's processors are busy, when the tables no longer fit into its memory, or when it runs
out of connections. An entry commits with the rows of its own database. So [divide the rows](sharding.md) by a key that
your transactions never cross, such as the tenant. [One fleet](sharding.md#serve-several-databases-a-fleet) then serves
all databases. Two databases handle twice as many entries as one, unless they share something else: the service, the
network, or the one process that serves both.

**Add a broker** when each message has many consumers, or when consumers often change. The outbox still writes and settles
each entry, and [publishes it to the broker](brokers.md), so a broker does not raise these limits. But the app enqueues one
entry for each message, instead of one for each consumer, and the broker stores the messages.
"""

LEFT_OUT = """## What the simulation leaves out

- **Other limits of a server.** The simulation counts only the processors' time. The bandwidth of the WAL, locks inside
  PostgreSQL that many cores compete for, and vacuum also limit a server. None of these was measured above this machine's
  rates, so a real server's curve may bend earlier.
- **Enqueue.** The simulated servers only drain. On a real server the app's transactions use the same processors.
- **An empty queue.** The simulated queue is never empty. If there is little to do, each commit wakes all dispatchers, and
  each dispatcher searches for due entries every five seconds. So hundreds of idle dispatchers cost the server more than a few
  busy ones.
- **Services.** The simulated services always have room. The simulation has no rate limits, no `concurrency` and no slow
  answers.
- **Connections.** Hundreds of dispatchers on one server need a pooler, which the simulation does not have.
- **Memory and disk reads.** In the simulation all rows are in the cache.
- **One process for several databases.** In the simulation it divides its `concurrency` and `max_in_flight` evenly among
  them. This was not measured.
- **The time of an exchange.** It is assumed to vary exponentially around its mean. The row of one dispatcher tests this
  assumption.
- **Switching between processes.** The measured time of an exchange includes switching between many processes on few cores.
  So a machine with a core for each process may be faster than computed.
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
    return " The server's files were in memory, so its commits did not wait for a disk."


def _short(report: Report) -> str:
    server = median(report, DRAIN, dispatchers(1), "server_us")
    written = median(report, ENQUEUE, "1 writer, 1 per commit", "server_us")
    most = max(points(report, DRAIN, PROCESSES), key=lambda point: point[1])
    of_connections = median(report, DRAIN, dispatchers(8), "connections") / 8
    waiting, delivered = (_bytes(report, side) for side in ("an entry that waits", "a delivered entry"))
    cores, kept_days = report.machine["cores"], RETENTION.days
    return f"""- The server and {dispatchers(int(most[0]))} share {cores} cores, and drain {most[1]:,.0f} entries a second.
- One core of the server settles {1e6 / server:,.0f} waiting entries a second. If the app also enqueues each entry in a
  transaction of its own, one core enqueues and settles {1e6 / (server + written):,.0f} a second.
- A dispatcher uses {of_connections:.0f} connections. So {POSTGRES_CONNECTIONS // of_connections:.0f} dispatchers use
  the {POSTGRES_CONNECTIONS} connections that PostgreSQL allows by default.
- With its indexes and a payload of 100 bytes, an entry takes {waiting:,.0f} bytes while it waits, and {delivered:,.0f} bytes
  when it is delivered. A million entries a day, kept for {kept_days} days, take {delivered * A_DAY * kept_days / 1e9:.0f} GB.
"""


def _bytes(report: Report, side: str) -> float:
    return sum(median(report, SIZE, side, metric) for metric in ("table_bytes", "index_bytes"))


def _drain(report: Report) -> str:
    return f"""Dispatchers with default settings drain entries whose send does nothing. They run on the server's own machine. All
dispatchers are idle when the entries are committed.

{_picture(HERE_CHART)}
"""


def _enqueue(report: Report) -> str:
    return """
Writers are processes that enqueue as fast as they can, with 1 or 100 entries in a transaction. The figures are for one
entry:
"""


def _size(report: Report) -> str:
    return """
The table shows the bytes on the disk for an entry with a payload of 100 bytes:
"""


def _agreement(report: Report) -> str:
    times = times_of(report)
    others = max(median(report, DRAIN, dispatchers(number), "cores_others") for number in PROCESSES)
    return f"""The simulation is a closed queueing network. Its input is the measured CPU time of 1 and of 8 dispatchers, not
their rates. From this it computes the rates of 1, 2, 4 and 8 dispatchers. The CPU time of 2 and 4 dispatchers is a prediction,
too. The input:

| time | µs |
| --- | --: |
| CPU of the dispatcher for one exchange | {times.client_exchange:,.0f} |
| CPU of the dispatcher for each entry of the exchange | {times.client_entry:.1f} |
| CPU of the server for one exchange: settle, claim, commit | {times.server_exchange:,.0f} |
| CPU of the server for each entry of the exchange | {times.server_entry:.1f} |
| CPU of the server to pass over a row that another open transaction claims | {times.locked_row:.2f} |
| CPU of the server to pass over a row that another dispatcher has leased | {times.leased_row:.2f} |
| one flush of the WAL, which all waiting commits share | {times.flush:,.0f} |

The number of entries in a claim follows the library's own rule. When all cores are busy, the rate is
the number of cores divided by the CPU time of an entry. So these rows test how the CPU time grows with the number of
dispatchers. Other programs used up to {others:.1f} of the machine's cores meanwhile, and the simulation has only the rest.
"""


def agreement_rows(report: Report) -> list[list[str]]:
    rows = [["dispatchers", "measured, a second", "computed, a second", "difference"]]
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
    return f"""**All figures of this section are computed. None is measured.** Each dispatcher has a core of its own.
Each database has a server of its own, with a round trip of {ROUND_TRIP / 1000:g} ms, whose cores are as fast as the
measured ones. A flush of the WAL takes at least {FLUSH / 1000:g} ms. The dispatchers share the databases evenly. In the
third picture each send takes {SEND:g} µs of its dispatcher's CPU, about as much as an HTTP request.

{_picture(ONE)}

{_picture(MANY)}

{_picture(SENDS)}

A curve bends at the first number of dispatchers with {NEAR:.0%} of its highest rate:
"""


def bend_rows(report: Report) -> list[list[str]]:
    rows = [
        ["curve", "dispatchers at the bend", "entries a second at the bend", "entries a second with 1,000 dispatchers"]
    ]
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
