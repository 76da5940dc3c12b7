"""The final table: the payment service's word, beside what it took to get there."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from examples.demo.audit import Audit
from examples.demo.receipts import Receipt
from examples.demo.snapshot import Snapshot

PROBLEMS_SHOWN = 20


def report(console: Console, result: Audit, end: Snapshot, receipts: Sequence[Receipt], database: str) -> None:
    """Print all of it, and the verdict last."""
    console.print()
    console.print(ordeal(end, receipts, database))
    console.print()
    console.print(findings(result))
    if result.uncertain:
        console.print()
        console.print(uncertain_orders(result))
    console.print()
    for problem in result.problems[:PROBLEMS_SHOWN]:
        console.print(f"  {problem}", style="red", markup=False, highlight=False)
    if len(result.problems) > PROBLEMS_SHOWN:
        console.print(f"  and {len(result.problems) - PROBLEMS_SHOWN} more", style="red")
    console.print(verdict(result), style="bold green" if result.passed else "bold red", highlight=False)


def ordeal(end: Snapshot, receipts: Sequence[Receipt], database: str) -> Table:
    service = end.service
    table = Table(title="What it went through", title_justify="left", show_header=False, width=88)
    table.add_column(ratio=1)
    table.add_column(justify="right")
    sent, hung_up, conflicts, replays = (
        sum(getattr(receipt, name) for receipt in receipts) for name in ("requests", "timeouts", "conflicts", "replays")
    )
    kills = " + ".join(str(count) for count in end.struck)
    for text, count in (
        (f"checkouts, on {database}", end.orders),
        ("requests that the clients sent for them", sent),
        ("    hung up by the client, at any moment", hung_up),
        ("    refused with 409: the same key was in flight", conflicts),
        ("    answered from the record of an earlier one", replays),
        ("times the dispatcher was killed with SIGKILL at work", len(end.struck)),
        (f"    entries in its hands then ({kills or 0})", sum(end.struck)),
        ("requests that reached the payment service", service.requests),
        ("    responses lost after the charge was committed", service.lost),
        ("    500 that is stored under the key", service.stored_500),
        ("    429, 503: nothing executed", service.limited_429 + service.refused_503),
        ("    409: the key was executing", service.in_use_409),
    ):
        table.add_row(text, str(count))
    return table


def findings(result: Audit) -> Table:
    table = Table(title="What the payment service's own ledger says", title_justify="left", show_header=False, width=88)
    table.add_column(ratio=1)
    table.add_column(justify="right")
    table.add_column(width=2)
    settled_once = sum(each.charges == 1 and each.state == "delivered" for each in result.verdicts)
    unsure = len(result.uncertain)
    twice = sum(each.charges > 1 for each in result.verdicts)
    missing = sum(each.charges == 0 and each.state != "uncertain" for each in result.verdicts)
    for text, count, good in (
        ("orders that clients were promised with a 201", len(result.verdicts), True),
        ("charged exactly once, and settled as delivered", settled_once, settled_once + unsure == len(result.verdicts)),
        ("charged twice or more", twice, twice == 0),
        ("not charged, though the outbox does not say uncertain", missing, missing == 0),
        (f"uncertain, and said so (at most {result.uncertain_max} may be)", unsure, unsure <= result.uncertain_max),
        ("    of these charged once", sum(each.charges == 1 for each in result.uncertain), True),
        ("    of these not charged", sum(each.charges == 0 for each in result.uncertain), True),
        ("duplicates suppressed downstream, by the same child key", result.suppressed, True),
    ):
        table.add_row(text, f"[bold]{count}[/bold]", "[green]✓[/green]" if good else "[red]✗[/red]")
    return table


def uncertain_orders(result: Audit) -> Table:
    table = Table(title="Uncertain orders, each looked up in that ledger", title_justify="left", width=88)
    for name in ("order", "customer", "amount", "in the ledger"):
        table.add_column(name, justify="right" if name == "amount" else "left")
    for each in result.uncertain:
        looked_up = {0: "not charged", 1: "charged once"}.get(each.charges, f"charged {each.charges} times")
        table.add_row(each.order_id, each.customer, f"{each.amount / 100:.2f} {each.currency}", looked_up)
    return table


def verdict(result: Audit) -> str:
    if not result.passed:
        return f"FAILED: {len(result.problems)} problems"
    sure = len(result.verdicts) - len(result.uncertain)
    return (
        f"PASSED: {sure} of {sure} settled orders charged exactly once, {len(result.uncertain)} uncertain, none twice"
    )
