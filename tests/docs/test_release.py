"""What a release publishes: `python3 dev.py build`, and the workflows that call it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import matrix, release
from support.docs_pages import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-12-01

- A change.

## [1.1.0] - 2026-11-01
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return release.make(tmp_path_factory.mktemp("release") / "dist", notes="- A change.\n")


def test_a_release_has_two_distributions_their_components_and_notes(built: list[Path]) -> None:
    wheel, sdist = next(path for path in built if path.suffix == ".whl"), next(p for p in built if p.suffix == ".gz")
    version = release.version()

    assert {path.name for path in built} == {wheel.name, sdist.name, "sbom.cdx.json", "notes.md"}
    assert version in wheel.name
    assert version in sdist.name


def test_the_components_are_those_of_all_extras(built: list[Path]) -> None:
    (document,) = [json.loads(path.read_text()) for path in built if path.name == "sbom.cdx.json"]
    names = {component["name"].lower() for component in document["components"]}

    assert document["bomFormat"] == "CycloneDX"
    assert {"sqlalchemy", "psycopg", "stripe", "apscheduler", "alembic"} <= names
    assert "pytest" not in names


def test_the_tag_the_version_and_the_changelog_agree() -> None:
    assert release.notes_of("v1.2.0", "1.2.0", CHANGELOG) == "- A change.\n"
    for tag, version, says in (
        ("v1.2", "1.2.0", "the tag must be v1.2.0"),
        ("v1.3.0", "1.3.0", "has no section"),
        ("vUnreleased", "Unreleased", "has no section"),
    ):
        with pytest.raises(release.ReleaseError, match=says):
            release.notes_of(tag, version, CHANGELOG)


def test_the_links_of_the_notes_lead_to_the_files_of_the_tag() -> None:
    changelog = CHANGELOG.replace("- A change.", "- [A change](docs/keys.md#check), [why](https://example.com/a).")

    notes = release.notes_of("v1.2.0", "1.2.0", changelog)

    files = "https://github.com/sqlalchemy-outbox/sqlalchemy-outbox/blob/v1.2.0"
    assert notes == f"- [A change]({files}/docs/keys.md#check), [why](https://example.com/a).\n"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_commands_that_exist(path: Path) -> None:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job.get("steps", ()) if "run" in step]
    help_text = (ROOT / "dev.py").read_text()

    for command in steps:
        for name in re.findall(r"dev\.py (\w+)", command):
            assert f"python3 dev.py {name}" in help_text
        for script in re.findall(r"bash (\S+)", command):
            assert (ROOT / script).is_file()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_each_action_by_its_commit(path: Path) -> None:
    """A tag of an action can be moved, and the release's workflow may publish."""
    actions = [line for line in path.read_text().splitlines() if "uses: " in line and "uses: ./" not in line]

    assert actions
    assert [line for line in actions if not re.search(r"@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", line)] == []


def test_the_workflow_runs_the_whole_matrix() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    named = {*jobs["matrix"]["strategy"]["matrix"]["name"]}
    named |= {f"python-{version}" for version in jobs["pythons"]["strategy"]["matrix"]["python"]}

    assert {run.name for run in matrix.runs()} <= named | {"python-3.11"}  # of the whole suite
