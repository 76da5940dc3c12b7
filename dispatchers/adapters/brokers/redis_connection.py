"""One connection to a Redis server: appends a batch of messages in one write, and reads the answer to each."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import sample
from typing import Any, Final, TypeAlias

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
Take: TypeAlias = Callable[[int, Outcome | Moved], None]


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

    async def append(self, commands: Sequence[Arguments], latest: float, take: Take) -> None:
        """Write XADD commands. latest: when they may be written; the wait for their answers has no limit.

        take: called once for each command, with its place and its outcome: after its answer, or with replicas after all answers.
        """
        try:
            async with asyncio.timeout_at(latest):
                await self._turn.acquire()
        except TimeoutError:
            _refuse(len(commands), "the batch before had no answer in time", take)
            return
        try:
            if not self.is_usable:
                _refuse(len(commands), "the connection was lost", take)
            elif asyncio.get_running_loop().time() > latest:
                _refuse(len(commands), "too little of its time was left", take)
            else:
                await self._append(commands, take)
        finally:
            self._turn.release()

    async def aclose(self) -> None:
        self._ended = True
        with suppress(*FAILURES):
            await self._connection.disconnect()

    async def _append(self, commands: Sequence[Arguments], take: Take) -> None:
        outcomes = list[Outcome | Moved]()
        confirmed: int | str = 0
        failure = ""
        sent = [*commands, self._wait] if self._replicas else commands
        self._in_flight, is_whole = True, False
        try:
            await self._connection.send_packed_command(self._connection.pack_commands(sent), check_health=False)
            for place, command in enumerate(commands):
                outcome = await self._appended(command)
                outcomes.append(outcome)
                if not self._replicas:
                    take(place, outcome)
            if self._replicas:
                confirmed = await self._confirmed()
            is_whole = IS_REPLICA not in outcomes  # else the next send searches for the primary
        except FAILURES as error:
            confirmed = failure = type(error).__name__
        finally:
            self._in_flight = False
            self._ended |= not is_whole
        if self._replicas:
            for place, outcome in enumerate(outcomes):
                take(place, outcome_of_copies(outcome, confirmed, self._replicas))
        for place in range(len(outcomes), len(commands)):
            take(place, Unknown(f"no answer: {failure}"))

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


def _refuse(count: int, reason: str, take: Take) -> None:
    for place in range(count):
        take(place, Deferred(f"nothing was sent: {reason}"))


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
