"""The final tables: what it took to get there, what is uncertain, and what the remote services' own ledgers say."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from examples.demo.audit import Audit, Case
from examples.demo.person import NAMES
from examples.demo.promises import Promise
from examples.demo.snapshot import Snapshot
from examples.demo.stage import Ending

PROBLEMS_SHOWN = 20
UNCERTAIN_SHOWN = 20
WIDTH = 96  # as wide as the live view
SAID_SO = ("uncertain", "failed")


def report(console: Console, ending: Ending) -> None:
    """Print all of it, and the verdict last."""
    result = ending.audit
    console.print()
    console.print(ordeal(ending.last, ending.promises, ending.database))
    if any("uncertain" in (case.charge, case.receipt) for case in result.cases):
        console.print()
        console.print(uncertain_ones(result))
    console.print()
    for problem in result.problems[:PROBLEMS_SHOWN]:
        console.print(f"  {problem}", style="red", markup=False, highlight=False)
    if len(result.problems) > PROBLEMS_SHOWN:
        console.print(f"  and {len(result.problems) - PROBLEMS_SHOWN} more", style="red")
    if result.problems:
        console.print()
    console.print(slide(ending))
    console.print()
    console.print(verdict(result), style="bold green" if result.passed else "bold red", highlight=False, soft_wrap=True)


def ordeal(end: Snapshot, promises: Sequence[Promise], database: str) -> Table:
    payments, mails = end.payments, end.mails
    table = Table(title="What it went through", title_justify="left", show_header=False, width=WIDTH)
    table.add_column(ratio=1)
    table.add_column(justify="right")
    sent, hung_up, conflicts, replays = (
        sum(getattr(promise, name) for promise in promises) for name in ("requests", "timeouts", "conflicts", "replays")
    )
    struck = [len(leases) for leases in end.struck]
    for text, count in (
        (f"checkouts, on {database}", end.orders),
        ("requests that the clients sent for them", sent),
        ("    hung up by the client, at any moment", hung_up),
        ("    refused with 409: the same key was in flight", conflicts),
        ("    answered from the record of an earlier one", replays),
        ("times the dispatcher was killed with SIGKILL at work", len(struck)),
        (f"    entries in its hands then ({' + '.join(map(str, struck)) or 0})", sum(struck)),
        ("requests that reached the payment service", payments.requests),
        ("    responses lost after the charge was committed", payments.lost),
        ("    500 that is stored under the key", payments.stored_500),
        ("    429, 503: nothing executed", payments.limited_429 + payments.refused_503),
        ("    409: the key was executing", payments.in_use_409),
        ("mails that the mail server accepted", len(mails.accepted)),
        ("    replies lost after that", mails.lost),
        ("times it turned one away: too many connections, greylisted, hung up", mails.turned_away.total()),
    ):
        table.add_row(text, str(count))
    return table


def uncertain_ones(result: Audit) -> Table:
    table = Table(title="Uncertain, each looked up in the remote service's ledger", title_justify="left", width=WIDTH)
    for name in ("order", "entry", "amount", "in the ledger"):
        table.add_column(name, justify="right" if name == "amount" else "left", no_wrap=True)
    rows = list(uncertain_rows(result))
    for row in rows[:UNCERTAIN_SHOWN]:
        table.add_row(*row)
    if len(rows) > UNCERTAIN_SHOWN:
        table.caption = f"and {len(rows) - UNCERTAIN_SHOWN} more"
    return table


def uncertain_rows(result: Audit) -> Iterator[tuple[str, str, str, str]]:
    for case in result.cases:
        amount = f"{case.promise.amount / 100:.2f} {case.promise.currency}"
        for kind, state, verb, effects in (
            ("charge", case.charge, "charged", case.charges),
            ("receipt", case.receipt, "mailed", case.mails),
        ):
            if state == "uncertain":
                yield case.order_id, kind, amount, happened(verb, len(effects))


def happened(verb: str, count: int) -> str:
    return {0: f"not {verb}", 1: f"{verb} once"}.get(count, f"{verb} {count} times")


def slide(ending: Ending) -> Table:
    """The one table to show: both remote services' ledgers, beside what the outbox says."""
    cases, last = ending.audit.cases, ending.last
    lost = last.payments.lost + last.mails.lost
    title = (
        f"{last.orders} checkouts, {len(last.struck)} kills, {lost} lost responses: the payment and the mail ledger say"
    )
    table = Table(title=title, title_justify="left", caption_justify="left", width=WIDTH)
    table.add_column(ratio=1)
    table.add_column("charges", justify="right")
    table.add_column("receipts", justify="right")
    table.add_column(width=2)

    def row(text: str, charges: int, receipts: int | None, *, good: bool = True) -> None:
        mark = "[green]✓[/green]" if good else "[red]✗[/red]"
        table.add_row(text, f"[bold]{charges}[/bold]", "" if receipts is None else f"[bold]{receipts}[/bold]", mark)

    def counted(text: str, counts: Callable[[str, int], bool], *, none: bool = False) -> None:
        charges = sum(counts(case.charge, len(case.charges)) for case in cases)
        receipts = sum(counts(case.receipt, len(case.mails)) for case in cases if receipt_is_due(case))
        row(text, charges, receipts, good=not none or charges + receipts == 0)

    row("promised: orders with a 201, receipts of those charged", len(cases), sum(map(receipt_is_due, cases)))
    counted("once, and settled as delivered", lambda state, times: state == "delivered" and times == 1)
    counted("uncertain, and said so", lambda state, times: state == "uncertain")
    counted("    of these it had happened, once", lambda state, times: state == "uncertain" and times == 1)
    if any("failed" in (case.charge, case.receipt) for case in cases):
        counted("not at all, and settled as failed", lambda state, times: state == "failed" and times == 0)
    counted("twice or more", lambda state, times: times > 1, none=True)
    counted("missing, and not said so", lambda state, times: times == 0 and state not in SAID_SO, none=True)
    row("duplicates suppressed downstream, by the same child key", last.payments.replays, None)
    if ending.resolved is not None:
        entry = ending.resolved.entry
        table.caption = f"Settled by an operator's decision, as shown: the {NAMES[entry.operation]} {entry.id}"
    return table


def receipt_is_due(case: Case) -> bool:
    return case.charge == "delivered"


def verdict(result: Audit) -> str:
    if not result.passed:
        return f"FAILED: {len(result.problems)} problems"
    charges = sum(case.charge == "uncertain" for case in result.cases)
    receipts = sum(case.receipt == "uncertain" for case in result.cases)
    return (
        "PASSED: nothing charged or mailed twice, nothing missing;"
        f" {charges} charges and {receipts} receipts are uncertain, and the outbox says so"
    )
