"""The runs of `dev.py matrix`: what they name exists, and the documents claim no version that is not run."""

import json
import re
import tomllib

import pytest
from support import matrix
from support.docs_pages import ROOT


@pytest.mark.parametrize("pattern", sorted({*matrix.CORE, *matrix.STORE, *matrix.LOOP}))
def test_each_pattern_of_the_matrix_names_tests(pattern: str) -> None:
    assert matrix.found(pattern)


def test_every_python_of_the_classifiers_is_run() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    claimed = {name.rpartition(" ")[2] for name in classifiers if re.search(r":: 3\.\d+$", name)}

    assert claimed <= set(matrix.PYTHONS)
    assert {"3.11", "3.12", "3.13"} <= claimed


@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "docs/databases.md", "docs/how-it-works.md"])
def test_every_claimed_postgresql_is_run(page: str) -> None:
    (first, last) = re.findall(r"PostgreSQL (\d+) to (\d+)", (ROOT / page).read_text())[0]

    assert [str(major) for major in range(int(first), int(last) + 1)] == [*matrix.POSTGRESQLS, "18"]


def test_npm_pins_a_postgresql_by_its_digest() -> None:
    locked = json.loads((matrix.PROGRAMS / "package-lock.json").read_text())["packages"]

    pinned = {name: package["integrity"] for name, package in locked.items() if name}
    assert all(digest.startswith("sha512-") for digest in pinned.values())
    assert {name.rpartition("-")[2] for name in pinned} == {"14", "16", "17"}


def test_a_run_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["postgresql-9"]) == 2
    assert "no run is named 'postgresql-9'; the runs are" in capsys.readouterr().err
