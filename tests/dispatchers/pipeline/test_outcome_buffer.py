"""Outcomes that another transaction keeps from being settled: each is tried again for its own lease."""

from datetime import timedelta
from uuid import uuid4

from dispatchers.pipeline.outcomes import OutcomeBuffer
from dispatchers.transitions import ClaimedEntry, RetryCallback, Settle

LEASE = timedelta(seconds=10)
DELIVERED = Settle("delivered", 1)


def test_two_claims_of_an_entry_are_postponed_apart() -> None:
    """A process claims an entry again although it still holds back its earlier outcome: the row was locked beyond the lease."""
    now = 0.0
    endings = OutcomeBuffer(clock=lambda: now, timeout=LEASE)
    first = ClaimedEntry._make([None] * len(ClaimedEntry._fields))._replace(id=uuid4(), lease_token=uuid4())
    second = first._replace(lease_token=uuid4())
    endings.postpone([(first, DELIVERED)], {first.lease})
    now = 8.0
    endings.postpone([(second, DELIVERED)], {second.lease})
    now = 11.0

    tried = dict(endings.take_postponed())
    assert [type(tried[entry]) for entry in (first, second)] == [RetryCallback, Settle], (
        "only the first has waited too long"
    )
