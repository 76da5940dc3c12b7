"""The suite for an adapter's `find`: inherit from `LookupSuite` in a test module, beside the one for its `send`.

    class TestCrmLooks(HttpLookSuite):              # or LookSuite, with a far side of your own
        operation = "crm.contacts.upsert"
        payload = {"email": "ada@example.com"}
        secrets = ["crm_token_1"]
        scenes = [
            Scene("there", answer(json={"made_by": str(ENTRY)}), Found),
            Scene("not there", answer(json={}), Absent),
            Scene("failed", answer(500), CannotTell),
        ]

        def adapter(self, far_side, timeout): return CrmAdapter(far_side.url, token="crm_token_1", timeout=timeout)

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
from dispatchers.testing.attempts import NeverBack, Observation, attempt, in_a_loop, looked
from dispatchers.testing.conformance import BLOCKED, ENTRY, TAGS, UNHURRIED, Scene
from dispatchers.testing.verdicts import leaks

FINDINGS = (Found, Absent, CannotTell)


class LookupSuite:
    """What every `find` must do, as tests. The author of one gives:

    operation, payload, options: of an entry that is looked for, whose id is `conformance.ENTRY`.
    scenes: what the service shows, and the finding of each; one `Found` and one `CannotTell` among them, and one `Absent`
        unless `never` says why it cannot be proved. A scene's `requests` are not counted: a look may take several.
    secrets: what the adapter was given that must never be shown. () if nothing.
    age: how long ago the entry was enqueued. patience: the timeout of a look at a far side that hangs.

    What `find` raises counts as `CannotTell`, as for the dispatcher.
    """

    operation: str
    payload: Any
    scenes: Sequence[Scene]
    secrets: Sequence[str]
    options: Mapping[str, Any] = {}
    never: Mapping[type[Any], str] = {}
    age: timedelta = timedelta(hours=1)
    patience: timedelta = timedelta(seconds=1)

    _observed: ClassVar[dict[str, Observation]]

    def __init_subclass__(cls) -> None:
        cls._observed = {}

    # --- what the author gives

    def adapter(self, far_side: Any, timeout: timedelta) -> Adapter:
        """A new adapter that looks at `far_side`. timeout: its own; far sides that hang are given no longer."""
        raise NotImplementedError(f"{type(self).__name__} needs adapter(self, far_side, timeout)")

    def far_side(self) -> AbstractContextManager[Any]:
        """What stands in for the service; a new one for each scene."""
        raise NotImplementedError(f"{type(self).__name__} needs far_side(self)")

    def hostile_scenes(self) -> Sequence[Scene]:
        """What the suite adds to the author's scenes."""
        return ()

    # --- the tests

    def test_each_finding_has_a_scene_or_a_reason(self, finding_class: type[Any]) -> None:
        name, reason = finding_class.__name__, self.never.get(finding_class, "").strip()

        assert reason or any(scene.expects is finding_class for scene in self.scenes), (
            f"no scene expects {name}: add one, or say in `never` why it cannot arise"
        )

    def test_it_finds_what_the_scene_shows(self, scene: Scene) -> None:
        finding = self._finding(scene)

        told = "; absence was not proved there, and the effect would happen twice" if finding == Absent() else ""
        assert isinstance(finding, scene.expects), f"expected {scene.expects}, not {finding!r}{told}"

    def test_it_is_back_by_its_deadline(self, scene: Scene) -> None:
        assert not self.observe(scene).late, "it was not back by its deadline, although it was cancelled"

    def test_nothing_goes_on_after_the_look(self, scene: Scene) -> None:
        seen = self.observe(scene)

        assert not seen.left, f"tasks that outlive the look and aclose(): {', '.join(seen.left)}"

    def test_its_finding_can_be_stored(self, scene: Scene) -> None:
        finding = self._finding(scene)

        assert storable_finding(finding) == finding, f"{finding!r} cannot be stored"
        result = getattr(finding, "result", None)
        assert json.loads(json.dumps(result)) == result, f"its result reads otherwise than it was written: {result!r}"

    def test_no_secret_is_shown(self, scene: Scene) -> None:
        seen, finding = self.observe(scene), self._finding(scene)
        told = {"the reason": getattr(finding, "reason", ""), "its repr or the log": seen.shown}

        found = list(leaks("secret", self.secrets, told | {"the result": getattr(finding, "result", None)}))

        assert not found, "; ".join(found)

    # --- what was seen

    def observe(self, scene: Scene) -> Observation:
        """One look in that scene: made once, and judged by several tests."""
        if scene.name not in self._observed:
            self._observed[scene.name] = self._look(scene)
        return self._observed[scene.name]

    def _look(self, scene: Scene) -> Observation:
        with self.far_side() as far_side:
            adapter = self.adapter(far_side, self.patience if scene.hangs else UNHURRIED)
            assert finder_of(adapter) is not None, f"{type(adapter).__name__} has no find"
            delivery = self._delivery(adapter, scene)
            far_side.behave(scene.behaviour)
            try:
                return in_a_loop(lambda: attempt(adapter, delivery, far_side, ask=looked), adapter.timeout + BLOCKED)
            except NeverBack:
                return Observation(outcome=None, raised=None, late=True, requests=far_side.requests)

    def _delivery(self, adapter: Adapter, scene: Scene) -> Delivery:
        return Delivery(
            id=ENTRY,
            operation=self.operation,
            body=json.dumps(self.payload if scene.payload is None else scene.payload).encode(),
            key=adapter.key_format.encode(TAGS[0]),
            attempt=1,
            options=self.options,
            headers={},
            deadline=0.0,
            age=self.age,
        )

    def _finding(self, scene: Scene) -> Finding:
        """As the dispatcher takes it."""
        seen = self.observe(scene)
        if seen.raised is not None:
            return CannotTell(f"the adapter raised {type(seen.raised).__name__}")
        if seen.late or isinstance(seen.outcome, Unknown):
            return CannotTell("no answer within its timeout")
        if not isinstance(seen.outcome, FINDINGS):
            pytest.fail(f"an answer of type {type(seen.outcome).__name__} is no finding", pytrace=False)
        return seen.outcome

    # --- how pytest finds the scenes

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if missing := [each for each in ("operation", "payload", "scenes", "secrets") if not hasattr(self, each)]:
            pytest.fail(f"{type(self).__name__} needs {', '.join(missing)}: see LookSuite", pytrace=False)
        if "scene" in metafunc.fixturenames:
            metafunc.parametrize("scene", list(self._scenes()), ids=lambda scene: scene.name)
        if "finding_class" in metafunc.fixturenames:
            metafunc.parametrize("finding_class", FINDINGS, ids=lambda each: each.__name__)

    def _scenes(self) -> Iterator[Scene]:
        yield from self.scenes
        yield from self.hostile_scenes()
