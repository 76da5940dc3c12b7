"""The suite for an adapter's `find`: inherit from `LookupSuite` in a test module, beside the one for its `send`.

    class TestCrmLooks(HttpLookSuite):              # or LookSuite, with a remote service of your own
        operation = "crm.contacts.upsert"
        payload = {"email": "ada@example.com"}
        secrets = ["crm_token_1"]
        scenarios = [
            Scenario("there", answer(json={"made_by": str(ENTRY)}), Found),
            Scenario("not there", answer(json={}), Absent),
            Scenario("failed", answer(500), CannotTell),
        ]

        def adapter(self, remote, timeout): return CrmAdapter(remote.url, token="crm_token_1", timeout=timeout)

A wrong `Absent` is an effect that happens twice: who is not reached, or answers oddly, proves nothing. Needs pytest.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar

import pytest

from dispatchers.delivery import Absent, Adapter, CannotTell, Delivery, Finding, Found, Unknown
from dispatchers.pipeline.routing import finder_of
from dispatchers.sanitize import storable_finding
from dispatchers.testing.attempts import NeverBack, Observation, attempt, in_a_loop, look_up
from dispatchers.testing.conformance import BLOCKED, ENTRY, TAGS, UNHURRIED, Scenario
from dispatchers.testing.verdicts import leaks

FINDINGS = (Found, Absent, CannotTell)


class LookupSuite:
    """What every `find` must do, as tests. The author of one gives:

    operation, payload, options: of an entry to look up, whose id is `conformance.ENTRY`.
    scenarios: what the service shows, and the finding of each; one `Found` and one `CannotTell` among them, and one `Absent`
        unless `never` says why it cannot be proved. A scenario's `requests` are not counted: a lookup may take several.
    secrets: what the adapter was given that must never be shown. () if nothing.
    age: how long ago the entry was enqueued. remote_timeout: the timeout of a lookup at a service that hangs.

    What `find` raises counts as `CannotTell`, as for the dispatcher.
    """

    operation: str
    payload: Any
    scenarios: Sequence[Scenario]
    secrets: Sequence[str]
    options: Mapping[str, Any] = {}
    never: Mapping[type[Any], str] = {}
    age: timedelta = timedelta(hours=1)
    remote_timeout: timedelta = timedelta(seconds=1)

    _observed: ClassVar[dict[str, Observation]]

    def __init_subclass__(cls) -> None:
        cls._observed = {}

    # --- what the author gives

    def adapter(self, remote: Any, timeout: timedelta) -> Adapter:
        """A new adapter for `remote`. timeout: its own; it also limits services that hang."""
        raise NotImplementedError(f"{type(self).__name__} needs adapter(self, remote, timeout)")

    def remote(self) -> AbstractContextManager[Any]:
        """The object that replaces the service; a new one for each scenario."""
        raise NotImplementedError(f"{type(self).__name__} needs remote(self)")

    def fault_scenarios(self) -> Sequence[Scenario]:
        """What the suite adds to the author's scenarios."""
        return ()

    # --- the tests

    def test_each_finding_has_a_scenario_or_a_reason(self, finding_class: type[Any]) -> None:
        name, reason = finding_class.__name__, self.never.get(finding_class, "").strip()

        assert reason or any(scenario.expects is finding_class for scenario in self.scenarios), (
            f"no scenario expects {name}: add one, or say in `never` why it cannot arise"
        )

    def test_it_finds_what_the_scenario_shows(self, scenario: Scenario) -> None:
        finding = self._finding(scenario)

        addition = "; absence was not proved there, and the effect would happen twice" if finding == Absent() else ""
        assert isinstance(finding, scenario.expects), f"expected {scenario.expects}, not {finding!r}{addition}"

    def test_it_is_back_by_its_deadline(self, scenario: Scenario) -> None:
        assert not self.observe(scenario).late, "it was not back by its deadline, although it was cancelled"

    def test_nothing_goes_on_after_the_look(self, scenario: Scenario) -> None:
        seen = self.observe(scenario)

        assert not seen.left, f"tasks that outlive the look and aclose(): {', '.join(seen.left)}"

    def test_its_finding_can_be_stored(self, scenario: Scenario) -> None:
        finding = self._finding(scenario)

        assert storable_finding(finding) == finding, f"{finding!r} cannot be stored"
        result = getattr(finding, "result", None)
        assert json.loads(json.dumps(result)) == result, f"its result reads otherwise than it was written: {result!r}"

    def test_no_secret_is_shown(self, scenario: Scenario) -> None:
        seen, finding = self.observe(scenario), self._finding(scenario)
        addition = {"the reason": getattr(finding, "reason", ""), "its repr or the log": seen.shown}

        found = list(leaks("secret", self.secrets, addition | {"the result": getattr(finding, "result", None)}))

        assert not found, "; ".join(found)

    # --- what was seen

    def observe(self, scenario: Scenario) -> Observation:
        """One lookup in that scenario: made once, and judged by several tests."""
        if scenario.name not in self._observed:
            self._observed[scenario.name] = self._look(scenario)
        return self._observed[scenario.name]

    def _look(self, scenario: Scenario) -> Observation:
        with self.remote() as remote:
            adapter = self.adapter(remote, self.remote_timeout if scenario.hangs else UNHURRIED)
            assert finder_of(adapter) is not None, f"{type(adapter).__name__} has no find"
            delivery = self._delivery(adapter, scenario)
            remote.behave(scenario.behaviour)
            try:
                return in_a_loop(lambda: attempt(adapter, delivery, remote, ask=look_up), adapter.timeout + BLOCKED)
            except NeverBack:
                return Observation(outcome=None, raised=None, late=True, requests=remote.requests)

    def _delivery(self, adapter: Adapter, scenario: Scenario) -> Delivery:
        return Delivery(
            id=ENTRY,
            operation=self.operation,
            body=json.dumps(self.payload if scenario.payload is None else scenario.payload).encode(),
            key=adapter.key_format.encode(TAGS[0]),
            attempt=1,
            options=self.options,
            headers={},
            deadline=0.0,
            age=self.age,
        )

    def _finding(self, scenario: Scenario) -> Finding:
        """As the dispatcher takes it."""
        seen = self.observe(scenario)
        if seen.raised is not None:
            return CannotTell(f"the adapter raised {type(seen.raised).__name__}")
        if seen.late or isinstance(seen.outcome, Unknown):
            return CannotTell("no answer within its timeout")
        if not isinstance(seen.outcome, FINDINGS):
            pytest.fail(f"an answer of type {type(seen.outcome).__name__} is no finding", pytrace=False)
        return seen.outcome

    # --- how pytest finds the scenarios

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if missing := [each for each in ("operation", "payload", "scenarios", "secrets") if not hasattr(self, each)]:
            pytest.fail(f"{type(self).__name__} needs {', '.join(missing)}: see LookSuite", pytrace=False)
        if "scenario" in metafunc.fixturenames:
            metafunc.parametrize("scenario", list(self._scenarios()), ids=lambda scenario: scenario.name)
        if "finding_class" in metafunc.fixturenames:
            metafunc.parametrize("finding_class", FINDINGS, ids=lambda each: each.__name__)

    def _scenarios(self) -> Iterator[Scenario]:
        yield from self.scenarios
        yield from self.fault_scenarios()
