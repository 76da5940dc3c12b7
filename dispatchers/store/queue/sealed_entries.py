"""Opens the encrypted payloads and results of claimed entries, and encrypts the results that are to be stored. Pure.

What the rest of a dispatcher sees is not encrypted: the store opens at the claim, and seals at the settlement.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from dispatchers.stored_outcome import Known, StoredOutcome
from dispatchers.transitions import ClaimedEntry, Ending, RetryCallback, Settle, Transition
from outbox.encryption import Encryption, FieldName, StoredField, is_sealed, open_json
from outbox.errors import EncryptionError
from outbox.sql.schema.tables import ENCRYPTED_VERSION, SCHEMA_VERSION


def open_claimed(
    encryption: Encryption, claimed: Sequence[ClaimedEntry]
) -> tuple[list[ClaimedEntry], Mapping[UUID, str]]:
    """The entries, opened, and why the others could not be opened, which are returned as they are.

    While the key service gives no data key, none can be sent: the results could not be stored.
    """
    try:
        if encryption.encrypts:
            encryption.prepare()
    except EncryptionError as error:
        return list(claimed), {entry.id: str(error) for entry in claimed}
    opened, unopened = list[ClaimedEntry](), dict[UUID, str]()
    for entry in claimed:
        try:
            opened.append(_opened(encryption, entry))
        except EncryptionError as error:
            opened.append(entry)
            unopened[entry.id] = str(error)
    return opened, unopened


def _opened(encryption: Encryption, entry: ClaimedEntry) -> ClaimedEntry:
    known = entry.outcome.known
    if known is not None and is_sealed(known.result):
        result = json.loads(encryption.open(known.result, stored_field(entry, "result")))
        entry = entry._replace(outcome=_with_result(entry.outcome, replace(known, result=result)))
    if entry.schema_version != ENCRYPTED_VERSION:
        return entry
    payload = open_json(encryption, entry.payload, stored_field(entry, "payload"))
    return entry._replace(payload=payload, schema_version=SCHEMA_VERSION)


def _with_result(outcome: StoredOutcome, known: Known) -> StoredOutcome:
    """The outcome with this result; `members` keeps the envelope, because it is written back as it is."""
    return replace(outcome, known=known)


def seal_endings(encryption: Encryption, endings: Sequence[Ending]) -> list[Ending]:
    """The transitions with encrypted results."""
    return [(entry, _sealed(encryption, entry, change)) for entry, change in endings]


def _sealed(encryption: Encryption, entry: ClaimedEntry, change: Transition) -> Transition:
    match change:
        case Settle(result=result) if result is not None:
            return change._replace(result=seal_result(encryption, result, stored_field(entry, "result")))
        case RetryCallback(end=Settle(result=result) as end) if result is not None:
            sealed = seal_result(encryption, result, stored_field(entry, "result"))
            return replace(change, end=end._replace(result=sealed))
    return change


def seal_result(encryption: Encryption, result: Any, field_of: StoredField) -> str:
    """A service's answer as it is stored."""
    return encryption.seal(json.dumps(result).encode(), field_of)


def stored_field(entry: ClaimedEntry, field: FieldName) -> StoredField:
    """Where a field of the entry is stored."""
    return StoredField(entry.env, entry.id, entry.operation, field)
