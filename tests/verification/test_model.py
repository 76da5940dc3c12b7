"""The protocol's model: with every guard its invariants hold, and without any one of them they do not."""

import re

import pytest
from promela import check

RUNS = check.runs()
QUICK = [run for run in RUNS if run.takes == "second"]  # the others: `python3 dev.py model`
SPUN = list({(run.mode, run.expected): run for run in reversed(QUICK)}.values())
"""The first of each kind: they show that the tools still find what is recorded of all."""

needs_tools = pytest.mark.skipif(
    bool(check.missing_tools()), reason=f"not installed: {', '.join(check.missing_tools())} (apt-get install spin gcc)"
)


def test_the_model_as_it_is_holds_with_every_guard_and_fails_without_one() -> None:
    """By the verdicts on record: a change of the model, of a setting or of the verifier's flags makes them void."""
    expected = {run.name: (run.digest, run.expected) for run in QUICK}

    found = {name: verdict for name, verdict in check.verdicts().items() if name in expected}

    assert found == expected, "run `python3 dev.py model`, and commit tests/verification/promela/verdicts.tsv"


@needs_tools
@pytest.mark.parametrize("run", SPUN, ids=lambda run: f"{run.name} {run.about} {run.expected}")
def test_spin_finds_what_is_on_record(run: check.Run) -> None:
    assert check.check(run).found == run.expected


def test_every_guard_that_can_be_removed_is_shown_to_be_needed() -> None:
    removable = set(re.findall(r"^ \*   ([A-Z_0-9]+) +[a-z]", check.MODEL.read_text(), re.M)) - {"LATE_OK"}

    removed = {flag[2:] for run in QUICK if run.expected == "fails" for flag in run.flags}

    assert len(removable) >= 16
    assert removable <= removed
