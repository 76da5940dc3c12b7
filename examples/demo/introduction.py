"""The introduction."""

from rich.console import Console
from rich.table import Table

from examples.demo.killer import POINTS
from examples.demo.scenario import DemoOptions

SECONDS_AFTER_THE_RUSH = 15  # for the remaining leases and retries, and for the operator's decision

OPENING = """\
{orders} customers check out within {seconds:.0f} seconds. For each checkout the shop commits the order, the record of the
request and the entry for the charge in [b]one transaction[/b]. The dispatcher sends the charge to the payment service.
When the charge has succeeded, a callback marks the order as paid and enqueues the receipt, again in one transaction."""

TROUBLE = (
    ("clients", "hang up at any moment, click twice, and repeat requests under the same Idempotency-Key"),
    ("payment service", "loses one response in ten after the charge; sometimes answers 500, 503, 429 or 409"),
    ("mail service", "refuses mails for a while (429), and sometimes loses its answer to a mail"),
    ("dispatcher", f"is killed with SIGKILL {len(POINTS)} times, while it is sending"),
)

CLOSING = """\
If the outcome of a charge is unknown, the dispatcher sends the charge again under [b]the same key[/b]. The payment
service remembers this key. A mail is not sent again, because Postmark has no keys: its entry becomes [b]uncertain[/b]. An
operator resolves one uncertain entry. At the end an audit compares the ledgers of the payment service and of the mail
service with the answers that the clients got: nothing may have happened twice, and nothing may be missing."""

FORGETFUL = (
    "In this run the payment service forgets every key at once. So it charges cards twice: [b]the audit must fail.[/b]"
)


def print_introduction(console: Console, options: DemoOptions) -> None:
    trouble = Table.grid(padding=(0, 2))
    for who, what in TROUBLE:
        trouble.add_row(f"  [b]{who}[/b]", what)
    seconds = options.rush_seconds
    console.print(paragraph(OPENING.format(orders=options.orders, seconds=seconds)), highlight=False)
    console.print()
    console.print(trouble, highlight=False)
    console.print()
    console.print(paragraph(CLOSING), highlight=False)
    if options.forgetful:
        console.print()
        console.print(FORGETFUL, style="yellow", highlight=False)
    console.print()
    console.print(f"This takes about {seconds + SECONDS_AFTER_THE_RUSH:.0f} seconds.", highlight=False)
    console.print()


def paragraph(text: str) -> str:
    """Remove the line breaks of this file: the terminal has its own width."""
    return text.replace("\n", " ")
