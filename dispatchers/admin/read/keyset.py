"""The next page of a list begins after the last row of this one, wherever that row is by then."""

from typing import Any

from sqlalchemy import ColumnElement, or_

from dispatchers.admin.read.plain_values import Place


def following(
    place: Place[Any] | None, at: Any, id: Any, *, is_descending: bool = False, has_ids_descending: bool = False
) -> list[ColumnElement[bool]]:
    """The conditions for the rows after a place, in a list that is ordered by `at`, then by `id`. None: the list's beginning.

    The first condition is what an index takes as its range.
    """
    if place is None:
        return []
    later = at < place.at if is_descending else at > place.at
    not_earlier = at <= place.at if is_descending else at >= place.at
    return [not_earlier, or_(later, id < place.id if has_ids_descending else id > place.id)]
