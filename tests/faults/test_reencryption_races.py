"""A rotation beside another rotation and dispatchers that settle the same entries, and one that was killed: nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.cli_runner import command
from support.database import TABLES, Database
from support.encrypted import D1, D1_TEXT, D2, D2_TEXT, outbox_with
from support.entries import run_once

import outbox
from dispatchers import Delivered
from dispatchers.adapters import MemoryAdapter
from dispatchers.maintenance import reencryption
from outbox.testing import all_enqueued

BOTH = f"{D2_TEXT},{D1_TEXT}"
NUMBER = 60

pytestmark = [pytest.mark.on_mariadb, pytest.mark.owner]

PAUSED = """
import sys
from dispatchers.cli import main
from dispatchers.maintenance import reencryption
reencryption.PAGE_ROWS = 10
encrypt_page, pages = reencryption.encrypt_page, []
def slow(*args, **settings):
    if len(pages) == 2:
        print("two pages are committed", flush=True)
        sys.stdin.read()
    pages.append(encrypt_page(*args, **settings))
    return pages[-1]
reencryption.encrypt_page = slow
main(["keys", "reencrypt"])
"""


def fill(database: Database) -> None:
    ob = outbox_with(D1)
    with database.begin() as session:
        for number in range(NUMBER):
            ob.enqueue(session, "crm.upsert", {"number": number}, parent=f"order:{number}")


def reencrypt(database: Database) -> None:
    encryption = outbox.Encryption({**D2, **D1}, current="d2")

    def change(kind: Any, after: Any) -> reencryption.Page:
        with database.owner() as connection:
            return reencryption.encrypt_page(connection, TABLES, kind, after, encryption)

    for _, page in reencryption.pages(change):
        assert not page.failed


def test_a_rotation_that_was_killed_is_continued(postgresql: Database) -> None:
    fill(postgresql)
    environment = {**os.environ, "DATABASE_URL": postgresql.url.render_as_string(hide_password=False)}
    killed = subprocess.Popen(
        [sys.executable, "-c", PAUSED],
        env={**environment, "OUTBOX_DATA_KEYS": BOTH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == "two pages are committed\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert {row.payload[6:8] for row in postgresql.entries} == {b"d1", b"d2"}

    again = command("keys", "reencrypt", "--json", database=postgresql, OUTBOX_DATA_KEYS=BOTH)

    assert json.loads(again.stdout)["again"]["payloads"] == NUMBER - 20
    with postgresql.begin() as session:
        found = all_enqueued(session, outbox=outbox_with(D2))
    assert sorted(each.payload["number"] for each in found) == list(range(NUMBER))


def test_two_rotations_beside_a_dispatcher_lose_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reencryption, "PAGE_ROWS", 7)
    fill(database)
    adapter = MemoryAdapter(lambda delivery: Delivered(delivery.payload))
    barrier = threading.Barrier(3)

    def rotate() -> None:
        barrier.wait(60)
        for _ in range(3):
            reencrypt(database)

    def send() -> None:
        barrier.wait(60)
        for _ in range(5):
            run_once(database, outbox_with({**D1, **D2}), adapters={"crm": adapter})

    with ThreadPoolExecutor(3) as pool:
        for working in [pool.submit(rotate), pool.submit(rotate), pool.submit(send)]:
            working.result()
    reencrypt(database)

    assert sorted(each.payload["number"] for each in adapter.deliveries) == list(range(NUMBER))
    ob = outbox_with(D2)
    with database.begin() as session:
        results = [ob.status(session, f"order:{number}")[0].result for number in range(NUMBER)]
    assert results == [{"number": number} for number in range(NUMBER)]
    assert {json.loads(row.result)[:7] for row in database.rows(TABLES.settlement)} == {"obx1:d2"}
