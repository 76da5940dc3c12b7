"""Which entries have a value in their payload: a member of the JSON, found by its path and compared as text."""

from typing import NamedTuple

from sqlalchemy import ColumnElement, Text, or_
from sqlalchemy.sql.functions import FunctionElement

from outbox.errors import InvalidValue
from outbox.sql.schema.rendering import renders
from outbox.sql.schema.tables import ENCRYPTED_VERSION, Tables

MAX_CHARS = 1000  # of a path, and of a value
UNQUOTABLE = '"\\'
"""A path with one of these would need another quotation on each database."""


class Member(NamedTuple):
    """A member of the payload, and its value. path: names of members, with a dot between them: `order.campaign`.

    value: the text of a string, a number or a boolean, as in the JSON: `spring`, `3`, `true`.
    """

    path: str
    value: str

    def __str__(self) -> str:
        return f"{self.path}={self.value}"

    @staticmethod
    def parse(text: str) -> "Member":
        """The member of `campaign=spring`. Raises `InvalidValue`."""
        path, equals, value = text.partition("=")
        if not equals or not all(path.split(".")):
            raise InvalidValue("payload", text, "must be a member and its value, as in campaign=spring")
        if len(path) > MAX_CHARS or len(value) > MAX_CHARS:
            raise InvalidValue("payload", text, f"has more than {MAX_CHARS} characters in its path or its value")
        if any(char in UNQUOTABLE for char in path):
            raise InvalidValue("payload", text, "has a quote or a backslash in its path, which cannot be searched for")
        if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
            raise InvalidValue(
                "payload", text, "contains a NUL character or a lone surrogate, which cannot be searched for"
            )
        return Member(path, value)

    def condition(self, tables: Tables) -> ColumnElement[bool]:
        """The condition that the entry's payload has this member with this value."""
        return _MemberText(tables.entry.c.payload, self.path) == self.value


class MemberOrSealed(Member):
    """A member that an encrypted payload may have: a list finds these entries too, and does not leave them out silently."""

    def condition(self, tables: Tables) -> ColumnElement[bool]:
        return or_(super().condition(tables), tables.entry.c.schema_version == ENCRYPTED_VERSION)


@renders(lambda dialect: dialect.json_member)
class _MemberText(FunctionElement[str]):
    type = Text()
    inherit_cache = True
