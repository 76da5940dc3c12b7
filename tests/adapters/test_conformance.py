"""The conformance suite itself: an honest adapter passes, and each faulty adapter fails the test that is meant for it."""

from typing import Any

import httpx
import pytest
from support.faulty_adapters import (
    TOKEN,
    AnsweringAnything,
    AnsweringTheImpossible,
    BackwardInTime,
    Blocking,
    BlockingAWhile,
    ClosingOnce,
    Crm,
    Deaf,
    DroppingAfterClose,
    Following,
    ForgettingAnException,
    HopingForTheBest,
    InventingKeys,
    KeepingAClient,
    KeepingObjects,
    KeepingTheToken,
    KeepingTuples,
    LeavingATask,
    Lingering,
    LoggingTheToken,
    MixingUp,
    Mute,
    NumberingAttempts,
    NumberingProcesses,
    Optimistic,
    Parsing,
    QuotingErrors,
    Raising,
    Retrying,
    ServingNothing,
    ShowingTheToken,
    Slow,
    TellingThePayload,
    TellingTheToken,
    scenario_of,
    suite_of,
)

from dispatchers import KeyConflict, Rejected
from dispatchers.testing.conformance import AdapterSuite
from outbox.errors import ConfigurationError

pytest_plugins = "pytester"


# --- each is caught, by the test that is meant for it


@pytest.mark.parametrize(
    ("adapter_class", "scenario", "text"),
    [
        (Retrying, "failed", "one attempt must send 1 requests, but 2 reached the remote service"),
        (Retrying, "reset without an answer", "but 2 reached"),
        (Following, "redirect 307", "Switch the client's retries and redirects off"),
        (Raising, "connection refused", "but it raised ConnectError"),
        (TellingTheToken, "created", "the reason shows secret 0"),
        (TellingThePayload, "created", "the reason shows private text 0"),
        (KeepingTheToken, "created", "the result shows secret 0"),
        (LoggingTheToken, "created", "its repr or the log shows secret 0"),
        (ShowingTheToken, "created", "its repr or the log shows secret 0"),
        (Deaf, "hangs before the first byte", "must return by its deadline"),
        (Deaf, "drips a head", "must return by its deadline"),
        (Blocking, "hangs before the first byte", "must return by its deadline"),
        (BlockingAWhile, "hangs before the first byte", "must return by its deadline"),
        (Lingering, "hangs before the first byte", "but 1 requests did"),
        (LeavingATask, "created", "no task may run after the attempt and aclose()"),
        (Optimistic, "reset without an answer", "expects Unknown, but the adapter returned Deferred"),
        (Parsing, "a body that is no JSON", "expects Delivered, but the adapter returned Unknown"),
        (Parsing, "a success cut short", "expects Delivered, but the adapter returned Unknown"),
        (AnsweringTheImpossible, "invalid", "`never` contains KeyConflict"),
        (AnsweringAnything, "created", "returned an object of type int"),
        (KeepingObjects, "created", "cannot be stored unchanged: the dispatcher would"),
        (KeepingTuples, "created", "equal after it was written and read as JSON"),
        (Mute, "created", "Rejected must have a reason"),
        (BackwardInTime, "created", "Deferred must not have a negative `after`, but it is -1 day"),
    ],
)
def test_a_defect_fails_in_its_scenario(adapter_class: type[Crm], scenario: str, text: str) -> None:
    suite = suite_of(adapter_class)

    with pytest.raises(AssertionError) as failure:
        suite.test_every_rule_holds(scenario_of(suite, scenario))

    assert text in str(failure.value)
    assert TOKEN not in str(failure.value)


@pytest.mark.parametrize(
    ("adapter_class", "test", "text"),
    [
        (Slow, "its_declaration_is_accepted", "do not fit into the lease"),
        (ServingNothing, "its_declaration_is_accepted", "must serve the suite's operation 'crm.contacts.upsert'"),
        (
            ForgettingAnException,
            "every_exception_of_the_client_is_an_outcome",
            "'InvalidURL': 'the adapter raised InvalidURL",
        ),
        (
            QuotingErrors,
            "every_exception_of_the_client_is_an_outcome",
            "'ReadError': 'the reason shows secret 0, which",
        ),
        (HopingForTheBest, "every_exception_of_the_client_is_an_outcome", "does not prove that the effect happened"),
        (NumberingAttempts, "each_attempt_sends_the_same_bytes", "sent other bytes than the first one"),
        (NumberingProcesses, "each_attempt_sends_the_same_bytes", "sent other bytes than the first one"),
        (InventingKeys, "it_sends_the_key_in_the_form_that_it_declares", "does not contain the key of its delivery"),
        (MixingUp, "sends_at_once_do_not_mix", "two sent the same bytes"),
        (KeepingAClient, "it_outlives_its_event_loop", "Event loop is closed"),
        (KeepingAClient, "an_answer_that_nobody_asked_for_is_not_the_next_one_s", "but the adapter returned Delivered"),
        (KeepingAClient, "closing_it_leaves_no_connection_open", "but 1 connections are open after it"),
        (ClosingOnce, "closing_it_twice_is_no_error", "closed already"),
        (DroppingAfterClose, "closing_it_twice_is_no_error", "sent 0 requests and returned Rejected"),
        (Parsing, "an_answer_without_end_does_not_fill_the_memory", "bytes for an answer of"),
    ],
)
@pytest.mark.loop("asyncio")  # on uvloop the client that was kept is replaced without an error
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the client that was kept beyond its event loop
def test_a_defect_fails_the_test_that_is_meant_for_it(adapter_class: type[Crm], test: str, text: str) -> None:
    suite = suite_of(adapter_class)

    with pytest.raises((AssertionError, ConfigurationError, RuntimeError)) as failure:
        getattr(suite, f"test_{test}")()

    assert text in str(failure.value)


def test_an_exception_that_the_client_never_raised_proves_nothing() -> None:
    suite = suite_of(Crm, raising=lambda self, error, monkeypatch: Crm("http://127.0.0.1:9"))

    with pytest.raises(AssertionError, match="`raising` returned an adapter whose client did not"):
        suite.test_every_exception_of_the_client_is_an_outcome()


def test_an_exception_of_a_constructor_of_its_own_needs_the_author() -> None:
    class Picky(httpx.HTTPError):
        def __init__(self, request: httpx.Request) -> None:
            super().__init__(request.url.host)

    Picky.__module__ = "picky"
    suite = suite_of(Crm, client_exceptions=(Picky,))

    with pytest.raises(TypeError, match="Picky cannot be created with texts as its arguments"):
        suite.test_every_exception_of_the_client_is_an_outcome()


# --- what the author leaves out


@pytest.mark.parametrize(
    ("never", "text"),
    [
        ({}, "no scenario expects KeyConflict: add one to `scenarios`, or give the reason in `never`"),
        ({KeyConflict: " "}, "no scenario expects KeyConflict"),
    ],
)
def test_an_outcome_needs_a_scenario_or_a_reason(never: Any, text: str) -> None:
    suite = suite_of(Crm, never=never)

    with pytest.raises(AssertionError, match=text):
        suite.test_each_outcome_has_a_scenario_or_a_reason(KeyConflict)


def test_an_outcome_does_not_have_both_a_scenario_and_a_reason() -> None:
    suite = suite_of(Crm, never={Rejected: "the CRM takes everything"})

    with pytest.raises(AssertionError, match="`never` contains Rejected, but the scenario 'invalid' expects it"):
        suite.test_each_outcome_has_a_scenario_or_a_reason(Rejected)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "class TestCrm(AdapterSuite): pass",
            "TestCrm must set operation, payload, scenarios, secrets, client_exceptions",
        ),
        (
            "class TestCrm(CrmSuite): scenarios = [Scenario('a', None, Unknown)]",
            "a scenario that expects Delivered and has no payload",
        ),
        (
            "class TestCrm(CrmSuite): scenarios = 2 * CrmSuite.scenarios",
            "several scenarios named 'created', 'failed', 'invalid'",
        ),
        ("class TestCrm(CrmSuite): private = ['bob@example.com']", "must be in the payload, but the texts at [0]"),
        ("class TestCrm(CrmSuite): secrets = 'sesame'", "`secrets` and `private` must be lists of texts"),
        ("class TestCrm(CrmSuite): secrets = ['sesame', '']", "must not contain an empty text"),
    ],
)
def test_what_is_left_out_is_said_when_the_tests_are_collected(pytester: pytest.Pytester, body: str, text: str) -> None:
    pytester.makepyfile(f"""
        from dispatchers import Unknown
        from dispatchers.testing.conformance import AdapterSuite, Scenario
        from support.faulty_adapters import CrmSuite

        {body}
    """)

    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")

    result.assert_outcomes(errors=1)
    assert text in result.stdout.str()


@pytest.mark.parametrize(
    "hook", ["adapter(self, remote, timeout)", "remote(self)", "raising(self, error, monkeypatch)"]
)
def test_a_hook_that_is_missing_is_named(hook: str) -> None:
    name = hook.partition("(")[0]
    suite = type("TestCrm", (AdapterSuite,), {})()

    with pytest.raises(NotImplementedError) as failure:
        getattr(suite, name)(*[None] * hook.count(","))

    assert str(failure.value) == f"TestCrm needs {hook}"


# --- an honest one passes


def test_an_honest_adapter_passes_and_the_report_has_what_it_never_answers(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        from support.faulty_adapters import CrmSuite

        class TestCrm(CrmSuite):
            pass
    """)

    result = pytester.runpytest_inprocess("-v", "-p", "no:cacheprovider")

    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed"}
    assert outcomes["passed"] > 40
    assert "[KeyConflict never: the CRM does not compare requests] PASSED" in result.stdout.str()
