"""`python -m dispatchers` is the same as `outbox`."""

from dispatchers.cli import main

main(prog_name="outbox")
