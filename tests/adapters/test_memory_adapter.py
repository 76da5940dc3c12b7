"""MemoryAdapter: an outside service that a test can look into."""

import asyncio
import subprocess
import sys
from typing import Any
from uuid import UUID

import pytest

import dispatchers.adapters
from dispatchers.adapters import MemoryAdapter
from dispatchers.delivery import Deferred, Delivered, Delivery, Outcome, Rejected, Unknown

ENTRY = UUID("00000000-0000-8000-8000-000000000001")


def delivery(key: str = "ck1_a", **fields: Any) -> Delivery:
    given = {
        "operation": "memory.put",
        "payload_json": b"{}",
        "attempt": 1,
        "options": {},
        "headers": {},
        "deadline": 0.0,
    }
    return Delivery(id=ENTRY, key=key, **{**given, **fields})


def send(adapter: MemoryAdapter, *keys: str) -> list[Outcome]:
    async def each() -> list[Outcome]:
        return [await adapter.send(delivery(key)) for key in keys]

    return asyncio.run(each())


def test_it_delivers_and_names_the_entry_by_default() -> None:
    adapter = MemoryAdapter()

    outcomes = send(adapter, "ck1_a")

    assert outcomes == [Delivered({"id": str(ENTRY)})]
    assert adapter.deliveries == [delivery("ck1_a")]


def test_a_repeated_key_gets_the_first_answer_and_is_executed_once() -> None:
    adapter = MemoryAdapter([Delivered("first"), Delivered("second")])

    outcomes = send(adapter, "ck1_a", "ck1_a", "ck1_b")

    assert outcomes == [Delivered("first"), Delivered("first", replayed=True), Delivered("second")]
    assert adapter.effects == {"ck1_a": 1, "ck1_b": 1}
    assert len(adapter.deliveries) == 3


def test_a_repeated_rejection_is_conclusive() -> None:
    adapter = MemoryAdapter(lambda delivery: Rejected("no"))

    outcomes = send(adapter, "ck1_a", "ck1_a")

    assert outcomes == [Rejected("no"), Rejected("no", conclusive=True)]
    assert adapter.effects == {}


def test_only_an_answer_is_remembered_under_the_key() -> None:
    adapter = MemoryAdapter([Deferred("busy"), Unknown("lost"), Delivered("done")])

    outcomes = send(adapter, "ck1_a", "ck1_a", "ck1_a")

    assert outcomes == [Deferred("busy"), Unknown("lost"), Delivered("done")]
    assert adapter.effects == {"ck1_a": 1}


def test_without_a_window_every_send_is_executed() -> None:
    adapter = MemoryAdapter(window=None)

    send(adapter, "ck1_a", "ck1_a")

    assert adapter.effects == {"ck1_a": 2}


def test_nothing_is_kept_when_a_benchmark_asks_for_that() -> None:
    adapter = MemoryAdapter(keep=False)

    outcomes = send(adapter, "ck1_a", "ck1_a")

    assert outcomes == [Delivered({"id": str(ENTRY)})] * 2
    assert adapter.deliveries == []
    assert adapter.effects == {}


def test_the_memory_adapter_does_not_load_the_sdk_of_another() -> None:
    program = "import sys, dispatchers.adapters as a; a.MemoryAdapter; sys.exit('stripe' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_an_unknown_adapter_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="CarrierPigeonAdapter"):
        _ = dispatchers.adapters.CarrierPigeonAdapter
