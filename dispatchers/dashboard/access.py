"""Who uses the dashboard, and what each may do: identities, roles, and the authenticator that the host app gives."""

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from dispatchers.admin.decide.decisions import MAX_ACTOR_CHARS, check_decision
from outbox.errors import ConfigurationError, InvalidValue
from outbox.sql.schema.rights import Right


class Role(StrEnum):
    """viewer: reads every page. operator: decides too. payload_reader: reveals what was sent and answered, which is recorded."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    PAYLOAD_READER = "payload_reader"


@dataclass(frozen=True, slots=True)
class Identity:
    """An operator, or a program, that the host app has authenticated. Its name is recorded with each decision.

    roles: names of `Role`. An operator, and a payload reader, may also view.
    Raises `ConfigurationError` for an unknown role, and for a name that cannot be recorded.
    """

    name: str
    roles: Collection[str]

    def __post_init__(self) -> None:
        try:
            check_decision(self.name, None)
        except InvalidValue:
            raise ConfigurationError(
                f"an identity's name has 1 to {MAX_ACTOR_CHARS} characters, not {self.name!r}"
            ) from None
        if isinstance(self.roles, str) or not set(self.roles) <= set(Role):
            raise ConfigurationError(f"roles={self.roles!r}: give a list of {', '.join(Role)}")

    def may(self, role: Role) -> bool:
        """Whether the identity has this role."""
        return bool(self.roles) if role is Role.VIEWER else role in self.roles


READS: Mapping[Role, frozenset[Right]] = {
    Role.VIEWER: frozenset(),
    Role.OPERATOR: frozenset({Right.KEYS, Right.DECISIONS}),
    Role.PAYLOAD_READER: frozenset({Right.KEYS, Right.CONTENT}),
}
"""What each role reads beyond what every viewer does. Operators search for child keys at the service."""


def rights_of(identity: Identity) -> frozenset[Right]:
    """What the identity reads beyond what every viewer does."""
    return frozenset().union(*(READS[Role(role)] for role in identity.roles))


Answer: TypeAlias = Identity | Response | None
Authenticator: TypeAlias = Callable[[Request], Answer | Awaitable[Answer]]
"""Returns who sends the request; None if it is not signed in; or a response instead, such as a redirect to a login page.

A synchronous authenticator runs on a thread.
"""

LOCAL_VIEWER = Identity("local", [Role.VIEWER])


def local_viewer(request: Request) -> Identity:
    """The authenticator of `outbox web` on a loopback address without another one: the user of this machine may only read."""
    return LOCAL_VIEWER


async def identify(authenticate: Authenticator, request: Request) -> Answer:
    """What the authenticator returns for the request. Raises `ConfigurationError` if that is not an identity."""
    answer: object
    if inspect.iscoroutinefunction(authenticate):
        answer = await authenticate(request)
    else:
        answer = await run_in_threadpool(authenticate, request)
        if inspect.isawaitable(answer):
            answer = await answer
    if answer is None or isinstance(answer, Identity | Response):
        return answer
    raise ConfigurationError(
        f"the dashboard's authenticator returned {type(answer).__name__!r}: it must return an Identity, a Response or None"
    )
