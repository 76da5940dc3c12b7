"""Statements that SQLAlchemy has compiled, for all engines of the test run: each test has an engine of its own."""

from collections import UserDict
from typing import Any


class CompiledStatements(UserDict[tuple[Any, ...], Any]):
    """What engines of the same kind share as `compiled_cache`. Their dialects differ in nothing but their identity."""

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        return self.data[_of_any_engine(key)]

    def __setitem__(self, key: tuple[Any, ...], compiled: Any) -> None:
        self.data[_of_any_engine(key)] = compiled

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and _of_any_engine(key) in self.data


def _of_any_engine(key: tuple[Any, ...]) -> tuple[Any, ...]:
    dialect, *statement = key
    return type(dialect), dialect.server_version_info, *statement


SHARED = {"compiled_cache": CompiledStatements()}
"""For `execution_options` of an engine that is made with no settings."""
