"""The ledger of what the fake Stripe really did: an SQLite file that an audit can read from another process.

Two tables, append-only. An *effect* happened in the world (a charge, a refund). An *answer* is one response, whether
or not it reached the client. Two more tables hold the keys and the objects, so that a restarted service still knows them.
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Something that happened, once. A charge is `object="charge"`, its payment intent is `parent`."""

    id: str
    object: str
    account: str
    key: str | None
    request_id: str
    created: datetime
    amount: int | None = None
    currency: str | None = None
    customer: str | None = None
    parent: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One response. `request_id` differs from `original_request` on a replay; `lost`: the client never saw it."""

    request_id: str
    original_request: str
    account: str | None
    key: str | None
    method: str
    path: str
    status: int
    replayed: bool
    lost: bool
    fault: str | None
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedKey:
    """The first request under a key, and the answer that each later one gets."""

    account: str
    key: str
    method: str
    path: str
    parameters: list[tuple[str, str]]
    request_id: str
    since: datetime
    status: int
    body: dict[str, Any]


SCHEMA = """
CREATE TABLE IF NOT EXISTS effect (
    id TEXT PRIMARY KEY, object TEXT NOT NULL, account TEXT NOT NULL, key TEXT, request_id TEXT NOT NULL,
    created REAL NOT NULL, amount INTEGER, currency TEXT, customer TEXT, parent TEXT, metadata TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS answer (
    request_id TEXT PRIMARY KEY, original_request TEXT NOT NULL, account TEXT, key TEXT, method TEXT NOT NULL,
    path TEXT NOT NULL, status INTEGER NOT NULL, replayed INTEGER NOT NULL, lost INTEGER NOT NULL, fault TEXT,
    at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS remembered_key (
    account TEXT NOT NULL, key TEXT NOT NULL, method TEXT NOT NULL, path TEXT NOT NULL, parameters TEXT NOT NULL,
    request_id TEXT NOT NULL, since REAL NOT NULL, status INTEGER NOT NULL, body TEXT NOT NULL, PRIMARY KEY (account, key)
);
CREATE TABLE IF NOT EXISTS object (
    account TEXT NOT NULL, id TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (account, id)
);
"""


class StripeLedger:
    """Append with the methods that begin with `add`; read with the rest, from any thread or process.

    path: a file, or ":memory:". Opening a file that exists continues it.
    """

    def __init__(self, path: str | Path = ":memory:") -> None:
        # One connection for all threads. sqlite3 serialises its calls, and the lock keeps transactions apart.
        self._lock = Lock()
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        # WAL: readers never hold up the service. No fsync: a fake must survive a crash of the app, not of the machine.
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=OFF")
        self._connection.executescript(SCHEMA)

    def add_answer(self, answer: Answered) -> None:
        with self._lock:
            self._insert("answer", asdict(answer) | {"at": answer.at.timestamp()})

    def add_execution(
        self,
        effects: Iterable[Effect],
        *,
        account: str = "",
        key: RememberedKey | None = None,
        objects: Mapping[str, dict[str, Any] | None] | None = None,
    ) -> None:
        """Store what one request did, in one transaction.

        objects: what it created or changed in the account, by id; None for an object that it deleted.
        """
        with self._lock, self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for effect in effects:
                stored = {"created": effect.created.timestamp(), "metadata": json.dumps(effect.metadata)}
                self._insert("effect", asdict(effect) | stored)
            if key is not None:
                texts = {"parameters": json.dumps(key.parameters), "body": json.dumps(key.body)}
                self._insert("remembered_key", asdict(key) | texts | {"since": key.since.timestamp()}, or_replace=True)
            for id, body in (objects or {}).items():
                self._store_object(account, id, body)

    @property
    def effects(self) -> list[Effect]:
        """Everything that happened, in order."""
        rows = self._rows("SELECT * FROM effect ORDER BY rowid")
        for row in rows:
            row["created"] = datetime.fromtimestamp(row["created"], UTC)
            row["metadata"] = json.loads(row["metadata"])
        return [Effect(**row) for row in rows]

    @property
    def charges(self) -> list[Effect]:
        """Every time that a card was charged, in order."""
        return [effect for effect in self.effects if effect.object == "charge"]

    @property
    def answers(self) -> list[Answered]:
        """Every response, in order."""
        rows = self._rows("SELECT * FROM answer ORDER BY rowid")
        for row in rows:
            row["replayed"], row["lost"] = bool(row["replayed"]), bool(row["lost"])
            row["at"] = datetime.fromtimestamp(row["at"], UTC)
        return [Answered(**row) for row in rows]

    @property
    def keys(self) -> list[RememberedKey]:
        """Every key whose first request has been executed, also those whose window has ended."""
        rows = self._rows("SELECT * FROM remembered_key ORDER BY rowid")
        for row in rows:
            row["parameters"] = [(name, value) for name, value in json.loads(row["parameters"])]
            row["since"] = datetime.fromtimestamp(row["since"], UTC)
            row["body"] = json.loads(row["body"])
        return [RememberedKey(**row) for row in rows]

    @property
    def objects(self) -> list[tuple[str, dict[str, Any]]]:
        """Every object with its account, in the order of their creation."""
        rows = self._rows("SELECT account, body FROM object ORDER BY rowid")
        return [(row["account"], json.loads(row["body"])) for row in rows]

    def count(self, condition: str = "1", table: str = "answer") -> int:
        """How many answers (or effects) meet an SQL condition: `ledger.count("replayed")`."""
        rows = self._rows(f"SELECT count(*) AS total FROM {table} WHERE {condition}")
        return int(rows[0]["total"])

    def close(self) -> None:
        self._connection.close()

    def _insert(self, table: str, row: dict[str, Any], *, or_replace: bool = False) -> None:
        verb = "INSERT OR REPLACE" if or_replace else "INSERT"
        values = ", ".join(f":{name}" for name in row)
        self._connection.execute(f"{verb} INTO {table} ({', '.join(row)}) VALUES ({values})", row)

    def _store_object(self, account: str, id: str, body: dict[str, Any] | None) -> None:
        if body is None:
            self._connection.execute("DELETE FROM object WHERE account = ? AND id = ?", (account, id))
            return
        self._connection.execute(  # keeps the row's place in the order
            "INSERT INTO object (account, id, body) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET body = excluded.body",
            (account, id, json.dumps(body)),
        )

    def _rows(self, sql: str) -> list[dict[str, Any]]:
        cursor = self._connection.execute(sql)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
