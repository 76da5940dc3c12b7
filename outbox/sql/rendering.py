"""SQL functions of our own, rendered for the database that they are compiled for."""

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

Element = TypeVar("Element", bound=type[FunctionElement[Any]])


def renders(*, postgresql: str, sqlite: str, mariadb: str, portable: str | None = None) -> Callable[[Element], Element]:
    """Render an element as these texts, with its arguments for `{0}`, `{1}` and so on. portable: None, as on PostgreSQL."""

    def register(element: Element) -> Element:
        def render(template: str) -> Callable[..., str]:
            def compiled(made: FunctionElement[Any], compiler: SQLCompiler, **kw: Any) -> str:
                return template.format(*(compiler.process(clause, **kw) for clause in made.clauses))

            return compiled

        compiles(element)(render(postgresql))
        compiles(element, "sqlite")(render(sqlite))
        compiles(element, "mariadb")(render(mariadb))
        if portable is not None:
            compiles(element, "portable")(render(portable))
        return element

    return register
