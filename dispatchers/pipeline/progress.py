"""What an exchange with the database has brought."""

from typing import NamedTuple


class Progress(NamedTuple):
    """The result of an exchange. asked: whether it had quotas. claimed: with the entries that were passed over.

    has_more: whether more entries of these destinations may be due.
    """

    asked: bool = False
    claimed: int = 0
    settled: int = 0
    has_more: bool = False
