"""The one failure of a codec: a value does not fit its type, said without the value."""

from collections.abc import Callable
from typing import Any


class Misfit(Exception):
    """A value does not fit its type. field: where in it, with dots; empty for the whole. problem: what is wrong there.

    Neither shows the value, which may hold personal data.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem


def without_values(call: Callable[[], Any], problem: str) -> Any:
    """The call's result. Whatever else it raises becomes a `Misfit` of the whole value: its text may show the value."""
    try:
        return call()
    except Misfit:
        raise
    except Exception as error:
        name = type(error).__name__
    raise Misfit("", f"{problem} ({name})")
