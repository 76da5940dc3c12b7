"""The dashboard decrypts for a payload reader, if it has the keys, and records it; others see no more than the key's name."""

import pytest
from support.dashboard import Browser, dashboard, signed_in
from support.database import TABLES, Database
from support.encrypted import D1, D2, SECRET, outbox_with
from support.entries import put_one, run_once

import outbox
from dispatchers import Delivered
from dispatchers.adapters import MemoryAdapter


@pytest.fixture
def ob() -> outbox.Outbox:
    return outbox_with(D1)


def reveal(database: Database, ob: outbox.Outbox, *roles: str) -> tuple[int, str]:
    id = put_one(database, ob, payload={"card": SECRET})
    run_once(database, ob, adapters={"crm": MemoryAdapter(lambda delivery: Delivered({"answer": SECRET}))})
    return _revealed(database, ob, str(id), *roles)


def _revealed(database: Database, ob: outbox.Outbox, id: str, *roles: str) -> tuple[int, str]:
    with dashboard(database, authenticate=signed_in(*roles), outbox=ob) as app:
        browser = Browser(app)
        assert SECRET not in browser.text(f"/entries/{id}")
        answer = browser.api(f"/entries/{id}/reveal", {"reason": "asked"}, Authorization="Bearer t")
        return answer.status_code, answer.text


def test_a_payload_reader_sees_both_and_it_is_recorded(database: Database, ob: outbox.Outbox) -> None:
    status, text = reveal(database, ob, "payload_reader")

    assert status == 200
    assert text.count(SECRET) == 2
    assert [row.action for row in database.rows(TABLES.audit)] == ["reveal_payload"]


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_without_the_right_nothing_is_decrypted(database: Database, ob: outbox.Outbox, role: str) -> None:
    status, text = reveal(database, ob, role)

    assert (status, SECRET in text) == (403, False)
    assert database.rows(TABLES.audit) == []


@pytest.mark.parametrize("keys", [None, D2], ids=["no keys", "another key"])
def test_a_dashboard_without_the_key_says_so(
    database: Database, ob: outbox.Outbox, keys: dict[str, bytes] | None
) -> None:
    id = put_one(database, ob, payload={"card": SECRET})

    status, text = _revealed(database, outbox_with(keys), str(id), "payload_reader")

    assert (status, "cannot be decrypted" in text, SECRET in text) == (409, True, False)
