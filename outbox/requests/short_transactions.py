"""Short transactions that the outbox begins itself, on the app's engine or sessionmaker."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from outbox.errors import ClaimError
from outbox.session import AsyncSessionLike
from outbox.startup_checks import AsyncEngineLike

Result = TypeVar("Result")

Source: TypeAlias = Engine | AsyncEngineLike | Callable[[], Session] | Callable[[], AsyncSessionLike]
"""The app's objects on which a short transaction can begin."""


def checked_source(source: Any) -> Any:
    """Return `source`, or raise if no transaction can begin on it."""
    is_engine = isinstance(source, Engine) or hasattr(source, "sync_engine")
    if is_engine or (callable(source) and not hasattr(source, "registry")):
        return source
    raise ClaimError(
        f"outbox.leased begins transactions of its own: give it an Engine, an AsyncEngine or a sessionmaker, not"
        f" {type(source).__name__}"
    )


def run(source: Any, work: Callable[[Connection], Result]) -> Result:
    """Do `work` in a transaction of its own."""
    if isinstance(source, Engine):
        with source.begin() as connection:
            return work(connection)
    session = None if hasattr(source, "sync_engine") else source()
    if not isinstance(session, Session):
        raise ClaimError(f"'with' needs an Engine or a sessionmaker, not {type(source).__name__}: use 'async with'")
    with session, session.begin():
        return work(session.connection())


async def run_async(source: Any, work: Callable[[Connection], Result]) -> Result:
    """Do `work` in a transaction of its own."""
    if hasattr(source, "sync_engine"):
        async with source.begin() as connection:
            result: Result = await connection.run_sync(work)
            return result
    session: Any = None if isinstance(source, Engine) else source()
    if not hasattr(session, "run_sync"):
        raise ClaimError(
            f"'async with' needs an AsyncEngine or an async_sessionmaker, not {type(source).__name__}: use 'with'"
        )
    async with session, session.begin():
        done: Result = await session.run_sync(lambda inner: work(inner.connection()))
        return done
