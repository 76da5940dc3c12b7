"""Failover guard: suspends sending while the database's identity contradicts the one in this process's memory or in a file."""

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from dispatchers.database_identity import DatabaseIdentity
from dispatchers.errors import Suspended
from dispatchers.store.protocol import Store
from dispatchers.threads import on_own_thread
from outbox.errors import ConfigurationError

log = logging.getLogger("outbox.dispatcher")

REPORT_EVERY_SECONDS = 60.0
CURRENT_SECONDS = 30.0  # a check that is older does not count; an idle dispatcher checks every 5 s
RESUME = "see `outbox status`, then resume with `outbox resume --after-restore`"


class FailoverGuard:
    """Checks whether the database is still the same, and suspends sending if it is not.

    env: the deployment's name. file: stores the database identity outside this process and the database.
    """

    def __init__(
        self, store: Store, *, env: Callable[[], str], clock: Callable[[], float], file: "IdentityFile | None"
    ) -> None:
        self._store = store
        self._env = env
        self._clock = clock
        self._file = file
        self._known = file.read() if file else None
        self._reported: str | None = None
        self._reported_at = 0.0
        self._checked_at = self._learned_from = -math.inf  # the latter: when the newest of its checks began
        self.suspended: str | None = None

    @property
    def seen(self) -> int:
        """The number of the last committed identity. A claim brings nothing if the database has an earlier one."""
        return 0 if self._known is None else self._known.number

    @property
    def is_current(self) -> bool:
        """Whether the last check succeeded, and is recent."""
        return self._clock() - self._checked_at < CURRENT_SECONDS

    async def refresh(self) -> None:
        """Check the identity. Raises what the database raises, and `ConfigurationError` if it belongs to another env."""
        began = self._clock()
        try:
            checked = await self._store.check_identity(self._env(), self._known)
        except BaseException:
            self._checked_at = -math.inf
            raise
        if began < self._learned_from:  # a late answer: a check that began later has ended
            return
        self._learned_from = began
        self._checked_at = self._clock()
        self.suspended = checked.suspended  # before the file is written: a later check may end meanwhile
        if checked.continued is not None:
            log.warning("%s; sending continues because promotions_lose_nothing is set", checked.continued)
        if checked.suspended is None and checked.identity != self._known:
            self._known = checked.identity
            if self._file and checked.identity:
                # Not on one of the event loop's threads: adapters may occupy all of them.
                await on_own_thread("outbox-identity", self._file.write, checked.identity)

    def require_trust(self) -> None:
        if self.suspended is not None:
            raise Suspended(f"sending is suspended in every dispatcher of this database: {self.suspended}; {RESUME}")

    def report(self) -> None:
        """Log once a minute while sending is suspended, and once when it is resumed."""
        now = self._clock()
        if self.suspended is not None and (self._reported is None or now - self._reported_at >= REPORT_EVERY_SECONDS):
            self._reported_at = now
            log.error("sending suspended in every dispatcher: %s; %s", self.suspended, RESUME)
        elif self.suspended is None and self._reported is not None:
            log.warning("sending resumed by an operator")
        self._reported = self.suspended


class IdentityFile:
    """A database identity in a file outside the database, so that a restore does not change it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> DatabaseIdentity | None:
        """The stored identity; None if there is no file yet. Raises `ConfigurationError` for a malformed file."""
        try:
            stored = json.loads(self._path.read_bytes())
            instants = {
                name: stored[name] and datetime.fromisoformat(stored[name]) for name in ("checked_at", "resumed_at")
            }
            return DatabaseIdentity(**stored | instants)
        except FileNotFoundError:
            self._require_folder()
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(
                f"identity file {str(self._path)!r} holds no database identity ({type(error).__name__}): if you trust the"
                " database, remove the file; a dispatcher writes it again"
            ) from error

    def _require_folder(self) -> None:
        if not os.access(self._path.parent, os.W_OK):
            raise ConfigurationError(
                f"identity file {str(self._path)!r}: folder {str(self._path.parent)!r} does not exist or is not writable"
            )

    def write(self, identity: DatabaseIdentity) -> None:
        """Replace the file atomically. A failure is only logged: an older identity still detects some restores."""
        instants = {"checked_at": identity.checked_at, "resumed_at": identity.resumed_at}
        stored = asdict(identity) | {name: at and at.isoformat() for name, at in instants.items()}
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            with beside.open("w") as file:
                json.dump(stored, file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._path)
        except OSError as error:
            log.warning(
                "cannot write the database identity file %s: %s; the file keeps the earlier identity",
                self._path,
                error.strerror,
            )
