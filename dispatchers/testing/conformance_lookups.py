"""The suite for an adapter's `find`: inherit from `LookupSuite` in a test module, in addition to the one for its `send`.

    class TestCrmLookups(HttpLookupSuite):         # or LookupSuite, with a remote service of your own
        operation = "crm.contacts.upsert"
        payload = {"email": "ada@example.com"}
        secrets = ["crm_token_1"]
        scenarios = [
            Scenario("there", answer(json={"made_by": str(ENTRY)}), Found),
            Scenario("not there", answer(json={}), Absent),
            Scenario("failed", answer(500), CannotTell),
        ]

        def adapter(self, remote, timeout): return CrmAdapter(remote.url, token="crm_token_1", timeout=timeout)

After a wrong `Absent` the effect happens twice. A service that is not reached, or answers in an unknown form, proves nothing.
Needs pytest.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from dispatchers.delivery import Absent, Adapter, CannotTell, Delivery, Found, Unknown
from dispatchers.pipeline.routing import finder_of
from dispatchers.sanitize import storable_finding
from dispatchers.testing.attempts import Observation, look_up
from dispatchers.testing.conformance_frame import TAGS, UNHURRIED, Rule, Scenario, Suite
from dispatchers.testing.verdicts import leaks, names
from outbox.keys import Tag

FINDINGS = (Found, Absent, CannotTell)


class LookupSuite(Suite):
    """What every `find` must do, as tests. The author of an adapter sets:

    operation, payload, options: those of the entry to look up. Its id is `conformance.ENTRY`.
    scenarios: what the service shows, and the correct finding. At least one `Found`, one `CannotTell` and one `Absent`,
        unless `never` says why absence cannot be proved. A scenario's `requests` are not counted, because a lookup may send
        several.
    secrets: values that the adapter got and must never show. () if there are none.
    age: how long ago the entry was enqueued.
    remote_timeout: the timeout of a lookup at a service that hangs.

    An exception of `find` counts as `CannotTell`, as in the dispatcher.
    """

    age: timedelta = timedelta(hours=1)

    # --- the tests

    def test_each_finding_has_a_scenario_or_a_reason(self, finding_class: type[Any]) -> None:
        name, reason = finding_class.__name__, self.never.get(finding_class, "").strip()

        assert reason or any(scenario.expects is finding_class for scenario in self.scenarios), (
            f"no scenario expects {name}: add one to `scenarios`, or give the reason in `never` why it cannot occur"
        )

    # --- the rules for each scenario

    def rules(self) -> Sequence[Rule]:
        return (
            *super().rules(),
            self._it_finds_what_the_scenario_shows,
            self._its_finding_can_be_stored,
            self._no_secret_is_shown,
        )

    def _it_finds_what_the_scenario_shows(self, scenario: Scenario, seen: Observation) -> str | None:
        finding = _finding_of(seen)
        if not isinstance(finding, FINDINGS):
            return f"`find` must return Found, Absent or CannotTell, but it returned an object of type {type(finding).__name__}"
        if isinstance(finding, scenario.expects):
            return None
        addition = (
            ". This scenario does not prove absence, so the effect would happen twice" if finding == Absent() else ""
        )
        return f"the scenario expects {names(scenario.expects)}, but `find` returned {finding!r}{addition}"

    def _its_finding_can_be_stored(self, scenario: Scenario, seen: Observation) -> str | None:
        finding = _finding_of(seen)
        if not isinstance(finding, FINDINGS):
            return None
        if (kept := storable_finding(finding)) != finding:
            return f"{finding!r} cannot be stored unchanged: the dispatcher would store {kept!r}"
        result = getattr(finding, "result", None)
        if json.loads(json.dumps(result)) == result:
            return None
        return f"the result must be equal after it was written and read as JSON, but {result!r} is not"

    def _no_secret_is_shown(self, scenario: Scenario, seen: Observation) -> str | None:
        finding = _finding_of(seen)
        texts = {"the reason": getattr(finding, "reason", ""), "its repr or the log": seen.shown}
        found = "; ".join(leaks("secret", self.secrets, texts | {"the result": getattr(finding, "result", None)}))
        return f"{found} (the numbers are indexes in `secrets`)" if found else None

    # --- the attempts

    def _attempt(self, scenario: Scenario) -> Observation:
        return self._observe(scenario, self.remote_timeout if scenario.hangs else UNHURRIED, ask=look_up)

    def delivery(self, adapter: Adapter, *, payload: Any = None, tag: Tag = TAGS[0], attempt: int = 1) -> Delivery:
        assert finder_of(adapter) is not None, f"{type(adapter).__name__} must have a method `find`, but it has none"
        return super().delivery(adapter, payload=payload, tag=tag, attempt=attempt)._replace(age=self.age)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        if "finding_class" in metafunc.fixturenames:
            metafunc.parametrize("finding_class", FINDINGS, ids=lambda each: each.__name__)


def _finding_of(seen: Observation) -> Any:
    """The finding that the dispatcher would use."""
    if seen.raised is not None:
        return CannotTell(f"the adapter raised {type(seen.raised).__name__}")
    if seen.late or isinstance(seen.outcome, Unknown):
        return CannotTell("no answer within its timeout")
    return seen.outcome
