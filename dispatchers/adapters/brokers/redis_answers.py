"""The outcomes of Redis's answers to XADD and WAIT. Pure."""

import re
from typing import Final, NamedTuple

from redis.exceptions import MovedError, RedisError, ResponseError

from dispatchers.delivery import Deferred, Delivered, Outcome, Unknown

CODE: Final = re.compile(r"[A-Z]{2,40}")
NOT_NOW: Final = frozenset({"ASK", "TRYAGAIN", "WRONGTYPE"})
NOTHING_NOW: Final = frozenset(
    {"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOAUTH", "NOPERM", "NOREPLICAS", "OOM", "READONLY"}
)
"""Redis checks these before it executes a command: redis, processCommand in src/server.c."""

IS_REPLICA: Final = Deferred("READONLY", cooldown=True)


class Moved(NamedTuple):
    """Another node of the cluster has the stream. Nothing was stored. bucket: of the stream's name."""

    bucket: int
    host: str
    port: int


def is_reply(error: RedisError) -> bool:
    """Whether the server has answered with this error, so that the connection can be used further."""
    return isinstance(error, ResponseError) or error.status_code is not None


def code_of(error: RedisError) -> str:
    """The first word of an answer, if it is a code: the rest may quote what was sent."""
    code = error.status_code or str(error).partition(" ")[0]
    return code if CODE.fullmatch(code) else "an error without a code"


def outcome_of_error(error: RedisError, host: str) -> Outcome | Moved:
    """The outcome of one message that the server on this host has answered with an error."""
    if isinstance(error, MovedError):
        return Moved(error.slot_id, error.host or host, error.port)
    code = code_of(error)
    if code in NOT_NOW:
        return Deferred(code)
    if code in NOTHING_NOW:
        return Deferred(code, cooldown=True)
    return Unknown(code)  # perhaps of a proxy, which does not know what the server did


def outcome_of_id(stream: str, id: object) -> Outcome:
    """The outcome of one message that the server has answered with its id."""
    if not isinstance(id, bytes):
        return Unknown("an answer that is no id")
    return Delivered({"stream": stream, "id": id.decode(errors="replace")})


def outcome_of_copies(outcome: Outcome | Moved, confirmed: int | str, wanted: int) -> Outcome | Moved:
    """confirmed: how many replicas have the message; or the code of the error that WAIT was answered with."""
    if not isinstance(outcome, Delivered) or (isinstance(confirmed, int) and confirmed >= wanted):
        return outcome
    return Unknown(f"the primary has it, but of {wanted} replicas have confirmed: {confirmed}", cooldown=True)
