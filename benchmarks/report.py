"""A report as text, and as the page docs/performance.md with its charts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.charts import Bar, bar_chart
from benchmarks.goals import Verdict, judge
from benchmarks.harness import Report, Series

METRICS = {
    "per_second": ("a second", ",.0f"),
    "p50_ms": ("p50, ms", ".2f"),
    "p95_ms": ("p95, ms", ".1f"),
    "p99_ms": ("p99, ms", ".2f"),
    "client_us": ("client CPU, µs", ",.0f"),
    "server_us": ("server CPU, µs", ",.0f"),
    "broker_us": ("broker's CPU, µs", ",.0f"),
    "cpu_us": ("CPU, µs", ",.0f"),
    "wal_bytes": ("WAL, bytes", ",.0f"),
    "memory_mb": ("memory, MB", ",.1f"),
    "cpu_percent": ("CPU, %", ".2f"),
    "queries_per_second": ("queries a second", ".2f"),
    "first_send_ms": ("ms", ",.0f"),
    "entries_per_exchange": ("entries per exchange", ",.0f"),
    "connections": ("connections", ",.0f"),
    "cores_others": ("cores used by others", ".2f"),
    "table_bytes": ("tables, bytes", ",.0f"),
    "index_bytes": ("indexes, bytes", ",.0f"),
    "passed_us": ("server CPU, µs", ".2f"),
    "flush_us": ("µs", ",.0f"),
}
"""How each metric is called, and how its figures are written."""


@dataclass(frozen=True)
class Part:
    """A section of the page. charts: the metrics that are drawn, of each case."""

    title: str
    text: str
    charts: tuple[str, ...] = ()


PARTS = {
    "drain": Part(
        "Drain",
        "Jobs that do nothing wait in the queue, and one process drains them. This measures only the queue: a real send costs"
        " more than the queue. The time is from the start of the first job until the queue is empty.",
        ("per_second", "cpu_us", "wal_bytes"),
    ),
    "latency": Part(
        "Wake-up",
        "An app commits one entry every 30 to 120 ms, to a dispatcher that is idle; in the case *trickle*, one every 30 ms. The"
        " time is from the return of the commit to the start of the send. The CPU is that of the dispatchers and of the whole"
        " server for one entry. The last case measures how much the hints that wake a dispatcher cost the app.",
        ("p50_ms", "p99_ms"),
    ),
    "sends": Part(
        "Real sends",
        "A local server answers each request after 20 ms. The adapters of the library send to it, alone and in a"
        " dispatcher that drains PostgreSQL. A bare client in the same kind of process is the comparison.",
        ("per_second",),
    ),
    "relay": Part(
        "Relay to a broker",
        "Entries wait in the queue, and one process publishes each to a stream of NATS JetStream, on one server of the same"
        " machine that stores messages in files. Two drains are the comparison: one does nothing, and one publishes nothing"
        " but waits for an answer and stores a result like that of a message.",
        ("per_second",),
    ),
    "enqueue": Part(
        "Enqueue",
        "This measures what entries add to a transaction that inserts one ORM row. The last case is the WAL of one entry in"
        " a transaction of its own, directly after a checkpoint, with 200,000 older entries in the table.",
        ("cpu_us",),
    ),
    "requests": Part(
        "Requests",
        "A client sends a POST to a FastAPI app that reads one row, writes four and enqueues one entry. The request is sent"
        " without a claim, with one, and again under the same key. The CPU is that of the web process and of the server.",
        ("cpu_us",),
    ),
    "scale": Part(
        "Under load",
        "This measures the drain again, under conditions that are known to slow down queues on PostgreSQL. It also measures"
        " the resources that an idle dispatcher uses.",
    ),
    "dashboard": Part(
        "Dashboard",
        "This measures each page of the dashboard, with its HTML, on a large outbox. It also measures the drain while every page"
        " of a dashboard is open and refreshes every five seconds.",
    ),
}


# --- as text


def tables(report: Report, part: str) -> Iterator[tuple[str, list[list[str]]]]:
    """The tables of a part, one for each of its cases: a line of headings, and one line for each side."""
    cases = dict.fromkeys(each.case for each in report.series if each.part == part)
    for case in cases:
        chosen = [each for each in report.series if (each.part, each.case) == (part, case)]
        metrics = [metric for metric in METRICS if any(each.metric == metric for each in chosen)]
        rows = [["case", *(METRICS[metric][0] for metric in metrics)]]
        for side in dict.fromkeys(each.side for each in chosen):
            found = {each.metric: each for each in chosen if each.side == side}
            rows.append([side, *(_cell(found.get(metric)) for metric in metrics)])
        yield case, rows


def _cell(series: Series | None) -> str:
    return "" if series is None else f"{_figure(series.metric, series.median)} ±{series.spread / 2:.0%}"


def _figure(metric: str, value: float) -> str:
    return format(value, METRICS[metric][1])


def goal_rows(verdicts: Iterable[Verdict]) -> list[list[str]]:
    rows = [["figure", "divided by", "measured", "goal", "result"]]
    for verdict in verdicts:
        goal = verdict.goal
        what = ", ".join(filter(None, (goal.case, goal.side, METRICS[goal.metric][0])))
        value = f"{verdict.value:.2f}" if goal.over else _figure(goal.metric, verdict.value)
        rows.append([what, goal.over or "", value, goal.limit, verdict.word])
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            f"{cell:{'<' if column == 0 else '>'}{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def print_part(report: Report) -> None:
    for part in dict.fromkeys(each.part for each in report.series):
        for case, rows in tables(report, part):
            print(f"\n{part}{': ' if case else ''}{case}\n{aligned(rows)}")
    if verdicts := judge(report):
        print(f"\n{aligned(goal_rows(verdicts))}", flush=True)


# --- as a page


HEAD = """# Performance

This page shows what the library costs, compared with other libraries at their best settings, and under load. Many
figures have a goal. Each missed goal is marked, and [explained](costs.md#why-some-goals-are-missed). `python3 dev.py
bench` measures all figures again on your machine.

Compare the ratios, because a rate depends on the machine. All rows of a table were measured in the same minutes, in turn (A
B A B). A figure is the median of its rounds. The number after ± is half the distance between the smallest and the largest
round. A ratio is the median of the rounds' ratios.
"""


def performance_page(report: Report) -> str:
    """The text of docs/performance.md."""
    verdicts = judge(report)
    met = sum(each.is_met for each in verdicts)
    sections = [HEAD, f"**{met} of {len(verdicts)} goals are met.** {machine_line(report)}\n"]
    for name, part in PARTS.items():
        if any(each.part == name for each in report.series):
            sections.append(_section(report, name, part, [each for each in verdicts if each.goal.part == name]))
    sections.append("## What differs\n\n" + "".join(f"- {note}\n" for note in report.notes))
    return "\n".join(sections)


def machine_line(report: Report) -> str:
    return "The machine: " + "; ".join(f"{name} {value}" for name, value in report.machine.items() if value) + "."


def _section(report: Report, name: str, part: Part, verdicts: list[Verdict]) -> str:
    measured = dict.fromkeys(text for each, text in report.conditions.items() if each.partition(".")[0] == name)
    lines = [f"## {part.title}\n", f"{part.text}\n", f"Measured on {'; '.join(measured)}.\n"]
    lines += [f"![{title}](performance/{file})" for file, title, _ in charts(report, name)]
    for case, rows in tables(report, name):
        lines.append(f"\n{case[:1].upper()}{case[1:]}:\n" if case else "")
        lines.append(markdown(rows))
    lines.append(f"\nGoals:\n\n{markdown(goal_rows(verdicts))}" if verdicts else "")
    return "\n".join(lines) + "\n"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    ruler = ["---", *["--:"] * (len(rows[0]) - 1)]
    marked = [[f"**{cell}**" if cell == "MISSED" else cell for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (marked[0], ruler, *marked[1:]))


def charts(report: Report, part: str) -> Iterator[tuple[str, str, str]]:
    """File, title and SVG of each of the part's charts."""
    for metric in PARTS[part].charts:
        for case in dict.fromkeys(each.case for each in report.series if each.part == part):
            chosen = [each for each in report.series if (each.part, each.case, each.metric) == (part, case, metric)]
            if len(chosen) < 2:
                continue
            title = ": ".join(filter(None, (PARTS[part].title, case)))
            svg = bar_chart(title, METRICS[metric][0], [_bar(each) for each in chosen])
            file = "-".join(filter(None, (part, *case.lower().replace(",", "").replace(":", "").split(), metric)))
            yield f"{file.replace('_', '-')}.svg", f"{title}, {METRICS[metric][0]}", svg


PEERS = (
    "PGQueuer",
    "Procrastinate",
    "DBOS",
    "graphile-worker",
    "pg-boss",
    "server-side limit",
    "bare",
    "no entry",
    "without",
    "plain",
)


def _bar(series: Series) -> Bar:
    text = _figure(series.metric, series.median)
    ours = not series.side.startswith(PEERS)
    return Bar(series.side, series.median, min(series.values), max(series.values), text, ours)


def add_to(folder: Path, report: Report) -> Report:
    """Write performance.md, and beside it a folder with the charts and the figures. What was measured again is replaced.

    Returns all figures that the folder has now.
    """
    beside = folder / "performance"
    beside.mkdir(parents=True, exist_ok=True)
    figures = beside / "figures.json"
    if figures.exists():
        report = merged(Report.from_json(figures.read_text()), report)
    for old in beside.glob("*.svg"):
        old.unlink()
    for part in PARTS:
        for file, _, svg in charts(report, part):
            (beside / file).write_text(svg)
    figures.write_text(report.to_json())
    (folder / "performance.md").write_text(performance_page(report))
    return report


def merged(old: Report, new: Report) -> Report:
    """The old report with the cases of the new one in place of its own."""
    measured = {(each.part, each.case) for each in new.series}
    kept = [each for each in old.series if (each.part, each.case) not in measured]
    return Report(new.machine, [*kept, *new.series], old.conditions | new.conditions, new.notes)
