"""The test suite that every adapter passes: inherit from `AdapterSuite` in a test module; pytest then runs its tests.

    class TestCrm(HttpSuite):                       # or AdapterSuite, with a remote service of your own
        operation = "crm.contacts.upsert"
        payload = {"email": "ada@example.com"}
        secrets = ["crm_token_1"]
        client_exceptions = (httpx.HTTPError,)
        scenarios = [Scenario("created", answer(201), Delivered), Scenario("refused", answer(422), Rejected), ...]
        never = {KeyConflict: "the CRM does not compare requests"}

        def adapter(self, remote, timeout): return CrmAdapter(remote.url, token="crm_token_1", timeout=timeout)
        def raising(self, error, monkeypatch): ...

The suite needs only pytest. `HttpSuite`, in `dispatchers.testing.conformance_http`, adds a faulty HTTP server and its
scenarios.
"""

import asyncio
import gc
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import UnionType
from typing import Any

import pytest

from dispatchers.delivery import Adapter, Deferred, Delivered, Delivery
from dispatchers.pipeline.routing import Routes
from dispatchers.sanitize import OUTCOMES
from dispatchers.testing.attempts import Observation, attempt, close, in_a_loop, sent
from dispatchers.testing.conformance_frame import BLOCKED, ENTRY, TAGS, UNHURRIED, Expected, Scenario, Suite
from dispatchers.testing.verdicts import descendants, flaw_of, leaks, made_of

__all__ = ["ENTRY", "TAGS", "AdapterSuite", "Scenario"]


class AdapterSuite(Suite):
    """What every adapter must do, as tests. The author of an adapter sets:

    operation, payload: a send that the service accepts.
    options: the options of the entry; by default {}.
    scenarios: what the service does, and the correct outcome. Each outcome needs at least one scenario. At least one
        `Delivered` scenario must use `payload`.
    never: outcomes that cannot occur, each with the reason. No scenario may cause them.
    secrets: values that the adapter got and must never show: API key, password, headers. () if there are none.
    private: texts of the payload that must not appear in a reason, a repr or the log. A result may contain them.
    client_exceptions: the base exceptions of the client's library. The suite raises each of their public subclasses in that
        library, and none may escape. () if the adapter has no client.
    remote_timeout: the timeout of a send to a service that hangs.
    lease, margin: the dispatcher's settings, if they are not the defaults.
    """

    required = (*Suite.required, "client_exceptions")
    client_exceptions: tuple[type[Exception], ...]
    private: Sequence[str] = ()
    lease: timedelta = timedelta(seconds=60)
    margin: timedelta = timedelta(seconds=5)

    # --- what the author gives, beside what every suite is given

    def raising(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Adapter:
        """Return a new adapter whose client raises `error` instead of sending anything."""
        raise NotImplementedError(f"{type(self).__name__} needs raising(self, error, monkeypatch)")

    def exception(self, cls: type[Exception], text: str) -> Exception:
        """Return an instance of `cls` whose text is `text`. Override it for constructors that need other arguments than texts."""
        return made_of(cls, text)

    def sent(self, request: Any) -> bytes:
        """Return what must be equal in a request at each attempt: everything, unless the protocol demands a timestamp."""
        return bytes(request)

    # --- the tests

    def test_its_declaration_is_accepted(self) -> None:
        with self._service() as remote:
            adapter = self.adapter(remote, UNHURRIED)

        routes = Routes({self.operation: adapter}, lease=self.lease, margin=self.margin)

        assert routes.find(self.operation) is not None, f"it does not serve {self.operation!r}"

    def test_each_outcome_has_a_scenario_or_a_reason(self, outcome_class: type[Any]) -> None:
        name = outcome_class.__name__
        scenario = next((scenario for scenario in self.scenarios if scenario.expects is outcome_class), None)
        reason = self.never.get(outcome_class, "").strip()

        assert scenario or reason, f"no scenario expects {name}: add one, or say in `never` why it cannot arise"
        assert not (scenario and reason), (
            f"`never` has {name}, and yet the scenario {scenario and scenario.name!r} expects it"
        )

    def test_it_answers_as_the_scenario_demands(self, scenario: Scenario) -> None:
        outcome = self._outcome(scenario)

        assert isinstance(outcome, scenario.expects), f"expected {_names(scenario.expects)}, not {outcome!r}"

    def test_it_never_answers_what_it_says_it_never_does(self, scenario: Scenario) -> None:
        outcome = self.observe(scenario).outcome

        assert type(outcome) not in self.never, f"`never` has {type(outcome).__name__}, and yet: {outcome!r}"

    def test_no_exception_escapes(self, scenario: Scenario) -> None:
        error = self.observe(scenario).raised

        assert error is None, f"it raised {type(error).__name__}; a service's failure is an outcome"

    def test_one_attempt_is_one_request(self, scenario: Scenario) -> None:
        requests = len(self.observe(scenario).requests)

        assert requests == scenario.requests, (
            f"{requests} requests reached the remote service in one attempt, not {scenario.requests}:"
            " are the client's retries and redirects off?"
        )

    def test_nothing_goes_on_after_the_outcome(self, scenario: Scenario) -> None:
        seen = self.observe(scenario)

        assert not seen.afterwards, f"{seen.afterwards} requests came after the outcome"
        assert not seen.left, f"tasks that outlive the attempt and aclose(): {', '.join(seen.left)}"

    def test_its_outcome_can_be_stored(self, scenario: Scenario) -> None:
        flaw = flaw_of(self._outcome(scenario))

        assert flaw is None, flaw

    def test_no_secret_is_shown(self, scenario: Scenario) -> None:
        seen = self.observe(scenario)

        found = list(self._leaks(seen.outcome, seen.shown))

        assert not found, "; ".join(found)

    def test_every_exception_of_the_client_is_an_outcome(self) -> None:
        classes = {cls for base in self.client_exceptions for cls in descendants(base)}
        by_name = sorted(classes, key=lambda cls: cls.__name__)
        flaws = {cls.__qualname__: flaw for cls in by_name if (flaw := self._flaw_after(cls))}

        assert not flaws, f"exceptions of the client without a proper outcome: {flaws}"

    def test_each_attempt_sends_the_same_bytes(self) -> None:
        with self._service() as remote:
            adapter, of_another_process = self.adapter(remote, UNHURRIED), self.adapter(remote, UNHURRIED)
            for sender, number in ((adapter, 1), (adapter, 2), (of_another_process, 3)):
                self._run(sender, self.delivery(sender, attempt=number))
            first, *others = [self.sent(request) for request in remote.requests]

        assert others == [first, first], (
            "an attempt sent other bytes than the first one, which the service takes for another request;"
            " override `sent` if the protocol demands a timestamp"
        )

    def test_it_sends_the_key_in_the_form_that_it_declares(self) -> None:
        with self._service() as remote:
            adapter = self.adapter(remote, UNHURRIED)
            deliveries = [self.delivery(adapter, tag=tag) for tag in TAGS[:2]]
            for delivery in deliveries:
                self._run(adapter, delivery)
            requests = [bytes(request) for request in remote.requests]

        # FOREVER may be a natural key, and None is no key at all.
        if isinstance(adapter.window, timedelta):
            carried = [[delivery.key.encode() in request for delivery in deliveries] for request in requests]
            assert carried == [[True, False], [False, True]], (
                f"it declares that the service remembers a key for {adapter.window}, but a request does not carry the"
                f" key of its delivery in the form {adapter.key_format}"
            )

    def test_sends_at_once_do_not_mix(self) -> None:
        with self._service() as remote:
            adapter = self.adapter(remote, UNHURRIED)
            outcomes = self._run(adapter, *(self.delivery(adapter, tag=tag) for tag in TAGS))
            requests = {self.sent(request) for request in remote.requests}
            arrived = len(remote.requests)

        assert [type(outcome) for outcome in outcomes] == [Delivered] * len(TAGS), f"of sends at once: {outcomes}"
        assert arrived == len(TAGS), f"{arrived} requests for {len(TAGS)} sends at once"
        if isinstance(adapter.window, timedelta):
            assert len(requests) == len(TAGS), "of sends at once, two sent the same"

    @pytest.mark.filterwarnings("ignore::ResourceWarning")  # the first loop's connections may be dropped
    def test_it_outlives_its_event_loop(self) -> None:
        """As `asyncio.run(dispatcher.run_once())` makes it, twice."""
        with self._service() as remote:
            adapter = self.adapter(remote, UNHURRIED)
            outcomes = [
                *self._run(adapter, self.delivery(adapter, tag=TAGS[0]), close_it=False),
                *self._run(adapter, self.delivery(adapter, tag=TAGS[1])),
            ]
        gc.collect()  # while the filter holds

        assert [type(outcome) for outcome in outcomes] == [Delivered] * 2, f"in two event loops: {outcomes}"

    def test_closing_it_twice_is_no_error(self) -> None:
        """And what is sent afterwards is delivered, or refused before anything leaves."""
        with self._service() as remote:
            adapter = self.adapter(remote, UNHURRIED)
            outcomes, arrived = in_a_loop(lambda: self._closed_and_sent_again(adapter, remote), UNHURRIED)

        assert isinstance(outcomes[0], Delivered), f"before aclose(): {outcomes[0]!r}"
        refused = isinstance(outcomes[1], Deferred | Exception) and arrived == 1
        assert isinstance(outcomes[1], Delivered) or refused, f"after aclose(): {arrived - 1} requests, {outcomes[1]!r}"

    # --- what was seen

    def _attempt(self, scenario: Scenario) -> Observation:
        timeout, healthy = (self.remote_timeout, self._delivering.behaviour) if scenario.hangs else (UNHURRIED, None)
        return self._observe(scenario, timeout, healthy=healthy)

    def _outcome(self, scenario: Scenario) -> Any:
        seen = self.observe(scenario)
        if seen.raised is not None or seen.late:
            pytest.fail(f"no outcome: {'it was late' if seen.late else f'it raised {seen.raised!r}'}", pytrace=False)
        return seen.outcome

    @property
    def _delivering(self) -> Scenario:
        return next(
            scenario for scenario in self.scenarios if scenario.expects is Delivered and scenario.payload is None
        )

    @contextmanager
    def _service(self) -> Iterator[Any]:
        with self.remote() as remote:
            remote.behave(self._delivering.behaviour)
            yield remote

    def _run(self, adapter: Adapter, *deliveries: Delivery, close_it: bool = True) -> list[Any]:
        async def main() -> list[Any]:
            try:
                return await asyncio.gather(*(sent(adapter, each) for each in deliveries))
            finally:
                if close_it:
                    await close(adapter)

        return in_a_loop(main, UNHURRIED)

    async def _closed_and_sent_again(self, adapter: Adapter, remote: Any) -> tuple[list[Any], int]:
        """The outcome before aclose() and what came after it, an exception perhaps; how many requests arrived in all."""
        outcomes = [await sent(adapter, self.delivery(adapter))]
        await close(adapter)
        await close(adapter)
        again = self.delivery(adapter, tag=TAGS[1])
        outcomes += await asyncio.gather(sent(adapter, again), return_exceptions=True)
        arrived = len(remote.requests)
        await close(adapter)
        return outcomes, arrived

    # --- exceptions and secrets

    def _flaw_after(self, cls: type[Exception]) -> str | None:
        """What is wrong when the client raises a `cls` whose text shows all that must not be shown."""
        error = self.exception(cls, " ".join(["raised by the conformance suite", *self.secrets, *self.private]))
        with pytest.MonkeyPatch.context() as monkeypatch:
            adapter = self.raising(error, monkeypatch)
            seen = in_a_loop(lambda: attempt(adapter, self.delivery(adapter), _Nowhere()), adapter.timeout + BLOCKED)
        if error.__traceback__ is None:
            return "`raising` gave an adapter whose client did not raise it"
        if seen.raised is not None:
            return f"escaped as {type(seen.raised).__name__}"
        if isinstance(seen.outcome, Delivered):
            return f"answered {seen.outcome!r}, although nothing says that it happened"
        return flaw_of(seen.outcome) or "; ".join(self._leaks(seen.outcome, seen.shown)) or None

    def _leaks(self, outcome: Any, shown: str) -> Iterator[str]:
        texts = {"the reason": getattr(outcome, "reason", ""), "its repr or the log": shown}
        yield from leaks("secret", self.secrets, texts | {"the result": getattr(outcome, "result", None)})
        yield from leaks("private text", self.private, texts)

    # --- how pytest finds the scenarios

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        if "outcome_class" in metafunc.fixturenames:
            metafunc.parametrize("outcome_class", OUTCOMES, ids=self._name_of)

    def _name_of(self, outcome_class: type[Any]) -> str:
        """With the reason, so that a report shows what the adapter says it never answers."""
        reason = self.never.get(outcome_class)
        return f"{outcome_class.__name__} never: {reason}" if reason else outcome_class.__name__

    def _require_all(self) -> None:
        super()._require_all()
        name = type(self).__name__
        names = [scenario.name for scenario in (*self.scenarios, *self.fault_scenarios())]
        if twice := sorted({each for each in names if names.count(each) > 1}):
            pytest.fail(f"{name} has several scenarios named {', '.join(map(repr, twice))}", pytrace=False)
        if not any(scenario.expects is Delivered and scenario.payload is None for scenario in self.scenarios):
            pytest.fail(f"{name} needs a scenario that expects Delivered for its payload", pytrace=False)
        if isinstance(self.secrets, str) or isinstance(self.private, str):
            pytest.fail(f"{name}: secrets and private are lists of texts, not one text", pytrace=False)
        if "" in (*self.secrets, *self.private):
            pytest.fail(f"{name}: an empty text is in everything, and cannot be kept secret", pytrace=False)
        text = json.dumps(self.payload, ensure_ascii=False)
        if absent := [number for number, each in enumerate(self.private) if each not in text]:
            pytest.fail(f"{name}: private{absent} is not in the payload, and would guard nothing", pytrace=False)


class _Nowhere:
    """The remote service of a client that exchanges nothing."""

    requests: Sequence[bytes] = ()

    def behave(self, behaviour: Any) -> None:
        """No server listens."""


def _names(expected: Expected) -> str:
    classes: Iterable[Any] = expected.__args__ if isinstance(expected, UnionType) else (expected,)
    return " or ".join(cls.__name__ for cls in classes)
