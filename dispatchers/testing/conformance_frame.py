"""The base of the suites for `send` and for `find`: the author's settings, and one attempt in each scenario."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from types import UnionType
from typing import Any, ClassVar, TypeAlias
from uuid import UUID

import pytest

from dispatchers.delivery import Adapter, Delivery
from dispatchers.pipeline.workers import ABANDON_SECONDS
from dispatchers.testing.attempts import NeverBack, Observation, attempt, in_a_loop, sent
from outbox.keys import Tag

Expected: TypeAlias = type[Any] | UnionType
"""An outcome's class, or several: `Delivered | Unknown`."""

ENTRY = UUID("019a0000-0000-8000-8000-000000000001")
TAGS = [Tag(bytes([number]) * 32) for number in range(1, 11)]  # ten, so that sends overlap in a pool
UNHURRIED = timedelta(seconds=15)  # for a remote service that answers at once, on a busy machine
BLOCKED = timedelta(seconds=3)  # if an attempt ends later than this after its deadline, the event loop was blocked


@dataclass(frozen=True, slots=True)
class Scenario:
    """One behaviour of a remote service, and the outcome that is correct for it.

    behaviour: the argument for the remote service's `behave`.
    expects: the class of the outcome; a union if either is correct.
    payload: another payload than the suite's, if the scenario needs one.
    requests: how many requests reach the remote service in one attempt; 0 if none may.
    hangs: whether the remote service never ends its answer, so that the deadline must end the attempt.
    """

    name: str
    behaviour: Any
    expects: Expected
    _: KW_ONLY
    payload: Any = None
    requests: int = 1
    hangs: bool = False


Rule: TypeAlias = Callable[[Scenario, Observation], str | None]
"""Checks the attempt in a scenario. Returns what is wrong with it; None if nothing is."""


class Suite:
    """Makes one attempt in each scenario, and checks it by every rule."""

    required: ClassVar[tuple[str, ...]] = ("operation", "payload", "scenarios", "secrets")
    operation: str
    payload: Any
    scenarios: Sequence[Scenario]
    secrets: Sequence[str]
    options: Mapping[str, Any] = {}
    never: Mapping[type[Any], str] = {}
    remote_timeout: timedelta = timedelta(seconds=1)

    def adapter(self, remote: Any, timeout: timedelta) -> Adapter:
        """Return a new adapter for `remote`, with this timeout."""
        raise NotImplementedError(f"{type(self).__name__} needs adapter(self, remote, timeout)")

    def remote(self) -> AbstractContextManager[Any]:
        """Return the object that replaces the service; a new one for each scenario."""
        raise NotImplementedError(f"{type(self).__name__} needs remote(self)")

    def fault_scenarios(self) -> Sequence[Scenario]:
        """The scenarios that the suite adds to the author's."""
        return ()

    def rules(self) -> Sequence[Rule]:
        """What must hold for the attempt in each scenario."""
        return (self._it_is_back_by_its_deadline, self._no_task_is_left)

    def test_every_rule_holds(self, scenario: Scenario) -> None:
        seen = self._attempt(scenario)

        broken = [flaw for rule in self.rules() if (flaw := rule(scenario, seen))]
        assert not broken, self._without_secrets("\n".join([f"scenario {scenario.name!r}:", *broken]))

    def _without_secrets(self, report: str) -> str:
        """The report may end in the log of a CI that strangers read."""
        for number, secret in enumerate(self.secrets):
            report = report.replace(secret, f"<secret {number}>")
        return report

    def _it_is_back_by_its_deadline(self, scenario: Scenario, seen: Observation) -> str | None:
        if not seen.late:
            return None
        return (
            f"the adapter must return by its deadline, but it did not return within {ABANDON_SECONDS:g} s after its cancellation."
            " Does it block the event loop, or catch CancelledError?"
        )

    def _no_task_is_left(self, scenario: Scenario, seen: Observation) -> str | None:
        if not seen.left:
            return None
        return f"no task may run after the attempt and aclose(), but these do: {', '.join(seen.left)}"

    def _attempt(self, scenario: Scenario) -> Observation:
        raise NotImplementedError

    def _observe(
        self, scenario: Scenario, timeout: timedelta, *, healthy: Any = None, ask: Callable[..., Any] = sent
    ) -> Observation:
        with self.remote() as remote:
            adapter = self.adapter(remote, timeout)
            delivery = self.delivery(adapter, payload=scenario.payload)
            remote.behave(scenario.behaviour)
            try:
                return in_a_loop(lambda: attempt(adapter, delivery, remote, healthy, ask), adapter.timeout + BLOCKED)
            except NeverBack:
                return Observation(outcome=None, raised=None, late=True, requests=remote.requests)

    def delivery(self, adapter: Adapter, *, payload: Any = None, tag: Tag = TAGS[0], attempt: int = 1) -> Delivery:
        """A delivery like the dispatcher's, by default with the suite's payload. The send sets its deadline."""
        return Delivery(
            id=ENTRY,
            operation=self.operation,
            payload_json=json.dumps(self.payload if payload is None else payload).encode(),
            key=adapter.key_format.encode(tag),
            attempt=attempt,
            options=self.options,
            headers={},
            deadline=0.0,
        )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        self._require_all()
        if "scenario" in metafunc.fixturenames:
            scenarios = [*self.scenarios, *self.fault_scenarios()]
            metafunc.parametrize("scenario", scenarios, ids=[scenario.name for scenario in scenarios])

    def _require_all(self) -> None:
        """Fail the collection if the author has left out a setting."""
        if missing := [each for each in self.required if not hasattr(self, each)]:
            pytest.fail(
                f"{type(self).__name__} must set {', '.join(missing)}: see the docstring of its base class",
                pytrace=False,
            )
