"""What one run deletes, over any mixture of ages and states: exactly what the rules, written again in plain Python, allow."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.database import TABLES, Database
from support.examples import divided
from support.retention import DAY, RETENTION, clean

from dispatchers.maintenance.retention import BEHIND
from outbox.times import NEVER

KEYS = [UUID(int=number) for number in range(1, 5)]
A_WHILE = timedelta(hours=1)
REFUSE = RETENTION + BEHIND


@dataclass(frozen=True)
class ARecord:
    state: str
    past_keep: timedelta  # how long ago its `keep_until` was; negative: it is still to come
    past_lease: timedelta  # how long ago its lease ran out, if its state is `leased`; negative: it holds


@dataclass(frozen=True)
class AnEntry:
    parent: UUID
    record: UUID | None
    settled: timedelta | None  # how long ago; None: it is unsettled
    state: str
    blocks: bool


@dataclass(frozen=True)
class World:
    """records, tombstones: by key; a tombstone is described by how long ago its time was. entries: by id."""

    records: Mapping[UUID, ARecord]
    tombstones: Mapping[UUID, timedelta]
    entries: Mapping[UUID, AnEntry]


# --- the rules


def after_a_run(world: World) -> World:
    """What is left of a world, and is in it again."""

    def of(key: UUID) -> list[AnEntry]:
        return [entry for entry in world.entries.values() if key in (entry.parent, entry.record)]

    def is_needed(record: ARecord, entries: list[AnEntry]) -> bool:
        is_open = record.state == "accepted" or (record.state == "leased" and record.past_lease < timedelta(0))
        return is_open or record.past_keep < timedelta(0) or any(entry.settled is None for entry in entries)

    records = {key: record for key, record in world.records.items() if is_needed(record, of(key))}
    tombstones = dict(world.tombstones)
    for key in world.records.keys() - records.keys():
        ages = [entry.settled for entry in of(key) if entry.settled is not None]
        if world.records[key].state == "leased":
            ages.append(world.records[key].past_lease)
        if ages:
            tombstones[key] = min(ages) - REFUSE

    def is_kept(entry: AnEntry) -> bool:
        is_young = entry.settled is None or entry.settled < RETENTION
        return is_young or entry.blocks or entry.parent in records or entry.record in records

    return World(
        records,
        {key: past for key, past in tombstones.items() if past < timedelta(0)},
        {id: entry for id, entry in world.entries.items() if is_kept(entry)},
    )


# --- worlds

THRESHOLDS = [timedelta(0), DAY, timedelta(days=30), RETENTION, REFUSE, timedelta(days=365)]
ages = st.builds(
    lambda threshold, more: threshold + more, st.sampled_from(THRESHOLDS), st.sampled_from([-A_WHILE, A_WHILE])
)
keys = st.sampled_from(KEYS)
records = st.builds(ARecord, st.sampled_from(["succeeded", "failed", "succeeded", "accepted", "leased"]), ages, ages)
settled = st.tuples(ages.filter(lambda age: age > timedelta(0)), st.sampled_from(["delivered", "failed", "cancelled"]))
unsettled = st.tuples(st.none(), st.sampled_from(["pending", "sending", "retry", "uncertain"]))
entries = st.builds(
    lambda parent, record, end, blocks: AnEntry(parent, record, *end, blocks and end[0] is not None),
    keys,
    st.one_of(st.none(), keys),
    st.one_of(settled, settled, settled, unsettled),
    st.sampled_from([False, False, False, True]),
)
worlds = st.builds(
    World,
    st.dictionaries(keys, records),
    st.dictionaries(keys, ages),
    st.lists(entries, max_size=8).map(lambda many: {UUID(int=100 + at): entry for at, entry in enumerate(many)}),
)


def create(database: Database, world: World) -> datetime:
    """Write a world instead of what was there; returns its "now"."""
    now = datetime.now(UTC)
    with database.engine.begin() as connection:
        for table in (*FOUND, TABLES.queue, TABLES.blocked_group, TABLES.event):
            connection.execute(sa.delete(table))
        for key, record in world.records.items():
            connection.execute(sa.insert(TABLES.record).values(record_row(key, record, now)))
        for key, past in world.tombstones.items():
            row = {"id": key, **NAMES, "forget_at": now - past}
            connection.execute(sa.insert(TABLES.tombstone).values(row))
        for id, entry in world.entries.items():
            for table, row in entry_rows(id, entry, now):
                connection.execute(sa.insert(table).values(row))
    return now


NAMES = {"env": "test", "scope": "", "source": "http", "fingerprint": bytes(32), "fingerprint_version": 1}


def record_row(key: UUID, record: ARecord, now: datetime) -> dict[str, object]:
    is_open = record.state in ("accepted", "leased")
    lease = {"lease_token": key, "lease_until": now - record.past_lease} if record.state == "leased" else {}
    until = {"created_at": now, "replay_until": now - record.past_keep, "keep_until": now - record.past_keep}
    answer = {} if is_open else {"answered_at": now, "status": 201, "body": b"", "headers": "{}"}
    return {"id": key, **NAMES, "parent": "k", "kid": "k1", "state": record.state, **until, **answer, **lease}


def entry_rows(id: UUID, entry: AnEntry, now: datetime) -> list[tuple[sa.Table, dict[str, object]]]:
    asked = {"parent": "k", "operation": "crm.upsert", "discriminator": str(id), "kid": "k1", "tag": bytes(32)}
    stored = {"destination": "crm", "payload": b"{}", "options": "{}", "headers": "{}", "schema_version": 1}
    named = {name: NAMES[name] for name in ("env", "scope", "source")}
    keyed = {"id": id, "parent_id": entry.parent, "record_id": entry.record, "ordering_key": f"group {id}"}
    rows = [(TABLES.entry, {**named, **asked, **stored, **keyed, "due_at": now, "created_at": now})]
    rows.append((TABLES.event, {"entry_id": id, "at": now, "kind": "attempt"}))
    counts = {"id": id, "state": entry.state, "deliveries": 1, "attempts": 1, "key_epoch": 0}
    if entry.settled is None:
        lease = {"lease_token": id, "lease_until": now, "leased_at": now} if entry.state == "sending" else {}
        waits = {"destination": "crm", "due_at": NEVER, "maybe_sent": True}
        rows.append((TABLES.queue, {**counts, **waits, **lease}))
    else:
        rows.append((TABLES.settlement, {**counts, "settled_at": now - entry.settled}))
    if entry.blocks:
        rows.append(
            (TABLES.blocked_group, {"ordering_key": f"group {id}", "entry_id": id, "reason": "declined", "since": now})
        )
    return rows


FOUND = (TABLES.record, TABLES.tombstone, TABLES.entry, TABLES.settlement)


def found(database: Database) -> dict[str, object]:
    return {
        "records": {row.id for row in database.rows(TABLES.record)},
        "tombstones": {row.id: row.forget_at for row in database.rows(TABLES.tombstone)},
        "entries": {row.id for row in database.rows(TABLES.entry)},
        "settlements": {row.id for row in database.rows(TABLES.settlement)},
        "events": {row.entry_id for row in database.rows(TABLES.event)},
        "unsettled": {row.id for row in database.rows(TABLES.queue)},
    }


def expected(world: World, now: datetime) -> dict[str, object]:
    return {
        "records": set(world.records),
        "tombstones": {key: now - past for key, past in world.tombstones.items()},
        "entries": set(world.entries),
        "settlements": {id for id, entry in world.entries.items() if entry.settled is not None},
        "events": set(world.entries),
        "unsettled": {id for id, entry in world.entries.items() if entry.settled is None},
    }


def deleted(before: World, after: World) -> dict[str, int]:
    tombstoned = before.records.keys() - after.records.keys()
    last = {key: [e.settled for e in before.entries.values() if key in (e.parent, e.record)] for key in tombstoned}
    abandoned = {key for key in tombstoned if before.records[key].state == "leased"}
    stood = before.tombstones.keys() | abandoned | {key for key, ended in last.items() if ended}
    counts = {
        "records": len(tombstoned),
        "entries": len(before.entries) - len(after.entries),
        "tombstones": len(stood - after.tombstones.keys()),
    }
    return {name: count for name, count in counts.items() if count}


anything = settings(
    max_examples=divided(over=2),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=True,
)


def check(database: Database, world: World, max_rows: int) -> None:
    left = after_a_run(world)

    now = create(database, world)
    would_delete = clean(database, max_rows=max_rows, dry=True)
    assert found(database) == expected(world, now)
    done = clean(database, max_rows=max_rows)

    assert found(database) == expected(left, now)
    assert done == deleted(world, left)
    for name in ("records", "entries"):  # a dry run counts the tombstones that exist already
        assert would_delete[name] == done[name]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"])
def test_what_is_deleted_is_what_the_rules_allow(request: pytest.FixtureRequest, kind: str) -> None:
    database: Database = request.getfixturevalue(kind)

    @anything
    @given(world=worlds, max_rows=st.sampled_from([1, 2, 500]))
    def check_each(world: World, max_rows: int) -> None:
        check(database, world, max_rows)

    check_each()
