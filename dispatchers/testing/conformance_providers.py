"""The test suite that every profile passes, with its generated fake: inherit from `ProviderSuite` in a test module.

    class TestCrm(ProviderSuite):
        profiles = (crm,)

It sends each operation, and tries each kind of key and window once, at its limits and in every fault.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Final, NamedTuple

import pytest

from dispatchers.adapters.http.meanings import Meaning
from dispatchers.adapters.providers.key_places import GraphQLArgument, NaturalKey, NoKey
from dispatchers.adapters.providers.operations import Operation
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal
from dispatchers.delivery import Deferred, Delivered, InProgress, KeyConflict, Outcome, Rejected, Unknown
from dispatchers.testing.attempts import close
from dispatchers.testing.lone_entry import LoneEntry
from dispatchers.testing.provider_core import Refusal, reply_of
from dispatchers.testing.provider_service import RunningProvider, service_of
from dispatchers.testing.service_faults import ServiceFault
from dispatchers.time_limits import FOREVER
from dispatchers.transitions import MarkUncertain, Settle, Transition
from outbox.keys import Tag

GIVEN_WINDOW: Final = timedelta(hours=24)  # where the service publishes none
INSTANT: Final = timedelta(seconds=1)
OUTCOMES: Final[Mapping[Meaning, type[Outcome]]] = {
    "delivered": Delivered,
    "rejected": Rejected,
    "conclusive": Rejected,
    "key_conflict": KeyConflict,
    "deferred": Deferred,
    "in_progress": InProgress,
    "unknown": Unknown,
    "final": Unknown,
}
TAGS: Final = [Tag(bytes([number]) * 32) for number in range(1, 21)]


class Offer(NamedTuple):
    """One operation of one profile."""

    profile: Profile
    name: str

    @property
    def operation(self) -> Operation:
        return self.profile.operations[self.name]

    @property
    def has_key(self) -> bool:
        return not isinstance(self.profile.place_of(self.operation), NoKey | NaturalKey)

    @property
    def is_keyless(self) -> bool:
        return isinstance(self.profile.place_of(self.operation), NoKey)

    @property
    def window(self) -> Any:
        return self.profile.window_of(self.operation) or (GIVEN_WINDOW if self.has_key else None)

    @property
    def is_known_only(self) -> bool:
        """Whether the service knows a repeated key, but does not report whether it succeeded."""
        return self.has_key and self.profile.duplicate is not None and self.profile.duplicate.after_errors

    @property
    def repeated(self) -> str:
        """The state of an entry whose request the service recognises as repeated."""
        return "uncertain" if self.is_known_only else "delivered"

    def __str__(self) -> str:
        return f"{self.profile.name}.{self.name}"


class Stated(NamedTuple):
    """An answer of the service, and what the profile says that it means."""

    offer: Offer
    signal: Signal
    meaning: Meaning

    def __str__(self) -> str:
        return f"{self.offer.profile.name}-{self.meaning}"


def stated_by(profile: Profile) -> list[Stated]:
    offer = Offer(profile, next(iter(profile.operations)))
    own: list[tuple[Signal | None, Meaning]] = [(profile.in_flight, "in_progress"), (profile.mismatch, "key_conflict")]
    return [Stated(offer, signal, meaning) for signal, meaning in [*own, *profile.errors] if signal is not None]


class Trial:
    """The service, and an entry that is sent to it."""

    def __init__(self, offer: Offer, service: RunningProvider) -> None:
        self.offer = offer
        self.service = service
        self.fake = service.fake
        self.adapters = {offer.profile.name: service.adapter(**_window(offer))}
        self.entry = self.another()

    def another(self, tag: Tag = TAGS[0], **members: Any) -> LoneEntry:
        """An entry of the operation. members: what its payload has more."""
        payload = sample_of(self.offer, **members)
        return LoneEntry(self.adapters, str(self.offer), payload, clock=self.fake.now, wait=self.fake.advance, tag=tag)

    @property
    def requests(self) -> list[bytes]:
        return [bytes(request) for request in self.service.remote.requests]


class ProviderSuite:
    """What every profile and its fake do. profiles: yours."""

    profiles: ClassVar[Sequence[Profile]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """`offer` is each operation; `kind` one operation of each kind: of each place of a key, and each window; `stated` each
        answer to which the profile gives a meaning.
        """
        offers = [Offer(profile, name) for profile in self.profiles for name in profile.operations]
        if "offer" in metafunc.fixturenames:
            metafunc.parametrize("offer", offers, ids=str)
        if "kind" in metafunc.fixturenames:
            kinds = {
                (each.profile.name, each.profile.place_of(each.operation), each.window): each for each in offers[::-1]
            }
            metafunc.parametrize("kind", list(kinds.values())[::-1], ids=str)
        if "stated" in metafunc.fixturenames:
            metafunc.parametrize("stated", [each for profile in self.profiles for each in stated_by(profile)], ids=str)

    # --- every operation

    def test_the_service_takes_the_request_and_its_key(self, offer: Offer) -> None:
        with trial(offer) as it:
            change = it.entry.run()

            (effect,) = it.fake.effects
            assert state_of(change) == "delivered", f"it must be delivered, not {change}"
            assert effect.operation == offer.name, f"it must arrive as {offer.name!r}, not {effect.operation!r}"
            assert effect.key == (it.entry.key if offer.has_key else None), f"the service got the key {effect.key!r}"

    def test_every_key_fits_the_service(self, kind: Offer) -> None:
        with trial(kind) as it:
            keys = {it.another(tag).key for tag in TAGS}
            for tag in TAGS:
                assert state_of(it.another(tag).run()) == "delivered", "the service must take every key"

            assert len(keys) == len(it.fake.effects) == len(TAGS) or not kind.has_key, "each key must be its own"

    # --- a lost answer

    @pytest.mark.parametrize("fault", [ServiceFault.LOSE_RESPONSE, ServiceFault.CUT_OFF], ids=str)
    def test_a_lost_answer_is_one_effect(self, kind: Offer, fault: ServiceFault) -> None:
        with trial(kind) as it:
            it.fake.force(fault)
            change = it.entry.run()

            assert len(it.fake.effects) == 1, "the effect must happen once"
            assert len({*it.requests}) == 1, "every attempt must send the same bytes"
            if kind.is_keyless and len(it.requests) == 1 and not isinstance(change, Settle):
                assert state_of(change) == "uncertain", f"without a key it must be uncertain, not {change}"
            else:
                expected = kind.repeated if len(it.requests) > 1 else "delivered"
                assert state_of(change) == expected, f"it must be {expected}, not {change}"
            if len(it.requests) > 1:
                assert it.fake.answers[-1].replayed, "the service must have recognised the key"

    def test_a_lost_answer_without_a_key_is_not_sent_again(self, kind: Offer) -> None:
        with trial(kind) as it:
            it.fake.force(ServiceFault.LOSE_RESPONSE)
            change = it.entry.run()

            if kind.is_keyless:
                assert state_of(change) == "uncertain", f"it must be uncertain, not {change}"
                assert len(it.requests) == 1, "it must not be sent again"

    def test_within_the_window_the_same_key_is_sent(self, kind: Offer) -> None:
        with trial(kind) as it:
            if isinstance(kind.window, timedelta):
                it.fake.force(ServiceFault.LOSE_RESPONSE)
                it.entry.step()
                memory = it.entry.route.memory
                it.fake.advance(kind.window - memory.timeout - memory.margin - 2 * INSTANT)
                change = it.entry.step()

                assert state_of(change) == kind.repeated, f"it must be sent again under the same key, but: {change}"
                assert len(it.fake.effects) == 1, "the service must still know the key"
                assert len({*it.requests}) == 1, "every attempt must send the same bytes"

    def test_after_the_window_it_is_never_sent(self, kind: Offer) -> None:
        with trial(kind) as it:
            if isinstance(kind.window, timedelta):
                it.fake.force(ServiceFault.LOSE_RESPONSE)
                it.entry.step()
                memory = it.entry.route.memory
                it.fake.advance(kind.window - memory.timeout - memory.margin)
                change = it.entry.step()

                assert state_of(change) == "uncertain", f"it must be uncertain, not {change}"
                assert len(it.requests) == 1, "nothing may be sent after the window"

    def test_the_fake_forgets_a_key_after_the_window(self, kind: Offer) -> None:
        with trial(kind) as it:
            it.entry.step()
            it.fake.advance(kind.window if isinstance(kind.window, timedelta) else timedelta(days=365))
            it.another().step()

            assert len(it.fake.effects) == (1 if kind.window is FOREVER else 2), "the window must be the profile's"

    # --- the same key twice

    def test_a_key_in_use_waits(self, kind: Offer) -> None:
        with trial(kind) as it:
            if kind.has_key:
                outcomes = asyncio.run(_overlapping(it))
                change = it.entry.run()

                assert isinstance(outcomes[0], Delivered), f"the first must be delivered, not {outcomes[0]}"
                assert isinstance(outcomes[1], InProgress if kind.profile.in_flight else InProgress | Unknown), (
                    f"while the key is in use, the second must wait, not {outcomes[1]}"
                )
                assert state_of(change) == kind.repeated, f"then {kind.repeated}, not {change}"
                assert len(it.fake.effects) == 1, "the effect must happen once"

    def test_another_request_under_the_key_is_never_executed(self, kind: Offer) -> None:
        with trial(kind) as it:
            it.entry.step()
            other = it.another(other="member")
            other.step()

            if kind.has_key:
                assert len(it.fake.effects) == 1, "the second request must not be executed"
            if kind.has_key and kind.profile.compares in ("parameters", "body") and kind.profile.mismatch:
                assert isinstance(other.outcomes[0], KeyConflict | InProgress | Rejected), (
                    f"another request under the key must be refused, not {other.outcomes[0]}"
                )

    # --- errors

    def test_a_refused_request_is_kept_or_executed_again(self, kind: Offer) -> None:
        with trial(kind) as it:
            it.fake.force(Refusal(422, {"refused": True}))
            first, second = it.entry.step(), it.another().step()

            assert state_of(first) == "failed", f"422 must end it as failed, not {first}"
            kept = kind.has_key and kind.profile.stores == "all"
            assert state_of(second) == ("failed" if kept else kind.repeated), f"then: {second}"
            assert len(it.fake.effects) == (0 if kept or kind.is_known_only else 1)

    def test_an_answer_has_the_meaning_that_is_stated(self, stated: "Stated") -> None:
        with trial(stated.offer) as it:
            answer = reply_of(stated.signal)
            it.fake.force(Refusal(answer.status, answer.body, answer.headers))
            it.entry.step()

            expected = OUTCOMES[stated.meaning]
            assert isinstance(it.entry.outcomes[0], expected), (
                f"{stated.signal} must be {stated.meaning}: {it.entry.outcomes[0]}"
            )

    def test_a_server_error_never_ends_as_two_effects(self, kind: Offer) -> None:
        with trial(kind) as it:
            it.fake.force(ServiceFault.FAIL_BEFORE)
            change = it.entry.run()

            assert len(it.fake.effects) <= 1
            assert isinstance(it.entry.outcomes[0], Unknown), f"a 500 must be unknown, not {it.entry.outcomes[0]}"
            if kind.is_keyless or kind.is_known_only or kind.profile.stores == "all":
                assert state_of(change) == "uncertain", f"it must be uncertain, not {change}"
            else:
                assert state_of(change) == "delivered", f"it must be delivered, not {change}"

    def test_a_limited_request_waits_and_is_sent(self, kind: Offer) -> None:
        with trial(kind) as it:
            it.fake.force(ServiceFault.RATE_LIMIT)
            change = it.entry.run()

            assert isinstance(it.entry.outcomes[0], Deferred), f"429 must be deferred, not {it.entry.outcomes[0]}"
            assert state_of(change) == "delivered", f"it must be delivered, not {change}"
            assert len(it.fake.effects) == 1

    # --- what the user sets

    def test_without_a_key_only_the_user_may_allow_two(self, kind: Offer) -> None:
        if kind.is_keyless:
            with trial(kind) as it:
                it.adapters = {kind.profile.name: it.service.adapter(**_window(kind), at_least_once=True)}
                it.entry = it.another()
                it.fake.force(ServiceFault.LOSE_RESPONSE)
                change = it.entry.run()

                assert state_of(change) == "delivered", f"it must be delivered, not {change}"
                assert len(it.fake.effects) == 2 or it.entry.route.memory.can_look_up

    def test_an_unpublished_window_must_be_given(self, kind: Offer) -> None:
        if kind.has_key and kind.profile.window_of(kind.operation) is None:
            with service_of(kind.profile) as service, pytest.raises(Exception, match="give"):
                service.adapter()


@contextmanager
def trial(offer: Offer) -> Iterator[Trial]:
    window = GIVEN_WINDOW if offer.has_key and offer.profile.window_of(offer.operation) is None else None
    with service_of(offer.profile, window=window) as service:
        yield Trial(offer, service)


def state_of(change: Transition) -> str:
    """The state of the entry after the transition."""
    return change.state if isinstance(change, Settle) else "uncertain" if isinstance(change, MarkUncertain) else "waits"


def sample_of(offer: Offer, **members: Any) -> Any:
    """The least payload that the operation takes. members: more of it."""
    operation, place = offer.operation, offer.profile.place_of(offer.operation)
    ids = dict.fromkeys(offer.profile.ids_of(operation), "id_1")
    if operation.payload == "list":
        return [{**members}]
    if isinstance(place, GraphQLArgument):
        return {**ids, "query": f"mutation M($input: I!) {{ m {place.used_as} }}", "variables": members}
    return {**ids, **members}


async def _overlapping(it: Trial) -> list[Outcome]:
    """Two sends of the entry: the second while the service executes the first."""
    route, delivery = it.entry.route, it.entry.delivery()
    with it.service.hold():
        first = asyncio.create_task(route.send(delivery))
        while not (it.fake.executing(delivery.key) or first.done()):  # noqa: ASYNC110  # the server's thread
            await asyncio.sleep(0.002)
        second: Outcome = await route.send(delivery)
    outcomes: list[Outcome] = [await first, second]
    await close(route.adapter)
    return outcomes


def _window(offer: Offer) -> dict[str, Any]:
    """The window that a user must give."""
    missing = any(
        offer.profile.window_of(each) is None and not isinstance(offer.profile.place_of(each), NoKey | NaturalKey)
        for each in offer.profile.operations.values()
    )
    return {"window": GIVEN_WINDOW} if missing else {}
