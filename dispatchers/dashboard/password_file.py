"""The users of `outbox web`: a file of names, roles and hashed passwords, asked by HTTP Basic authentication (RFC 7617).

One line for each user: `name:role+role:hash`. `outbox user` prints such a line.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from dispatchers.dashboard.access import Identity
from outbox.errors import ConfigurationError

COST, BLOCK_SIZE, PARALLEL = 2**15, 8, 1  # RFC 7914: 32 MiB, some 80 ms
SALT_BYTES, HASH_BYTES = 16, 32
MEMORY_BYTES_MAX = 64 * 1024 * 1024
HASHES_AT_ONCE = 2  # of all who try a password: further ones wait without a thread of their own
CHALLENGE = {"WWW-Authenticate": 'Basic realm="outbox", charset="UTF-8"'}


def user_line(name: str, roles: Sequence[str], password: str) -> str:
    """The line of a user. Raises `ConfigurationError` for a name or a role that cannot be."""
    if ":" in name or name != name.strip():
        raise ConfigurationError(f"a user's name must not contain a colon, or begin or end with a space: {name!r}")
    Identity(name, roles)
    salt = secrets.token_bytes(SALT_BYTES)
    return f"{name}:{'+'.join(roles)}:{_encoded(salt)}.{_encoded(_hash(password, salt))}"


class PasswordFile:
    """The authenticator of `outbox web --users`. The file is read once. Raises `ConfigurationError` for a malformed line."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._users = _users(Path(path))
        self._key = secrets.token_bytes(32)
        self._nobody = (Identity("nobody", []), secrets.token_bytes(SALT_BYTES), secrets.token_bytes(HASH_BYTES))
        self._verified: dict[str, bytes] = {}  # what was checked once is not hashed again at each refresh of a page
        self._hashing = ThreadPoolExecutor(HASHES_AT_ONCE, "outbox-password")

    async def __call__(self, request: Request) -> Identity | Response:
        given = _credentials(request)
        if given is not None and await self._matches(*given):
            return self._users[given[0]][0]
        return PlainTextResponse("Sign in with a name and a password of the dashboard's users.\n", 401, CHALLENGE)

    async def _matches(self, name: str, password: str) -> bool:
        """An unknown name takes as long as a wrong password: the time must not show who is a user."""
        _, salt, expected = self._users.get(name, self._nobody)
        seen = hmac.digest(self._key, password.encode(), "sha256")
        if hmac.compare_digest(self._verified.get(name, b""), seen):
            return True
        hashed = await asyncio.get_running_loop().run_in_executor(self._hashing, _hash, password, salt)
        if not hmac.compare_digest(hashed, expected):
            return False
        self._verified[name] = seen
        return True


def _users(path: Path) -> dict[str, tuple[Identity, bytes, bytes]]:
    users: dict[str, tuple[Identity, bytes, bytes]] = {}
    for number, line in _lines(path):
        name, user = _user(number, line)
        if name in users:
            raise ConfigurationError(
                f"line {number} of the file of users names {name!r} again: leave one line for each"
            )
        users[name] = user
    if not users:
        raise ConfigurationError(f"the file of users {str(path)!r} has no user: `outbox user` prints a line")
    return users


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"the file of users {str(path)!r} cannot be read: {why}") from None
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def _user(number: int, line: str) -> tuple[str, tuple[Identity, bytes, bytes]]:
    name, _, rest = line.partition(":")
    roles, _, secret = rest.partition(":")
    salt, _, hashed = secret.partition(".")
    try:
        return name, (Identity(name, roles.split("+")), _decoded(salt), _decoded(hashed))
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(f"line {number} of the file of users is malformed: {error}") from None


def _credentials(request: Request) -> tuple[str, str] | None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, _, password = base64.b64decode(given, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return name, password


def _hash(password: str, salt: bytes) -> bytes:
    cost = {"n": COST, "r": BLOCK_SIZE, "p": PARALLEL}
    return hashlib.scrypt(password.encode(), salt=salt, **cost, maxmem=MEMORY_BYTES_MAX, dklen=HASH_BYTES)


def _encoded(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode()


def _decoded(text: str) -> bytes:
    value = base64.urlsafe_b64decode(text)
    if len(value) < SALT_BYTES:
        raise ValueError("its last part is not a hash: `outbox user` prints a line")
    return value
