"""A transactional outbox: entries commit together with your rows, and every attempt to send an entry carries the same key.

    outbox.configure(outbox.Keyring({"k1": secret}), env="prod")        # once, at the app's start

    with Session(engine) as session, session.begin():
        with outbox.idempotent(session, key, scope=customer, content=body) as claim:
            if claim.replayed:
                return claim.response
            session.add(Order(...))
            outbox.enqueue(session, "stripe.payment_intents.create", {"amount": 2000, "currency": "eur"})
            claim.respond(201, {"order": 42})

The order, the record of the request and the entry commit together or not at all. Another process, the dispatcher (package
`dispatchers`), sends the entry. It derives the key of the entry from the key of the request, so every attempt has the same
key. Read next: `enqueue.py`, then in `dispatchers` `decide.py`, `store/queue/claims_postgresql.py` and `pipeline/claim_loops.py`.
"""

import os
from typing import Any

if os.name != "posix":  # it notices a fork, and wakes processes by sockets, with functions of POSIX
    raise ImportError(f"sqlalchemy-outbox runs on POSIX systems (Linux, macOS, WSL), not on {os.name!r}")

from outbox.default_outbox import default
from outbox.effects.effect import Effect
from outbox.encryption import Encryption, KeyService
from outbox.entries.status import EntryStatus
from outbox.errors import (
    AlreadyAnswered,
    CannotDecrypt,
    ClaimError,
    ClaimLost,
    ClaimOpen,
    ConfigurationError,
    DuplicateEntry,
    EncryptionError,
    InvalidPayload,
    InvalidValue,
    KeyExpired,
    KeyInFlight,
    KeyMalformed,
    KeyMissing,
    KeyServiceFailed,
    LeaseLost,
    NotAnswered,
    NoTransaction,
    NotSerializable,
    OutboxError,
    ParentRequired,
    RequestError,
    RequestMismatch,
    RequestTooLarge,
    RequestUndone,
    SchemaError,
)
from outbox.instance import Outbox
from outbox.keys import Keyring, ParentKey
from outbox.observer import ObservedClaim
from outbox.requests.body_key import BodyKey
from outbox.requests.fingerprint import Fingerprint
from outbox.requests.idempotency import Claim
from outbox.requests.inbox import InboxMessage
from outbox.requests.leases import AsyncLeasedClaim, LeasedClaim
from outbox.requests.responses import Response
from outbox.requests.status import RequestStatus
from outbox.sessions.entry_rows import Entry
from outbox.sql.schema.tables import define_tables
from outbox.sql.sqlite import prepare_sqlite

configure = default.configure
check = default.check
enqueue = default.enqueue
enqueue_many = default.enqueue_many
child_key = default.child_key
idempotent = default.idempotent
run_idempotent = default.run_idempotent
inbox = default.inbox
leased = default.leased
status = default.status
cancel = default.cancel
request_status = default.request_status


def __getattr__(name: str) -> Any:
    if name == "__version__":  # asked for seldom, and reading it takes as long as the rest of the import
        from importlib.metadata import version

        return version("sqlalchemy-outbox")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AlreadyAnswered",
    "AsyncLeasedClaim",
    "BodyKey",
    "CannotDecrypt",
    "Claim",
    "ClaimError",
    "ClaimLost",
    "ClaimOpen",
    "ConfigurationError",
    "DuplicateEntry",
    "Effect",
    "Encryption",
    "EncryptionError",
    "Entry",
    "EntryStatus",
    "Fingerprint",
    "InboxMessage",
    "InvalidPayload",
    "InvalidValue",
    "KeyExpired",
    "KeyInFlight",
    "KeyMalformed",
    "KeyMissing",
    "KeyService",
    "KeyServiceFailed",
    "Keyring",
    "LeaseLost",
    "LeasedClaim",
    "NoTransaction",
    "NotAnswered",
    "NotSerializable",
    "ObservedClaim",
    "Outbox",
    "OutboxError",
    "ParentKey",
    "ParentRequired",
    "RequestError",
    "RequestMismatch",
    "RequestStatus",
    "RequestTooLarge",
    "RequestUndone",
    "Response",
    "SchemaError",
    "cancel",
    "check",
    "child_key",
    "configure",
    "default",
    "define_tables",
    "enqueue",
    "enqueue_many",
    "idempotent",
    "inbox",
    "leased",
    "prepare_sqlite",
    "request_status",
    "run_idempotent",
    "status",
]
