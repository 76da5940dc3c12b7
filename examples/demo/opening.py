"""The introduction."""

from rich.console import Console
from rich.table import Table

from examples.demo.act import Script
from examples.demo.killer import POINTS

SECONDS_AFTER_THE_RUSH = 15  # what is left in leases and retries, and the person

OPENING = """\
{orders} customers check out, in {seconds:.0f} seconds. For each the shop commits, in [b]one transaction[/b], the order, the
record of the request, and the charge that is to follow. The dispatcher sends the charge to the payment service. When
that has settled, a callback marks the order as paid and enqueues the receipt, again in one transaction."""

TROUBLE = (
    ("clients", "hang up at any moment, click twice, and ask again under the same Idempotency-Key"),
    ("payment service", "charges, and then loses one response in ten; answers 500, 503, 429 and 409"),
    ("mail server", "hangs up, greylists, and now and then takes a mail without saying so"),
    ("dispatcher", f"is killed with SIGKILL {len(POINTS)} times, while it is sending"),
)

CLOSING = """\
A charge whose fate is unknown is sent again, under [b]the same key[/b], which the payment service remembers. A mail is
not, as SMTP knows no keys. Where nobody can know, the outbox says [b]uncertain[/b], and a person resolves one of those.
Then the ledgers of the payment service and of the mail server are audited against what the clients were promised:
nothing twice, nothing missing."""

FORGETFUL = (
    "Today the payment service forgets every key at once, so cards will be charged twice: [b]the audit must fail.[/b]"
)


def tell_what_will_happen(console: Console, script: Script) -> None:
    trouble = Table.grid(padding=(0, 2))
    for who, what in TROUBLE:
        trouble.add_row(f"  [b]{who}[/b]", what)
    seconds = script.rush_seconds
    console.print(paragraph(OPENING.format(orders=script.orders, seconds=seconds)), highlight=False)
    console.print()
    console.print(trouble, highlight=False)
    console.print()
    console.print(paragraph(CLOSING), highlight=False)
    if script.forgetful:
        console.print()
        console.print(FORGETFUL, style="yellow", highlight=False)
    console.print()
    console.print(f"This takes about {seconds + SECONDS_AFTER_THE_RUSH:.0f} seconds.", highlight=False)
    console.print()


def paragraph(text: str) -> str:
    """Without the line breaks of this file: the terminal has its own width."""
    return text.replace("\n", " ")
