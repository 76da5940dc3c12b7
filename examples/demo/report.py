"""The final tables: the faults of the run, the uncertain entries, and the remote services' ledgers next to the outbox."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from examples.demo.audit import Audit, Case
from examples.demo.checkout_results import CheckoutResult
from examples.demo.demo_run import DemoResult
from examples.demo.operator_decision import NAMES
from examples.demo.snapshot import Snapshot

PROBLEMS_SHOWN = 20
UNCERTAIN_SHOWN = 20
WIDTH = 96  # as wide as the live view
REPORTED = ("uncertain", "failed")


def report(console: Console, ending: DemoResult) -> None:
    """Print all tables, and the verdict last."""
    result = ending.audit
    console.print()
    console.print(faults_table(ending.last, ending.results, ending.database))
    if any("uncertain" in (case.charge, case.receipt) for case in result.cases):
        console.print()
        console.print(uncertain_table(result))
    console.print()
    for problem in result.problems[:PROBLEMS_SHOWN]:
        console.print(f"  {problem}", style="red", markup=False, highlight=False)
    if len(result.problems) > PROBLEMS_SHOWN:
        console.print(f"  and {len(result.problems) - PROBLEMS_SHOWN} more", style="red")
    if result.problems:
        console.print()
    console.print(ledger_table(ending))
    console.print()
    console.print(verdict(result), style="bold green" if result.passed else "bold red", highlight=False, soft_wrap=True)


def faults_table(end: Snapshot, results: Sequence[CheckoutResult], database: str) -> Table:
    payments, mails = end.payments, end.mails
    table = Table(title="The faults of this run", title_justify="left", show_header=False, width=WIDTH)
    table.add_column(ratio=1)
    table.add_column(justify="right")
    sent, hung_up, conflicts, replays = (
        sum(getattr(checkout, name) for checkout in results)
        for name in ("requests", "timeouts", "conflicts", "replays")
    )
    interrupted = [len(leases) for leases in end.interrupted]
    for text, count in (
        (f"checkouts, on {database}", end.orders),
        ("requests that the clients sent", sent),
        ("    the client closed the connection", hung_up),
        ("    the shop answered 409: the key was in flight", conflicts),
        ("    the shop replayed an earlier answer", replays),
        ("kills of the dispatcher (SIGKILL), while it was sending", len(interrupted)),
        (f"    entries that it was sending ({' + '.join(map(str, interrupted)) or 0})", sum(interrupted)),
        ("requests that reached the payment service", payments.requests),
        ("    the response was lost after the charge was committed", payments.lost),
        ("    the service answered 500, and stored it under the key", payments.stored_500),
        ("    the service answered 429 or 503, and executed nothing", payments.limited_429 + payments.refused_503),
        ("    the service answered 409: the key was executing", payments.in_use_409),
        ("mails that the mail service accepted", len(mails.accepted)),
        ("    the reply was lost after that", mails.lost),
        ("mails that it refused: too many requests (429)", mails.turned_away.total()),
    ):
        table.add_row(text, str(count))
    return table


def uncertain_table(result: Audit) -> Table:
    title = "The uncertain entries, and what the remote service's ledger shows"
    table = Table(title=title, title_justify="left", width=WIDTH)
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
        amount = f"{case.checkout.amount / 100:.2f} {case.checkout.currency}"
        for kind, state, verb, effects in (
            ("charge", case.charge, "charged", case.charges),
            ("receipt", case.receipt, "mailed", case.mails),
        ):
            if state == "uncertain":
                yield case.order_id, kind, amount, happened(verb, len(effects))


def happened(verb: str, count: int) -> str:
    return {0: f"not {verb}", 1: f"{verb} once"}.get(count, f"{verb} {count} times")


def ledger_table(ending: DemoResult) -> Table:
    """The main table: both remote services' ledgers, compared with the outbox."""
    cases, last = ending.audit.cases, ending.last
    lost = last.payments.lost + last.mails.lost
    title = (
        f"{last.orders} checkouts, {len(last.interrupted)} kills, {lost} lost responses: ledgers and outbox compared"
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

    row("expected: orders answered 201, receipts of charged orders", len(cases), sum(map(receipt_is_due, cases)))
    counted("happened once; the outbox reports delivered", lambda state, times: state == "delivered" and times == 1)
    counted("the outbox reports uncertain", lambda state, times: state == "uncertain")
    counted("    of these, happened once", lambda state, times: state == "uncertain" and times == 1)
    if any("failed" in (case.charge, case.receipt) for case in cases):
        counted("did not happen; the outbox reports failed", lambda state, times: state == "failed" and times == 0)
    counted("happened twice or more", lambda state, times: times > 1, none=True)
    counted("missing and not reported", lambda state, times: times == 0 and state not in REPORTED, none=True)
    row("repeated requests that the service recognised by the key", last.payments.replays, None)
    if ending.resolved is not None:
        entry = ending.resolved.entry
        table.caption = f"The operator resolved one entry (see above): the {NAMES[entry.operation]} {entry.id}"
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
        f" the outbox reports {charges} charges and {receipts} receipts as uncertain"
    )
