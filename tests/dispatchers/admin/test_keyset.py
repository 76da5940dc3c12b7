"""The conditions of a list's next page, against the whole list in Python's order."""

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from dispatchers.admin.read.keyset import following
from dispatchers.admin.read.plain_values import Place, plain
from outbox.sql.schema.column_types import Instant

START = datetime(2026, 1, 31, tzinfo=UTC)
ROWS = [(START + timedelta(hours=hour), UUID(int=number)) for hour, number in product(range(3), range(1, 4))]
LISTED = sa.table("listed", sa.column("at", Instant), sa.column("id", sa.Uuid))


@pytest.mark.parametrize(("is_descending", "has_ids_descending"), [*product([False, True], repeat=2)])
def test_after_each_place_come_the_later_rows_of_the_list(is_descending: bool, has_ids_descending: bool) -> None:
    ordered = sorted(ROWS, key=lambda row: row[1], reverse=has_ids_descending)
    ordered.sort(key=lambda row: row[0], reverse=is_descending)
    engine = sa.create_engine("sqlite://")
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE listed (at, id)"))
        connection.execute(sa.insert(LISTED), [{"at": at, "id": id} for at, id in ROWS])

        def rows_after(place: Place[UUID] | None) -> set[Any]:
            conditions = following(
                place,
                LISTED.c.at,
                LISTED.c.id,
                is_descending=is_descending,
                has_ids_descending=has_ids_descending,
            )
            return {tuple(row) for row in connection.execute(sa.select(LISTED).where(*conditions))}

        found = [rows_after(Place(*row)) for row in ordered]
        everything = rows_after(None)

    assert found == [set(ordered[number + 1 :]) for number in range(len(ordered))]
    assert everything == set(ROWS)
    engine.dispose()


def test_a_place_is_read_as_it_was_written_and_json_has_its_text() -> None:
    by_id, by_number = Place(START, UUID(int=7)), Place(START, 7)

    assert Place.parse(str(by_id), UUID) == by_id
    assert Place.parse(str(by_number), int) == by_number
    assert plain([by_number]) == ["2026-01-31T00:00:00Z,7"]
