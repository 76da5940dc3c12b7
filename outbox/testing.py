"""Assertions for the tests of an app: what has the app enqueued?

    from outbox.testing import assert_enqueued, assert_not_enqueued

    place_order(session)
    assert_enqueued(session, "stripe.payment_intents.create", {"amount": 2000}, parent="order:42")
    assert_not_enqueued(session, "email.send")

The functions flush the session and read in its own transaction. So a test that rolls back at its end sees what its code would
have committed. With an AsyncSession, await them; a call that is not awaited fails the test, which would otherwise pass.
No other process needs to run. With pytest, the fixtures of the same names need no session, and others send what was enqueued:
docs/testing.md.
"""

import asyncio
import json
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias, TypedDict, Unpack, overload
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session, scoped_session

from outbox.configuration import Configuration
from outbox.default_outbox import default
from outbox.effects.effect import Effect
from outbox.encryption import StoredField, open_json
from outbox.errors import InvalidPayload
from outbox.instance import Outbox
from outbox.keys import ParentKey, as_parent_key
from outbox.sessions.session import AsyncSessionLike, flush_all, in_session, sync_session, unscoped

__all__ = ["Enqueued", "NotEnqueued", "all_enqueued", "assert_enqueued", "assert_not_enqueued"]

Operation: TypeAlias = str | Effect[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """One entry as it was enqueued. Its payload was stored as JSON and parsed again, so a tuple is now a list."""

    id: UUID
    operation: str
    payload: Any
    parent: ParentKey
    discriminator: str
    destination: str
    options: dict[str, Any]
    ordering_key: str | None
    due_at: datetime


class NotEnqueued(AssertionError):
    """The entries are not those that a test asserts. The text lists the entries that exist.

    differing: how the nearest entry of this operation differs: for each condition that it does not meet, what the entry has, as
        far as it is asserted, and what was asserted. pytest compares them. Empty if no entry has the operation.
    """

    def __init__(self, text: str, differing: Mapping[str, tuple[Any, Any]]) -> None:
        super().__init__(text)
        self.differing = differing


class Conditions(TypedDict, total=False):
    """parent, discriminator: the entry's. outbox: the outbox; by default the one of `outbox.configure`."""

    parent: str | ParentKey | None
    discriminator: str | None
    outbox: Outbox | None


class Counted(Conditions, total=False):
    """count: how many entries there must be; one by default."""

    count: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    operation: str | None
    payload: Any
    parent: ParentKey | None
    discriminator: str | None

    def fits(self, entry: Enqueued) -> bool:
        return (
            self.operation in (None, entry.operation)
            and self.parent in (None, entry.parent)
            and self.discriminator in (None, entry.discriminator)
            and _holds(entry.payload, self.payload)
        )

    def differing(self, found: list[Enqueued]) -> dict[str, tuple[Any, Any]]:
        """How the nearest entry of the operation differs, the first one if several are as near."""
        wanted = self._conditions()
        near = [
            {name: _part(getattr(entry, name), value) for name, value in wanted.items()}
            for entry in found
            if entry.operation == self.operation
        ]
        if not near:
            return {}
        nearest = max(near, key=lambda parts: _equal_values(parts, wanted))
        return {name: (nearest[name], value) for name, value in wanted.items() if not _holds(nearest[name], value)}

    def _conditions(self) -> dict[str, Any]:
        conditions = {"payload": self.payload, "parent": self.parent, "discriminator": self.discriminator}
        return {name: value for name, value in conditions.items() if value is not None}

    def __str__(self) -> str:
        text = [f"{name} {value!r}" for name, value in self._conditions().items()]
        return " with ".join([repr(self.operation) if self.operation else "anything", *text[:1]]) + "".join(
            f" and {condition}" for condition in text[1:]
        )


def _holds(payload: Any, wanted: Any) -> bool:
    """Whether `payload` is what is wanted; an object may have further members."""
    if isinstance(wanted, dict) and isinstance(payload, dict):
        return all(name in payload and _holds(payload[name], value) for name, value in wanted.items())
    return wanted is None or bool(payload == wanted)


def _part(payload: Any, wanted: Any) -> Any:
    """What `_holds` compares of the payload."""
    if isinstance(wanted, dict) and isinstance(payload, dict):
        return {name: _part(payload[name], value) for name, value in wanted.items() if name in payload}
    return payload


def _equal_values(value: Any, wanted: Any) -> int:
    """How many values are as wanted, at any depth."""
    if isinstance(wanted, dict) and isinstance(value, dict):
        return sum(_equal_values(value[name], each) for name, each in wanted.items() if name in value)
    return int(_holds(value, wanted))


@overload
def all_enqueued(
    session: Session | scoped_session[Any], operation: Operation | None = None, **conditions: Unpack[Conditions]
) -> list[Enqueued]: ...
@overload
def all_enqueued(
    session: AsyncSessionLike, operation: Operation | None = None, **conditions: Unpack[Conditions]
) -> Awaitable[list[Enqueued]]: ...
def all_enqueued(session: Any, operation: Operation | None = None, **conditions: Unpack[Conditions]) -> Any:
    """Return the entries that the session sees, ordered by transaction, oldest first: all, or those that match."""
    _refuse_unknown("all_enqueued", conditions, Conditions)
    wanted, configuration = _wanted(operation, None, conditions), _configuration_of(conditions)
    return in_session(
        session, lambda inner: [entry for entry in read_entries(inner, configuration) if wanted.fits(entry)]
    )


@overload
def assert_enqueued(
    session: Session | scoped_session[Any], operation: Operation, payload: Any = None, **conditions: Unpack[Counted]
) -> list[Enqueued]: ...
@overload
def assert_enqueued(
    session: AsyncSessionLike, operation: Operation, payload: Any = None, **conditions: Unpack[Counted]
) -> Awaitable[list[Enqueued]]: ...
def assert_enqueued(session: Any, operation: Operation, payload: Any = None, **conditions: Unpack[Counted]) -> Any:
    """Assert that exactly `count` entries match, and return them. The AssertionError lists the entries that exist.

    operation: its name, or an `outbox.Effect`; `payload` may then be an object of the effect's type.
    payload: the part of the payload that must match. The entry's objects may have further members, at any depth. An argument
        that is None matches every entry.
    """
    __tracebackhide__ = True  # pytest then shows the test's own line
    _refuse_unknown("assert_enqueued", conditions, Counted)
    return _require_in(session, _wanted(operation, payload, conditions), "assert_enqueued", conditions)


@overload
def assert_not_enqueued(
    session: Session | scoped_session[Any],
    operation: Operation | None = None,
    payload: Any = None,
    **conditions: Unpack[Conditions],
) -> list[Enqueued]: ...
@overload
def assert_not_enqueued(
    session: AsyncSessionLike, operation: Operation | None = None, payload: Any = None, **conditions: Unpack[Conditions]
) -> Awaitable[list[Enqueued]]: ...
def assert_not_enqueued(
    session: Any, operation: Operation | None = None, payload: Any = None, **conditions: Unpack[Conditions]
) -> Any:
    """Assert that no entry matches. Without an operation, assert that there is no entry at all."""
    __tracebackhide__ = True
    _refuse_unknown("assert_not_enqueued", conditions, Conditions)
    counted: Counted = {**conditions, "count": 0}
    return _require_in(session, _wanted(operation, payload, conditions), "assert_not_enqueued", counted)


def require_enqueued(found: list[Enqueued], operation: Operation, payload: Any, conditions: Counted) -> list[Enqueued]:
    """`assert_enqueued` for entries that were read before."""
    __tracebackhide__ = True
    _refuse_unknown("assert_enqueued", conditions, Counted)
    return _require(found, _wanted(operation, payload, conditions), conditions.get("count", 1))


def require_not_enqueued(
    found: list[Enqueued], operation: Operation | None, payload: Any, conditions: Conditions
) -> list[Enqueued]:
    """`assert_not_enqueued` for entries that were read before."""
    __tracebackhide__ = True
    _refuse_unknown("assert_not_enqueued", conditions, Conditions)
    return _require(found, _wanted(operation, payload, conditions), 0)


def _wanted(operation: Operation | None, payload: Any, conditions: Conditions) -> _Wanted:
    if isinstance(operation, Effect):
        payload = _json_of(operation, payload)
        operation = operation.name
    parent = conditions.get("parent")
    parent_key = None if parent is None else as_parent_key(parent)
    return _Wanted(operation, payload, parent_key, conditions.get("discriminator"))


def _configuration_of(conditions: Conditions) -> Configuration:
    return (conditions.get("outbox") or default).configuration


def _refuse_unknown(name: str, given: Mapping[str, object], conditions: type[Conditions]) -> None:
    """A condition that does not exist would be ignored, and the assertion would hold for another reason."""
    names = conditions.__annotations__
    if unknown := sorted(given.keys() - names.keys()):
        raise TypeError(f"{name} has no condition {unknown[0]!r}; its conditions are {', '.join(names)}")


def _require_in(session: Any, wanted: _Wanted, name: str, conditions: Counted) -> Any:
    __tracebackhide__ = True
    configuration, count = _configuration_of(conditions), conditions.get("count", 1)
    if not hasattr(unscoped(session), "run_sync"):
        return _require(read_entries(sync_session(unscoped(session)), configuration), wanted, count)

    async def require() -> list[Enqueued]:
        __tracebackhide__ = True
        return _require(await in_session(session, lambda inner: read_entries(inner, configuration)), wanted, count)

    return _Asked(name, require)


def _json_of(effect: Effect[Any, Any], payload: Any) -> Any:
    """The JSON data of a payload of the effect's type. A dict that is none, such as a part of one, is JSON data already."""
    try:
        return None if payload is None else json.loads(effect.write(payload).text)
    except InvalidPayload:
        if isinstance(payload, dict):
            return payload
        raise


class _Asked:
    """What is awaited with an AsyncSession. Left alone it cancels the task that it was made in: the test must not pass."""

    def __init__(self, name: str, ask: Callable[[], Coroutine[Any, Any, list[Enqueued]]]) -> None:
        self._name = name
        self._ask = ask
        self._is_awaited = False
        try:
            self._task = asyncio.current_task()
        except RuntimeError:
            self._task = None

    def __await__(self) -> Generator[Any, None, list[Enqueued]]:
        __tracebackhide__ = True
        self._is_awaited = True
        return self._ask().__await__()

    def __del__(self) -> None:
        if not self._is_awaited:
            text = f"{self._name} was not awaited: with an AsyncSession write `await {self._name}(...)`"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            if self._task is not None:
                self._task.cancel(text)


def _require(found: list[Enqueued], wanted: _Wanted, count: int) -> list[Enqueued]:
    __tracebackhide__ = True
    fitting = [entry for entry in found if wanted.fits(entry)]
    if len(fitting) != count:
        text = "".join(f"\n    {_line(entry)}" for entry in found) or " nothing"
        raise NotEnqueued(
            f"{len(fitting)} entries are {wanted}, not {count}; enqueued {'is' if found == [] else 'are'}:{text}",
            wanted.differing(found) if count and not fitting else {},
        )
    return fitting


def _line(entry: Enqueued) -> str:
    text = f"{entry.operation} {json.dumps(entry.payload)} of parent {entry.parent.key!r}"
    return text + (f", discriminator {entry.discriminator!r}" if entry.discriminator else "")


def read_entries(session: Session, configuration: Configuration) -> list[Enqueued]:
    """Every entry that the session sees, oldest first. Flushes the session."""
    flush_all(session)
    entry, encryption = configuration.tables.entry, configuration.encryption
    rows = session.connection().execute(select(entry).order_by(entry.c.created_at, entry.c.id))
    return [
        Enqueued(
            id=row.id,
            operation=row.operation,
            payload=json.loads(
                open_json(encryption, bytes(row.payload), StoredField(row.env, row.id, row.operation, "payload"))
            ),
            parent=ParentKey(row.parent, scope=row.scope, source=row.source),
            discriminator=row.discriminator,
            destination=row.destination,
            options=json.loads(row.options),
            ordering_key=row.ordering_key,
            due_at=row.due_at,
        )
        for row in rows
    ]
