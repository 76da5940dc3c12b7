"""What an operator types to name an entry: its id, the beginning of the id, or another text that leads to it."""

from typing import TYPE_CHECKING
from uuid import UUID

import click

from dispatchers.cli import rendering
from dispatchers.cli.exit_codes import NothingFound

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dispatchers.admin.read.search import Found
    from outbox.sql.schema.tables import Tables

ID_DIGITS_MIN = 8
ID_DIGITS = 32


def require_found(connection: "Connection", tables: "Tables", text: str) -> None:
    """Raise unless `text` names something here, as for `show`."""
    from dispatchers.admin.read import search

    if not is_known_id(connection, tables, text):
        require_any(text, search.find(connection, tables, text))


def require_any(text: str, found: "Found") -> None:
    """Raise if the search for `text` found nothing."""
    from dispatchers.admin.read.entries import no_entry

    if not found.entries and not found.requests:
        raise no_entry(text) if _is_id(text) else NothingFound(rendering.not_found(text, found))


def is_known_id(connection: "Connection", tables: "Tables", text: str) -> bool:
    """Whether `text` is the id of an entry here, or the beginning of one or more."""
    from dispatchers.admin.read.entries import find_ids

    return _is_id(text) and bool(find_ids(connection, tables, _digits(text)))


def find(connection: "Connection", tables: "Tables", given: str) -> UUID:
    """The one entry that `given` names. Raises EntryNotFound, and UsageError if it is malformed or ambiguous."""
    from dispatchers.admin.read import entries as admin_entries

    digits = _digits(given)
    if not _is_id(given):
        raise click.UsageError(
            f"{given!r} is not an entry's id: give {ID_DIGITS_MIN} to {ID_DIGITS} hexadecimal digits"
        )
    found = admin_entries.find_ids(connection, tables, digits)
    if not found:
        raise admin_entries.no_entry(given)
    if len(found) > 1:
        listed = [str(id) for id in found[: admin_entries.MAX_CANDIDATES]]
        more = ["and more"] if len(found) > len(listed) else []
        raise click.UsageError(f"{given!r} is ambiguous, give more digits: {', '.join([*listed, *more])}")
    return found[0]


def _digits(given: str) -> str:
    return given.strip().replace("-", "").lower()


def is_whole_id(given: str) -> bool:
    """Whether it names one entry of all databases, and no beginning of an id."""
    return _is_id(given) and len(_digits(given)) == ID_DIGITS


def _is_id(given: str) -> bool:
    """Whether it may be an entry's id, or the beginning of one."""
    digits = _digits(given)
    return ID_DIGITS_MIN <= len(digits) <= ID_DIGITS and not digits.strip("0123456789abcdef")
