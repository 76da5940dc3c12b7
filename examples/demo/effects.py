"""The dispatcher of the demo: `outbox run examples.demo.effects:make_dispatcher`."""

import os
from datetime import timedelta

from dispatchers import Dispatcher
from dispatchers.adapters import StripeAdapter

CONCURRENCY = 16

# Short, so that what a killed dispatcher held is taken up again soon: the lease must outlast the timeout and the margin.
TIMEOUT = timedelta(seconds=3)
MARGIN = timedelta(seconds=1)
LEASE = timedelta(seconds=8)
POLL = timedelta(milliseconds=200)


def make_dispatcher() -> Dispatcher:
    stripe = StripeAdapter(
        api_key=os.environ["STRIPE_API_KEY"],
        base_url=os.environ["STRIPE_URL"],
        timeout=TIMEOUT,
    )
    return Dispatcher(
        os.environ["DATABASE_URL"],
        adapters={"stripe": stripe},
        lease=LEASE,
        margin=MARGIN,
        poll=POLL,
        concurrency=CONCURRENCY,
    )
