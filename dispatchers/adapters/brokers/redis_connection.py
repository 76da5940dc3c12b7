"""One connection to a Redis server: appends a batch of messages in one write, and reads the answer to each."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import sample
from typing import Any, Final

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from dispatchers.adapters.brokers.redis_answers import (
    IS_REPLICA,
    Moved,
    code_of,
    is_reply,
    outcome_of_copies,
    outcome_of_error,
    outcome_of_id,
)
from dispatchers.adapters.one_connection import NotReady
from dispatchers.delivery import Deferred, Outcome, Unknown

CONNECT_SECONDS: Final = 5
FAILURES: Final = (RedisError, OSError)  # a TimeoutError too

Arguments = Sequence[bytes | str | int]


class RedisConnection:
    """Appends to the streams of one server, one batch at a time, and never connects again.

    replicas: how many of them must confirm a batch. wait: for how long they may take.
    """

    def __init__(self, connection: AbstractConnection, replicas: int, wait_seconds: float) -> None:
        self._connection = connection
        self._replicas = replicas
        self._wait: Arguments = ("WAIT", replicas, int(wait_seconds * 1000))
        self._turn = asyncio.Lock()
        self._in_flight = False
        self._ended = False

    async def open(self) -> None:
        """Connect. Raises `NotReady` for a replica, and what the client raises."""
        try:
            await self._connection.connect()  # type: ignore[no-untyped-call]
            about = await self._ask("HELLO")
            await self._ask("PING")  # an error while the server loads its data
        except (AuthenticationError, NoPermissionError) as error:
            raise NotReady(f"nothing was sent: {code_of(error)}", cooldown=True) from None
        if dict(zip(about[::2], about[1::2], strict=True)).get(b"role") != b"master":
            raise NotReady("nothing was sent: the server is a replica")

    @property
    def is_usable(self) -> bool:
        return self._connection.is_connected and not self._ended

    @property
    def is_awaited(self) -> bool:
        return self._in_flight

    async def append(self, commands: Sequence[Arguments], latest: float) -> list[Outcome | Moved]:
        """The outcome of each XADD command. latest: when they may be written. The wait for their answers has no limit."""
        try:
            async with asyncio.timeout_at(latest):
                await self._turn.acquire()
        except TimeoutError:
            return [Deferred("nothing was sent: the batch before had no answer in time")] * len(commands)
        try:
            if not self.is_usable:
                return [Deferred("nothing was sent: the connection was lost")] * len(commands)
            return await self._append(commands)
        finally:
            self._turn.release()

    async def aclose(self) -> None:
        self._ended = True
        with suppress(*FAILURES):
            await self._connection.disconnect()

    async def _append(self, commands: Sequence[Arguments]) -> list[Outcome | Moved]:
        outcomes: list[Outcome | Moved] = []
        sent = [*commands, self._wait] if self._replicas else commands
        self._in_flight, is_whole = True, False
        try:
            await self._connection.send_packed_command(self._connection.pack_commands(sent), check_health=False)
            for command in commands:
                outcomes.append(await self._appended(command))  # noqa: PERF401  # an error must keep those before
            if self._replicas:
                confirmed = await self._confirmed()
                outcomes = [outcome_of_copies(outcome, confirmed, self._replicas) for outcome in outcomes]
            is_whole = IS_REPLICA not in outcomes  # else the next send searches for the primary
        except FAILURES as error:
            name = type(error).__name__
            if self._replicas:
                outcomes = [outcome_of_copies(outcome, name, self._replicas) for outcome in outcomes]
            outcomes += [Unknown(f"no answer: {name}")] * (len(commands) - len(outcomes))
        finally:
            self._in_flight = False
            self._ended |= not is_whole
        return outcomes

    async def _appended(self, command: Arguments) -> Outcome | Moved:
        try:
            return outcome_of_id(str(command[1]), await self._read())
        except RedisError as error:
            if not is_reply(error):
                raise
            return outcome_of_error(error, getattr(self._connection, "host", "localhost"))

    async def _confirmed(self) -> int | str:
        try:
            confirmed: int = await self._read()
        except RedisError as error:
            if not is_reply(error):
                raise
            return code_of(error)
        return confirmed

    async def _ask(self, *arguments: str) -> Any:
        await self._connection.send_command(*arguments, check_health=False)
        return await self._read()

    async def _read(self) -> Any:
        return await self._connection.read_response(timeout=math.inf, disconnect_on_error=False)


async def connected(
    clients: Sequence[Callable[[], AbstractConnection]], opened: Callable[[AbstractConnection], RedisConnection]
) -> RedisConnection:
    """A connection to the first primary among the servers, in a random order. Raises what the last one has raised."""
    failure: BaseException = OSError("no server")
    for client in sample(clients, len(clients)):
        connection = opened(client())
        try:
            async with asyncio.timeout(CONNECT_SECONDS / len(clients)):  # one that hangs leaves time for the others
                await connection.open()
            return connection
        except BaseException as error:
            await connection.aclose()
            if not isinstance(error, (*FAILURES, NotReady)):
                raise
            failure = error
    raise failure
