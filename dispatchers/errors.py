"""The errors that only the sending side raises: dispatchers, callbacks and operators' decisions. See `outbox.errors`.

OutboxError
├── CallbackError           a callback ends the transaction that is not its own, or leaves it unable to commit
├── DecisionRefused         an entry's state does not allow an operator's decision: .state
├── EntryNotFound           no entry has this id
└── Suspended               sending is suspended after a failover, a restore or a copy, until an operator resumes it
"""

from outbox.errors import OutboxError


class EntryNotFound(OutboxError):
    """No entry has this id in this outbox."""


class DecisionRefused(OutboxError):
    """The entry's present state does not allow the operator's decision. Nothing was changed."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


class Suspended(OutboxError):
    """Sending is suspended: the database may have lost the record of sends, or is a copy. See `outbox resume --after-restore`."""


class CallbackError(OutboxError):
    """A callback ended the transaction in which its entry is settled, or made it impossible to commit it."""
