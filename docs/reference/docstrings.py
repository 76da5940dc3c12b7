"""Lets the API reference show our docstrings: a line `name: meaning` becomes an item of a list.

Our docstrings describe parameters and attributes by such lines, without a heading. Markdown would join them to one paragraph.
"""

import re
from typing import Any

import griffe

ITEM = re.compile(r"((?:\w+, )*\w+): ")


class Docstrings(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        show_items(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        constructor = cls.members.get("__init__")
        parameters = constructor.parameters if isinstance(constructor, griffe.Function) else ()
        show_items(cls, {*cls.members, *(parameter.name for parameter in parameters)})


def show_items(described: griffe.Object, names: set[str]) -> None:
    if described.docstring:
        described.docstring.value = with_items(described.docstring.value, names)


def with_items(text: str, names: set[str]) -> str:
    """The text as Markdown: each line that begins with some of `names` and a colon is an item, up to the next blank line."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        found = ITEM.match(line)
        if found and set(found[1].split(", ")) <= names:
            code = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines += [*([] if in_list else [""]), f"- {code}: {line[found.end() :]}"]
            in_list = True
        elif in_list and re.match(r"Raises?\b|Returns?\b", line):
            lines += ["", line]
            in_list = False
        else:
            in_list = in_list and bool(line.strip())
            lines.append(f"    {line.strip()}" if in_list else line)
    return "\n".join(lines)
