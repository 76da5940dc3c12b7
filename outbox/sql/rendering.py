"""SQL functions of our own, rendered for the database that they are compiled for."""

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

Element = TypeVar("Element", bound=type[FunctionElement[Any]])


def renders(*, postgresql: str, sqlite: str, mariadb: str) -> Callable[[Element], Element]:
    """Render an element as these texts, with its arguments for `{0}`, `{1}` and so on."""

    def register(element: Element) -> Element:
        def render(template: str) -> Callable[..., str]:
            def compiled(made: FunctionElement[Any], compiler: SQLCompiler, **kw: Any) -> str:
                return template.format(*(compiler.process(clause, **kw) for clause in made.clauses))

            return compiled

        compiles(element)(render(postgresql))
        compiles(element, "sqlite")(render(sqlite))
        compiles(element, "mariadb")(render(mariadb))
        return element

    return register
