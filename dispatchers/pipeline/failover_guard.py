"""The watch over the database's history: what this process remembers of it, the file beside it, and the hold."""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from dispatchers.database_identity import DatabaseIdentity
from dispatchers.store.protocol import Store
from outbox.errors import ConfigurationError, Suspended

log = logging.getLogger("outbox.dispatcher")

TOLD_EVERY_SECONDS = 60.0
RESUME = "`outbox status` tells more, `outbox resume --after-restore` lets them go on"


class FailoverGuard:
    """Looks whether the database still is what it was, and says why nothing may be sent if it is not.

    env: the deployment's name. file: where the mark is remembered beyond this process's life, and beyond the database's.
    """

    def __init__(
        self, store: Store, *, env: Callable[[], str], clock: Callable[[], float], file: "IdentityFile | None"
    ) -> None:
        self._store = store
        self._env = env
        self._clock = clock
        self._file = file
        self._known = file.read() if file else None
        self._told: str | None = None
        self._told_at = 0.0
        self.held: str | None = None

    @property
    def seen(self) -> int:
        """Which mark is known to have been committed: where only an earlier one stands, nothing is claimed."""
        return 0 if self._known is None else self._known.number

    async def look(self) -> None:
        """Raises what the database raises, and `ConfigurationError` if it is another env's."""
        watched = await self._store.watch(self._env(), self._known)
        if watched.continued is not None:
            log.warning("%s; sending continues, as promotions_lose_nothing is declared; on record", watched.continued)
        if watched.held is None and watched.mark != self._known:
            self._known = watched.mark
            if self._file and watched.mark:
                await asyncio.to_thread(self._file.write, watched.mark)
        self.held = watched.held

    def require_trust(self) -> None:
        if self.held is not None:
            raise Suspended(f"nothing is sent, every dispatcher of this database holds: {self.held}; {RESUME}")

    def tell(self) -> None:
        """Log that all of them hold, once a minute, and that they go on."""
        now = self._clock()
        if self.held is not None and (self._told is None or now - self._told_at >= TOLD_EVERY_SECONDS):
            self._told_at = now
            log.error("nothing is sent, every dispatcher holds: %s; %s", self.held, RESUME)
        elif self.held is None and self._told is not None:
            log.warning("a person has resumed: sending again")
        self._told = self.held


class IdentityFile:
    """A mark in a file outside the database: what a restored disk does not set back with it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> DatabaseIdentity | None:
        """Raises ConfigurationError for what is no mark; None where there is no file yet."""
        try:
            told = json.loads(self._path.read_bytes())
            instants = {
                name: told[name] and datetime.fromisoformat(told[name]) for name in ("checked_at", "resumed_at")
            }
            return DatabaseIdentity(**told | instants)
        except FileNotFoundError:
            self._require_folder()
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(
                f"mark {str(self._path)!r} cannot be read as a mark of the database's history ({type(error).__name__}): if"
                " you trust the database, remove the file; a dispatcher writes it anew"
            ) from error

    def _require_folder(self) -> None:
        if not os.access(self._path.parent, os.W_OK):
            raise ConfigurationError(
                f"mark {str(self._path)!r}: there is no folder {str(self._path.parent)!r} to write in"
            )

    def write(self, mark: DatabaseIdentity) -> None:
        """In one step, so that a crash leaves the old one. What fails is reported: an older mark still tells something."""
        told = asdict(mark) | {
            name: at and at.isoformat()
            for name, at in (("checked_at", mark.checked_at), ("resumed_at", mark.resumed_at))
        }
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            with beside.open("w") as file:
                json.dump(told, file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._path)
        except OSError as error:
            log.warning("the mark %s could not be written: %s", self._path, error.strerror)
