"""SQL functions of our own, rendered for the database that they are compiled for."""

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from outbox.sql.dialect import Dialect, dialect_rendered

Element = TypeVar("Element", bound=type[FunctionElement[Any]])


def renders(text_of: Callable[[Dialect], str]) -> Callable[[Element], Element]:
    """Render an element as a dialect's text, with its arguments for `{0}`, `{1}` and so on."""

    def register(element: Element) -> Element:
        def compiled(made: FunctionElement[Any], compiler: SQLCompiler, **kw: Any) -> str:
            return text_of(dialect_rendered(compiler.dialect)).format(
                *(compiler.process(clause, **kw) for clause in made.clauses)
            )

        compiles(element)(compiled)
        return element

    return register
