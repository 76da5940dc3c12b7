"""What the tests of encryption share: outboxes with keys, secrets, a key service that can be down, and what a database holds."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import outbox
from dispatchers.adapters import MemoryAdapter
from outbox.encryption import Encryption
from support.database import TABLES, Database
from support.entries import put_one

SECRET = "canary-4111"
D1, D2 = {"d1": bytes(range(32))}, {"d2": bytes(range(1, 33))}
D1_TEXT, D2_TEXT = (f"{id}:{base64.b64encode(key).decode()}" for keys in (D1, D2) for id, key in keys.items())


def outbox_with(keys: Mapping[str, Any] | None, **settings: Any) -> outbox.Outbox:
    """An outbox whose first key encrypts; None for one without encryption."""
    encryption = None if keys is None else Encryption(keys, current=next(iter(keys)))
    return outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test", encryption=encryption, **settings)


def answering(outcome: Any) -> MemoryAdapter:
    return MemoryAdapter(lambda delivery: outcome)


def put_secret(database: Database, ob: outbox.Outbox, **settings: Any) -> UUID:
    return put_one(database, ob, payload={"card": SECRET}, **settings)


def stored(database: Database) -> str:
    """Everything that the outbox's tables hold, as text."""
    rows = [row for table in TABLES.metadata.sorted_tables for row in database.rows(table)]
    return "\n".join(str([bytes(each) if isinstance(each, memoryview) else each for each in row]) for row in rows)


@dataclass
class FakeService:
    """Wraps by XOR. down: it raises, as a service that does not answer."""

    down: bool = False
    calls: list[str] = field(default_factory=list)
    wrong: bool = False

    def wrap(self, data_key: bytes) -> bytes:
        return self._answer("wrap", data_key)

    def unwrap(self, wrapped: bytes) -> bytes:
        return self._answer("unwrap", wrapped)

    def _answer(self, method: str, data: bytes) -> bytes:
        self.calls.append(method)
        if self.down:
            raise TimeoutError("no answer")
        return bytes(32) if self.wrong else bytes(byte ^ 0x5A for byte in data)
