"""The users of `outbox web`: a file of names, roles and hashed passwords, asked by HTTP Basic authentication (RFC 7617).

One line for each user: `name:role+role:hash`. `outbox user` prints such a line.
"""

import asyncio
import base64
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dispatchers.dashboard.access import Identity
from dispatchers.dashboard.protection import path_of, with_headers
from dispatchers.dashboard.sign_in_limits import SignInLimits
from outbox.errors import ConfigurationError

COST, BLOCK_SIZE, PARALLEL = 2**15, 8, 1  # RFC 7914: 32 MiB, some 80 ms
SALT_BYTES, HASH_BYTES = 16, 32
MAX_MEMORY_BYTES = 64 * 1024 * 1024
HASHES_AT_ONCE = 2  # of all who try a password: further ones wait without a thread of their own
MAX_WAITING = 40  # so many hash or wait: some 2 s, and more than one client may try in a minute
NAME_CHARS_SHOWN = 64
SIGN_OUT = "/sign-out"
CHALLENGE = {"WWW-Authenticate": 'Basic realm="outbox", charset="UTF-8"'}


log = logging.getLogger("outbox.dashboard")


def user_line(name: str, roles: Sequence[str], password: str) -> str:
    """The line of a user. Raises `ConfigurationError` for a name or a role that cannot be."""
    if ":" in name or name != name.strip():
        raise ConfigurationError(f"a user's name must not contain a colon, or begin or end with a space: {name!r}")
    Identity(name, roles)
    salt = secrets.token_bytes(SALT_BYTES)
    return f"{name}:{'+'.join(roles)}:{_encoded(salt)}.{_encoded(_hash(password, salt))}"


@dataclass(frozen=True, slots=True)
class _User:
    """salt, hashed: of the password."""

    identity: Identity
    salt: bytes
    hashed: bytes


class PasswordFile:
    """The authenticator of `outbox web --users`. Raises `ConfigurationError` for a malformed line.

    The file is read again when it has changed; if it is malformed then, the users stay as they were. Sign-ins are bounded: wrong
    passwords by client and name, and the passwords that wait for their hash.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._seen = _stamp(self._path)
        self._users = _users(self._path)
        self._limits = SignInLimits()
        self._key = secrets.token_bytes(32)
        self._nobody = _User(Identity("nobody", []), secrets.token_bytes(SALT_BYTES), secrets.token_bytes(HASH_BYTES))
        self._verified: dict[str, bytes] = {}  # what was checked once is not hashed again at each refresh of a page
        self._hashing = ThreadPoolExecutor(HASHES_AT_ONCE, "outbox-password")
        self._waiting = 0
        self._signing_in: dict[tuple[str, bytes], asyncio.Future[Identity | Response]] = {}

    async def __call__(self, request: Request) -> Identity | Response:
        self._read_again()
        given = _credentials(request)
        if given is None:
            return _refused("Sign in with a name and a password of the dashboard's users.", 401)
        name, password = given
        user = self._users.get(name)
        seen = hmac.digest(self._key, password.encode(), "sha256")
        if user is not None and hmac.compare_digest(self._verified.get(name, b""), seen):
            return user.identity
        client = "" if request.client is None else request.client.host
        first = self._signing_in.get((name, seen))
        if first is None:  # a page, and a program at its start, sends several requests at the same time
            first = asyncio.ensure_future(self._sign_in(name, password, seen, client))
            self._signing_in[name, seen] = first
            first.add_done_callback(lambda _: self._signing_in.pop((name, seen), None))
        return await asyncio.shield(first)

    async def _sign_in(self, name: str, password: str, seen: bytes, client: str) -> Identity | Response:
        """An unknown name takes as long as a wrong password: the time must not show who is a user."""
        if self._waiting >= MAX_WAITING:
            return _refused("Too many people sign in at the same time. Try again.", 503, retry_after=1)
        seconds = self._limits.try_now(client, name)
        if seconds is not None:
            return _refused(f"Too many wrong passwords. Try again in {seconds} s.", 429, retry_after=seconds)
        user = self._users.get(name, self._nobody)
        running = asyncio.get_running_loop().run_in_executor(self._hashing, _hash, password, user.salt)
        self._waiting += 1
        running.add_done_callback(self._ended)
        if not hmac.compare_digest(await running, user.hashed):
            log.warning("a sign-in failed: name %s, from %s", _shown(name), _shown(client))
            return _refused("The name or the password is wrong.", 401)
        self._limits.succeeded(client, name)
        if self._users.get(name) is not user:
            return _refused("The file of users has changed. Sign in again.", 401)
        self._verified[name] = seen
        return user.identity

    def _ended(self, hashed: object) -> None:
        self._waiting -= 1

    def _read_again(self) -> None:
        """A removed user, a new password or a new role counts from the next request on."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            users = _users(self._path)
        except ConfigurationError as error:
            log.error("the file of users has changed and cannot be used, so the users stay as they were: %s", error)
            return
        self._verified = {name: seen for name, seen in self._verified.items() if users.get(name) == self._users[name]}
        self._users = {
            name: self._users[name] if self._users.get(name) == user else user for name, user in users.items()
        }
        log.info("the file of users has changed: it has %d users now", len(users))


class SignOut:
    """Answers `SIGN_OUT`, and passes every other request on.

    A browser sends a name and a password with each request, until an answer refuses them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope) == SIGN_OUT:
            answer = _refused("You are signed out. To sign in again, open the dashboard.", 401)
            await answer(scope, receive, with_headers(send))
        else:
            await self._app(scope, receive, send)


def _refused(text: str, status: int, *, retry_after: int | None = None) -> Response:
    headers = CHALLENGE if status == 401 else {"Retry-After": str(retry_after)}
    return PlainTextResponse(f"{text}\n", status, headers)


def _shown(name: str) -> str:
    return repr(name if len(name) <= NAME_CHARS_SHOWN else f"{name[:NAME_CHARS_SHOWN]}...")


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Changes with the file; None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _users(path: Path) -> dict[str, _User]:
    users: dict[str, _User] = {}
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


def _user(number: int, line: str) -> tuple[str, _User]:
    name, _, rest = line.partition(":")
    roles, _, secret = rest.partition(":")
    salt, _, hashed = secret.partition(".")
    try:
        return name, _User(Identity(name, roles.split("+")), _decoded(salt), _decoded(hashed))
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(f"line {number} of the file of users is malformed: {error}") from None


def _credentials(request: Request) -> tuple[str, str] | None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, _, password = base64.b64decode(given, validate=True).decode().partition(":")
    except ValueError:  # no base64, letters beyond ASCII, no UTF-8
        return None
    return name, password


def _hash(password: str, salt: bytes) -> bytes:
    cost = {"n": COST, "r": BLOCK_SIZE, "p": PARALLEL}
    return hashlib.scrypt(password.encode(), salt=salt, **cost, maxmem=MAX_MEMORY_BYTES, dklen=HASH_BYTES)


def _encoded(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode()


def _decoded(text: str) -> bytes:
    value = base64.urlsafe_b64decode(text)
    if len(value) < SALT_BYTES:
        raise ValueError("its last part is not a hash: `outbox user` prints a line")
    return value
