"""Short transactions that the outbox begins itself, on the app's engine or sessionmaker.

At SERIALIZABLE, and on a Galera cluster, the server may end any of them in favour of another one, perhaps of another request: so
they are repeated.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from outbox.errors import ClaimError
from outbox.sessions.session import AsyncSessionLike
from outbox.sql.errors.driver import CONFLICTS, sqlstate
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


CONFLICT_TRIES = 10
MAX_FIRST_PAUSE_SECONDS = 0.01  # each next pause is twice as long at most
MAX_PAUSE_SECONDS = 0.1  # about 0.3 s for all pauses: a caller waits for the claim


def run(source: Any, work: Callable[[Connection], Result]) -> Result:
    """Do `work` in a transaction of its own, again after a conflict."""
    for pause in _pauses():
        try:
            return _run_once(source, work)
        except Exception as error:
            if not _is_conflict(error):
                raise
        time.sleep(pause)
    return _run_once(source, work)


def _run_once(source: Any, work: Callable[[Connection], Result]) -> Result:
    if isinstance(source, Engine):
        with source.begin() as connection:
            return work(connection)
    session = None if hasattr(source, "sync_engine") else source()
    if not isinstance(session, Session):
        raise ClaimError(f"'with' needs an Engine or a sessionmaker, not {type(source).__name__}: use 'async with'")
    with session, session.begin():
        return work(session.connection())


async def run_async(source: Any, work: Callable[[Connection], Result]) -> Result:
    """Do `work` in a transaction of its own, again after a conflict."""
    for pause in _pauses():
        try:
            return await _run_once_async(source, work)
        except Exception as error:
            if not _is_conflict(error):
                raise
        await asyncio.sleep(pause)
    return await _run_once_async(source, work)


async def _run_once_async(source: Any, work: Callable[[Connection], Result]) -> Result:
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


def _pauses() -> Iterator[float]:
    """Before each next try. Random, or two transactions that conflict would meet again."""
    for tried in range(CONFLICT_TRIES - 1):
        yield random.uniform(0, min(MAX_PAUSE_SECONDS, MAX_FIRST_PAUSE_SECONDS * 2**tried))


def _is_conflict(error: Exception) -> bool:
    """Whether the server ended the transaction in favour of another one, also where `claim_key` calls that KeyInFlight."""
    return any(sqlstate(getattr(each, "orig", None)) in CONFLICTS for each in (error, error.__cause__))
