"""A dispatcher's settings, checked once; `Dispatcher` documents them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypedDict

from dispatchers.callbacks import AppTransactions
from dispatchers.flow_control.state import Limits, check_limits
from outbox.errors import ConfigurationError

RETENTION = timedelta(days=35)
"""The default: longer than records are kept (`outbox.configuration.RECORD_RETENTION`, 30 days), and than the windows of 30 days
that several services publish (Stripe API v2: docs.stripe.com/api-v2-overview)."""


class GivenSettings(TypedDict, total=False):
    """The settings that an app gives; `Settings` has the defaults of the others."""

    lease: timedelta
    margin: timedelta
    concurrency: int
    max_in_flight: int
    limits: Mapping[str, Limits]
    callback_concurrency: int
    callback_timeout: timedelta | None
    callback_transactions: AppTransactions | None
    poll: timedelta
    grace: timedelta
    retention: timedelta
    identity_file: str | os.PathLike[str] | None
    promotions_lose_nothing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one dispatcher. Raises `ConfigurationError` for values that break the guarantees.

    retention: checked by `Retention`, which knows the adapters' windows.
    """

    lease: timedelta = timedelta(seconds=60)
    margin: timedelta = timedelta(seconds=5)
    concurrency: int = 100
    max_in_flight: int = 1000
    limits: Mapping[str, Limits] = field(default_factory=dict)
    callback_concurrency: int = 4
    callback_timeout: timedelta | None = None
    callback_transactions: AppTransactions | None = None
    poll: timedelta = timedelta(milliseconds=250)
    grace: timedelta = timedelta(seconds=30)
    retention: timedelta = RETENTION
    identity_file: str | os.PathLike[str] | None = None
    promotions_lose_nothing: bool = False

    @classmethod
    def of(cls, given: GivenSettings) -> "Settings":
        """The given settings, with the defaults of the others. Raises `TypeError` for one that does not exist."""
        names = GivenSettings.__annotations__
        if unknown := sorted(given.keys() - names.keys()):
            raise TypeError(f"a dispatcher has no setting {unknown[0]!r}; its settings are {', '.join(names)}")
        return cls(**given)

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_in_flight", "callback_concurrency"):
            _require_whole(name, getattr(self, name))
        if not isinstance(self.promotions_lose_nothing, bool):  # the text "false" is true
            raise ConfigurationError(f"promotions_lose_nothing={self.promotions_lose_nothing!r}: must be True or False")
        self._check_spans()
        object.__setattr__(self, "limits", check_limits(self.limits))  # a copy, which the app cannot change

    def _check_spans(self) -> None:
        for name, span in (("lease", self.lease), ("margin", self.margin), ("poll", self.poll)):
            if not isinstance(span, timedelta) or span <= timedelta(0):  # a negative margin would lengthen each window
                raise ConfigurationError(f"{name} must be a positive timedelta, not {span!r}")
        timeout = self.callback_timeout
        if timeout is not None and not (isinstance(timeout, timedelta) and timedelta(0) < timeout <= self.usable):
            raise ConfigurationError(
                f"callback_timeout must be a positive timedelta of at most lease - margin ({self.usable}), not {timeout!r}:"
                " raise lease"
            )
        if not isinstance(self.grace, timedelta) or self.grace < timedelta(0):
            raise ConfigurationError(f"grace must be a timedelta of 0 s or more, not {self.grace!r}")

    @property
    def usable(self) -> timedelta:
        """The part of a lease by whose end its entry is settled or released."""
        return self.lease - self.margin

    @property
    def fencing_delay(self) -> timedelta:
        """How long after a lease's start a sender that lost it has noticed."""
        return self.lease + self.margin

    @property
    def callback_deadline(self) -> timedelta:
        """How long a callback may take."""
        return self.usable / 2 if self.callback_timeout is None else self.callback_timeout

    @property
    def concurrency_of(self) -> dict[str, int]:
        """The concurrency of the destinations that have one of their own."""
        return {name: given.concurrency for name, given in self.limits.items() if given.concurrency is not None}


def _require_whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name} must be an int of at least 1, not {value!r}")
