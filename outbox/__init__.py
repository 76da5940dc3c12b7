"""Commit the intent with the data, and let every retry, everywhere downstream, carry the same key.

    outbox.configure(outbox.Keyring({"k1": secret}), env="prod")        # once, at the app's start

    with Session(engine) as session, session.begin():
        with outbox.idempotent(session, key, scope=customer, request=body) as claim:
            if claim.replayed:
                return claim.response
            session.add(Order(...))
            outbox.enqueue(session, "stripe.payment_intents.create", {"amount": 2000, "currency": "eur"})
            claim.respond(201, {"order": 42})

The order, the record of the request and the entry commit together or not at all. Another process, the dispatcher (package
`dispatchers`), sends the entry under a key derived from the request's key, the same for every attempt. Read next:
`enqueue.py`, then `dispatchers/decide.py`, `claims.py` and `dispatcher.py`.
"""

from outbox.databases import prepare_sqlite
from outbox.enqueue import Entry
from outbox.errors import (
    AlreadyAnswered,
    ClaimError,
    ClaimLost,
    ClaimOpen,
    ConfigurationError,
    DuplicateEntry,
    InvalidValue,
    KeyExpired,
    KeyInFlight,
    KeyMalformed,
    KeyMissing,
    NotAnswered,
    NoTransaction,
    NotSerializable,
    OutboxError,
    ParentRequired,
    RequestMismatch,
    RequestRefused,
    SchemaError,
)
from outbox.idempotency import Claim
from outbox.instance import Outbox, default
from outbox.keys import Keyring, ParentKey
from outbox.records import Response
from outbox.schema import define_tables
from outbox.status import EntryStatus

configure = default.configure
enqueue = default.enqueue
child_key = default.child_key
idempotent = default.idempotent
run_idempotent = default.run_idempotent
status = default.status
cancel = default.cancel

__all__ = [
    "AlreadyAnswered",
    "Claim",
    "ClaimError",
    "ClaimLost",
    "ClaimOpen",
    "ConfigurationError",
    "DuplicateEntry",
    "Entry",
    "EntryStatus",
    "InvalidValue",
    "KeyExpired",
    "KeyInFlight",
    "KeyMalformed",
    "KeyMissing",
    "Keyring",
    "NoTransaction",
    "NotAnswered",
    "NotSerializable",
    "Outbox",
    "OutboxError",
    "ParentKey",
    "ParentRequired",
    "RequestMismatch",
    "RequestRefused",
    "Response",
    "SchemaError",
    "cancel",
    "child_key",
    "configure",
    "default",
    "define_tables",
    "enqueue",
    "idempotent",
    "prepare_sqlite",
    "run_idempotent",
    "status",
]
