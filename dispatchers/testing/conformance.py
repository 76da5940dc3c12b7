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

The suite needs only pytest. `HttpSuite` adds a faulty HTTP server and its
scenarios.
"""

import asyncio
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from dispatchers.delivery import Adapter, Deferred, Delivered, Delivery
from dispatchers.pipeline.routing import Routes, batch_sender_of
from dispatchers.sanitize import OUTCOMES
from dispatchers.testing.attempts import Observation, attempt, close, due_in_time, in_a_loop, sent
from dispatchers.testing.conformance_frame import BLOCKED, ENTRY, TAGS, UNHURRIED, Rule, Scenario, Suite
from dispatchers.testing.verdicts import descendants, flaw_of, leaks, made_of, names

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

    # --- methods that the author overrides

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

        assert routes.find(self.operation) is not None, (
            f"the adapter must serve the suite's operation {self.operation!r}, but its `serves` returns False"
        )

    def test_each_outcome_has_a_scenario_or_a_reason(self, outcome_class: type[Any]) -> None:
        name = outcome_class.__name__
        scenario = next((scenario for scenario in self.scenarios if scenario.expects is outcome_class), None)
        reason = self.never.get(outcome_class, "").strip()

        assert scenario or reason, (
            f"no scenario expects {name}: add one to `scenarios`, or give the reason in `never` why it cannot occur"
        )
        assert not (scenario and reason), (
            f"`never` contains {name}, but the scenario {scenario and scenario.name!r} expects it: remove one of the two"
        )

    def test_every_exception_of_the_client_is_an_outcome(self) -> None:
        classes = {cls for base in self.client_exceptions for cls in descendants(base)}
        by_name = sorted(classes, key=lambda cls: cls.__name__)
        flaws = {cls.__qualname__: flaw for cls in by_name if (flaw := self._flaw_after(cls))}

        assert not flaws, (
            f"the adapter must return a correct outcome for each exception of its client, but it does not for these: {flaws}"
        )

    def test_each_attempt_sends_the_same_bytes(self) -> None:
        with self._service() as remote:
            adapter, of_another_process = self.adapter(remote, UNHURRIED), self.adapter(remote, UNHURRIED)
            for sender, number in ((adapter, 1), (adapter, 2), (of_another_process, 3)):
                self._run(sender, self.delivery(sender, attempt=number))
            first, *others = [self.sent(request) for request in remote.requests]

        assert others == [first, first], (
            "every attempt must send the same bytes, but one sent other bytes than the first one. The service would treat it as"
            " another request. If the protocol needs a timestamp, override `sent` to remove it"
        )

    def test_it_sends_the_key_in_the_form_that_it_declares(self) -> None:
        with self._service() as remote:
            adapter = self.adapter(remote, UNHURRIED)
            deliveries = [self.delivery(adapter, tag=tag) for tag in TAGS[:2]]
            for delivery in deliveries:
                self._run(adapter, delivery)
            requests = [bytes(request) for request in remote.requests]

        # FOREVER may mean a natural key instead of this one, and None means that there is no key.
        if isinstance(adapter.window, timedelta):
            carried = [[delivery.key.encode() in request for delivery in deliveries] for request in requests]
            assert carried == [[True, False], [False, True]], (
                f"the adapter declares that the service remembers a key for {adapter.window}, but a request does not contain"
                f" the key of its delivery in the format {adapter.key_format}"
            )

    def test_sends_at_once_do_not_mix(self) -> None:
        with self._service() as remote:
            adapter = self.adapter(remote, UNHURRIED)
            outcomes = self._run(adapter, *(self.delivery(adapter, tag=tag) for tag in TAGS))
            requests = {self.sent(request) for request in remote.requests}
            arrived = len(remote.requests)

        assert [type(outcome) for outcome in outcomes] == [Delivered] * len(TAGS), (
            f"all concurrent sends must be Delivered, but the outcomes are {outcomes}"
        )
        assert arrived == len(TAGS), (
            f"{len(TAGS)} concurrent sends must send one request each, but {arrived} requests arrived"
        )
        if isinstance(adapter.window, timedelta):
            assert len(requests) == len(TAGS), (
                "concurrent sends with different keys must differ, but two sent the same bytes"
            )

    def test_each_delivery_of_a_batch_has_an_outcome_of_its_own(self) -> None:
        with self._service() as remote:
            adapter = self.adapter(remote, UNHURRIED)
            send_batch = batch_sender_of(adapter)
            if send_batch is None:
                return
            outcomes: list[tuple[int, Any]] = []

            async def main() -> None:
                deliveries = [due_in_time(adapter, self.delivery(adapter, tag=tag)) for tag in TAGS]
                try:
                    await send_batch(deliveries, lambda number, outcome: outcomes.append((number, outcome)))
                finally:
                    await close(adapter)

            in_a_loop(main, UNHURRIED)

        assert sorted((number, type(outcome)) for number, outcome in outcomes) == [
            (number, Delivered) for number in range(len(TAGS))
        ], f"each delivery of a batch must be Delivered once, but the outcomes are {outcomes}"

    @pytest.mark.filterwarnings("ignore::ResourceWarning")  # the first loop's connections may be dropped
    def test_it_outlives_its_event_loop(self) -> None:
        """`asyncio.run(dispatcher.run_once())` creates a new event loop each time."""
        with self._service() as remote:
            adapter = self.adapter(remote, UNHURRIED)
            outcomes = [
                *self._run(adapter, self.delivery(adapter, tag=TAGS[0]), close_it=False),
                *self._run(adapter, self.delivery(adapter, tag=TAGS[1])),
            ]
        gc.collect()  # inside the filter for warnings

        assert [type(outcome) for outcome in outcomes] == [Delivered] * 2, (
            f"a send in each of two event loops must be Delivered, but the outcomes are {outcomes}"
        )

    def test_closing_it_twice_is_no_error(self) -> None:
        """A later send is delivered, or refused before a request is sent."""
        with self._service() as remote:
            adapter = self.adapter(remote, UNHURRIED)
            outcomes, arrived = in_a_loop(lambda: self._closed_and_sent_again(adapter, remote), UNHURRIED)

        assert isinstance(outcomes[0], Delivered), (
            f"the send before aclose() must be Delivered, but it was {outcomes[0]!r}"
        )
        refused = isinstance(outcomes[1], Deferred | Exception) and arrived == 1
        assert isinstance(outcomes[1], Delivered) or refused, (
            "a send after aclose() must be Delivered, or else Deferred without a request, but the adapter sent"
            f" {arrived - 1} requests and returned {outcomes[1]!r}"
        )

    # --- the rules for each scenario

    def rules(self) -> Sequence[Rule]:
        return (
            *super().rules(),
            self._no_exception_escapes,
            self._it_answers_as_the_scenario_demands,
            self._it_never_answers_what_it_says_it_never_does,
            self._one_attempt_is_one_request,
            self._no_request_follows_the_outcome,
            self._its_outcome_can_be_stored,
            self._no_secret_is_shown,
        )

    def _no_exception_escapes(self, scenario: Scenario, seen: Observation) -> str | None:
        if seen.raised is None:
            return None
        return f"the adapter must return an outcome for every failure of the service, but it raised {type(seen.raised).__name__}"

    def _it_answers_as_the_scenario_demands(self, scenario: Scenario, seen: Observation) -> str | None:
        if not _has_outcome(seen) or isinstance(seen.outcome, scenario.expects):
            return None
        return f"the scenario expects {names(scenario.expects)}, but the adapter returned {seen.outcome!r}"

    def _it_never_answers_what_it_says_it_never_does(self, scenario: Scenario, seen: Observation) -> str | None:
        if type(seen.outcome) not in self.never:
            return None
        return f"`never` contains {type(seen.outcome).__name__}, but the adapter returned {seen.outcome!r}"

    def _one_attempt_is_one_request(self, scenario: Scenario, seen: Observation) -> str | None:
        if len(seen.requests) == scenario.requests:
            return None
        return (
            f"one attempt must send {scenario.requests} requests, but {len(seen.requests)} reached the remote service."
            " Switch the client's retries and redirects off"
        )

    def _no_request_follows_the_outcome(self, scenario: Scenario, seen: Observation) -> str | None:
        return f"no request may follow the outcome, but {seen.afterwards} requests did" if seen.afterwards else None

    def _its_outcome_can_be_stored(self, scenario: Scenario, seen: Observation) -> str | None:
        return flaw_of(seen.outcome) if _has_outcome(seen) else None

    def _no_secret_is_shown(self, scenario: Scenario, seen: Observation) -> str | None:
        found = "; ".join(self._leaks(seen.outcome, seen.shown))
        return f"{found} (the numbers are indexes in `secrets` and `private`)" if found else None

    # --- the attempts

    def _attempt(self, scenario: Scenario) -> Observation:
        timeout, healthy = (self.remote_timeout, self._delivering.behaviour) if scenario.hangs else (UNHURRIED, None)
        return self._observe(scenario, timeout, healthy=healthy)

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
        """The outcome before aclose(); the outcome or exception after it; and the number of requests in all."""
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
        """The mistake of the adapter if its client raises a `cls` whose text contains all secrets; None if there is none."""
        error = self.exception(cls, " ".join(["raised by the conformance suite", *self.secrets, *self.private]))
        with pytest.MonkeyPatch.context() as monkeypatch:
            adapter = self.raising(error, monkeypatch)
            seen = in_a_loop(lambda: attempt(adapter, self.delivery(adapter), _Nowhere()), adapter.timeout + BLOCKED)
        if error.__traceback__ is None:
            return "`raising` returned an adapter whose client did not raise the exception"
        if seen.raised is not None:
            return f"the adapter raised {type(seen.raised).__name__} instead of returning an outcome"
        if isinstance(seen.outcome, Delivered):
            return f"the adapter returned {seen.outcome!r}, but an exception does not prove that the effect happened"
        return flaw_of(seen.outcome) or "; ".join(self._leaks(seen.outcome, seen.shown)) or None

    def _leaks(self, outcome: Any, shown: str) -> Iterator[str]:
        texts = {"the reason": getattr(outcome, "reason", ""), "its repr or the log": shown}
        yield from leaks("secret", self.secrets, texts | {"the result": getattr(outcome, "result", None)})
        yield from leaks("private text", self.private, texts)

    # --- the parameters of the tests

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        if "outcome_class" in metafunc.fixturenames:
            metafunc.parametrize("outcome_class", OUTCOMES, ids=self._name_of)

    def _name_of(self, outcome_class: type[Any]) -> str:
        """The id of a test, with the reason in `never`, so that a report shows which outcomes the adapter never returns."""
        reason = self.never.get(outcome_class)
        return f"{outcome_class.__name__} never: {reason}" if reason else outcome_class.__name__

    def _require_all(self) -> None:
        super()._require_all()
        name = type(self).__name__
        names = [scenario.name for scenario in (*self.scenarios, *self.fault_scenarios())]
        if twice := sorted({each for each in names if names.count(each) > 1}):
            pytest.fail(
                f"{name} has several scenarios named {', '.join(map(repr, twice))}: give each its own name",
                pytrace=False,
            )
        if not any(scenario.expects is Delivered and scenario.payload is None for scenario in self.scenarios):
            pytest.fail(
                f"{name} needs a scenario that expects Delivered and has no payload of its own: add one to `scenarios`",
                pytrace=False,
            )
        if isinstance(self.secrets, str) or isinstance(self.private, str):
            pytest.fail(
                f"{name}: `secrets` and `private` must be lists of texts, but one of them is a text", pytrace=False
            )
        if "" in (*self.secrets, *self.private):
            pytest.fail(
                f"{name}: `secrets` and `private` must not contain an empty text: every text contains it", pytrace=False
            )
        text = json.dumps(self.payload, ensure_ascii=False)
        if absent := [number for number, each in enumerate(self.private) if each not in text]:
            pytest.fail(
                f"{name}: each text of `private` must be in the payload, but the texts at {absent} are not",
                pytrace=False,
            )


def _has_outcome(seen: Observation) -> bool:
    return seen.raised is None and not seen.late


class _Nowhere:
    """The remote service of a client that sends nothing."""

    requests: Sequence[bytes] = ()

    def behave(self, behaviour: Any) -> None:
        """No server listens."""
