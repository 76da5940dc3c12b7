"""The entries that this process has claimed and not begun to send. Another thread may take them from the event loop.

A user's coroutine may block the event loop for longer than a lease. The entries that wait for it would count as maybe sent when
another process claims them. So a thread that notices the block releases them: see `LoopWatch`. An entry is begun or
taken, never both.
"""

from collections.abc import Collection, Iterable, Sequence
from threading import Lock
from typing import NamedTuple
from uuid import UUID

from dispatchers.transitions import ClaimedEntry

BLOCKED = "the event loop was blocked, and its send had not begun"


class Taken(NamedTuple):
    """Entries that the event loop will not send any more. tokens: of the claims whose answer it has not read yet."""

    entries: Sequence[ClaimedEntry]
    tokens: Collection[UUID]


class Unstarted:
    """Keeps the entries that may still be taken. Each method is atomic, on any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._asked: set[UUID] = set()
        # By the identity of the object, which exists once for each claim: to hash a lease takes four calls of Python code.
        self._waiting: dict[int, ClaimedEntry] = {}
        self._taken: dict[int, ClaimedEntry] = {}
        self._taken_tokens: set[UUID] = set()

    @property
    def has_any(self) -> bool:
        """Whether there is something to take."""
        with self._lock:
            return bool(self._waiting or self._asked)

    def ask(self, token: UUID) -> None:
        """Note that a claim begins."""
        with self._lock:
            self._asked.add(token)

    def answered(self, token: UUID, claimed: Collection[ClaimedEntry]) -> None:
        """Note the end of a claim, and the entries that it brought."""
        with self._lock:
            self._asked.discard(token)
            if token in self._taken_tokens:
                self._taken_tokens.discard(token)
                self._taken.update(_by_identity(claimed))
            else:
                self._waiting.update(_by_identity(claimed))

    def begin(self, entry: ClaimedEntry) -> bool:
        """Whether the entry may be sent. If it may, it counts as begun from now on."""
        with self._lock:
            self._waiting.pop(id(entry), None)
            return id(entry) not in self._taken

    def end(self, entry: ClaimedEntry) -> bool:
        """Note that the entry has ended here, sent or not. Returns whether it was taken."""
        with self._lock:
            self._waiting.pop(id(entry), None)
            return self._taken.pop(id(entry), None) is not None

    def take_all(self) -> Taken:
        """Take everything that has not begun."""
        with self._lock:
            entries, self._waiting = self._waiting, {}
            self._taken.update(entries)
            self._taken_tokens |= self._asked
            return Taken(list(entries.values()), list(self._asked))


def _by_identity(entries: Collection[ClaimedEntry]) -> Iterable[tuple[int, ClaimedEntry]]:
    return zip(map(id, entries), entries, strict=True)
