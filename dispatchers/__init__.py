"""The sending process: entries go to outside services under their child keys.

    effects = Operations()

    @effects.operation("crm.contacts.upsert", window=timedelta(days=7))
    async def upsert(delivery): ...

    Dispatcher(engine, include=[effects], adapters={"stripe": StripeAdapter(api_key=...)}).run()

An adapter's author reads `delivery.py`. The heart is `dispatcher.py`; what becomes of an entry is decided in `decide.py`.
"""

from dispatchers.delivery import (
    FOREVER,
    NATIVE,
    Adapter,
    Deferred,
    Delivered,
    Delivery,
    InProgress,
    KeyConflict,
    KeyFormat,
    Outcome,
    Rejected,
    Unknown,
)
from dispatchers.dispatcher import Dispatcher
from dispatchers.operations import Operations

__all__ = [
    "FOREVER",
    "NATIVE",
    "Adapter",
    "Deferred",
    "Delivered",
    "Delivery",
    "Dispatcher",
    "InProgress",
    "KeyConflict",
    "KeyFormat",
    "Operations",
    "Outcome",
    "Rejected",
    "Unknown",
]
