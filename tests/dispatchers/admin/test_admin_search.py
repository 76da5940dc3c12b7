"""`find`: what a customer or a service quotes leads to its entries, within bounds, and the result says where it looked."""

from typing import Any
from uuid import UUID

import pytest
from support.accepted import Checkout
from support.cli_runner import put_ended, put_uncertain
from support.database import TABLES, Database
from support.entries import change, put, put_one, run_once

import outbox
from dispatchers import Delivered
from dispatchers.adapters import MemoryAdapter
from dispatchers.admin.read.search import MAX_FOUND, Found, find
from outbox.errors import InvalidValue
from outbox.keys import Tag, encode_hex, encode_native
from outbox.times import NEVER


def search(database: Database, text: str, **settings: Any) -> Found:
    with database.engine.begin() as connection:
        return find(connection, TABLES, text, **settings)


def ids(found: Found) -> list[UUID]:
    return [entry.id for entry in found.entries]


def test_the_beginning_of_an_id_is_found(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=3)
    id = put_one(database, ob)

    assert ids(search(database, id.hex[:12])) == [id]
    assert ids(search(database, f" {str(id).upper()} ")) == [id]


@pytest.mark.parametrize("ended", [False, True])
def test_a_parent_key_is_found_without_its_scope_and_source(database: Database, ob: outbox.Outbox, ended: bool) -> None:
    make = put_ended if ended else put_uncertain
    parent = outbox.ParentKey("8e03978e-40d5", scope="acct_1", source="http")
    put(database, ob, count=2)
    id = make(database, ob, parent=parent)

    assert ids(search(database, "8e03978e-40d5")) == [id]
    assert ids(search(database, "8e03978e-40d")) == []  # a key is compared as a whole


def test_the_apps_own_key_is_found_by_an_index(database: Database, ob: outbox.Outbox) -> None:
    put_ended(database, ob)  # its dispatcher records the database's env
    put(database, ob, count=5)
    id = put_one(database, ob, parent="invoice:42")
    change(database, id, due_at=NEVER)

    assert ids(search(database, "invoice:42", max_rows=1)) == [id]


@pytest.mark.parametrize("encode", [encode_native, encode_hex, lambda tag: f" {encode_hex(tag).upper()} "])
def test_a_child_key_is_found(database: Database, ob: outbox.Outbox, encode: Any) -> None:
    put(database, ob, count=2)
    id = put_uncertain(database, ob)
    (tag,) = [row.tag for row in database.entries if row.id == id]

    assert ids(search(database, encode(Tag(bytes(tag))))) == [id]


def test_a_part_of_a_services_answer_is_found(database: Database, ob: outbox.Outbox) -> None:
    id = put_ended(database, ob)  # its result is {"id": "ch_1"}
    put_ended(database, ob, good=False)

    assert ids(search(database, "ch_1")) == [id]
    assert ids(search(database, "ch_2")) == []
    assert ids(search(database, "ch_")) == []  # too short: it would be in every answer


def test_an_answer_is_searched_letter_for_letter(database: Database, ob: outbox.Outbox) -> None:
    made = []
    for name in ('Müller a "b" c\\d 100% e_f_', "Muller a b cd 1000 exfx"):
        made.append(put_one(database, ob))
        run_once(database, ob, adapters={"crm": MemoryAdapter([Delivered({"name": name})])})

    found = [ids(search(database, text)) for text in ("Müller", 'a "b"', "c\\d 1", "100%", "e_f_")]

    assert found == [made[:1]] * 5


def test_an_ordering_key_is_found(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, count=2)
    group = put(database, ob, "crm.x", count=2, ordering_key="customer:7")

    assert set(ids(search(database, "customer:7", max_rows=1))) == set(group)


def test_a_request_is_found_with_its_entries(database: Database, ob: outbox.Outbox) -> None:
    checkout = Checkout(database, ob)
    checkout.accept("bank.charge", "mail.send", key="8e03978e-40d5")
    checkout.accept(key="another")
    record = next(record for record in database.records if record.parent == "8e03978e-40d5")

    found = search(database, "8e03978e-40d5")
    by_id = search(database, record.id.hex[:10])

    assert [request.id for request in found.requests] == [request.id for request in by_id.requests] == [record.id]
    assert {entry.operation for entry in found.entries} == {"bank.charge", "mail.send"}
    assert ids(by_id) == ids(found)


def test_the_result_says_how_far_it_searched(database: Database, ob: outbox.Outbox) -> None:
    first, *_ = put(database, ob, count=5)
    late = put_one(database, ob, parent="late")

    near, far = search(database, "late", max_rows=3), search(database, "late")

    waiting = {found.list: found for found in near.searched}["waiting entries, the longest due first"]
    assert (waiting.rows, waiting.is_whole, ids(near)) == (3, False, [])
    assert first not in ids(near)
    assert all(found.is_whole for found in far.searched)
    assert ids(far) == [late]


def test_what_many_entries_share_is_cut_off(database: Database, ob: outbox.Outbox) -> None:
    put(database, ob, "crm.x", count=MAX_FOUND + 1, ordering_key="customer:7")

    found = search(database, "customer:7")

    assert (len(found.entries), found.has_more) == (MAX_FOUND, True)


@pytest.mark.parametrize("text", ["", "x" * 256, "a\0b"])
def test_what_no_key_can_be_is_refused(database: Database, text: str) -> None:
    with pytest.raises(InvalidValue, match=r"text '.*this cannot be a key"):
        search(database, text)
