"""What is published: the source distribution, the wheel that is built from it, and the extras."""

import re
import shutil
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.docs_pages import ROOT, rows_of
from support.installs import LEFTOVERS, build

PUBLISHED = {"alembic", "benchmarks", "dispatchers", "docs", "examples", "outbox", "tests"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a checkout in which a developer has made an environment, as `python3 -m venv .b` does."""
    checkout = tmp_path_factory.mktemp("checkout") / "outbox"
    shutil.copytree(ROOT, checkout, ignore=LEFTOVERS)
    (checkout / ".b" / "bin").mkdir(parents=True)
    (checkout / ".b" / "bin" / "python3").symlink_to("/usr/bin/python3")
    (checkout / "notes").mkdir()
    (checkout / "notes" / "private.txt").write_text("not to be published")
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from the source distribution, as an installer does."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    with zipfile.ZipFile(build("wheel", source, tmp_path_factory.mktemp("wheel"))) as wheel:
        yield wheel


def test_the_source_distribution_holds_the_project_and_nothing_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        paths = [Path(*Path(name).parts[1:]) for name in archive.getnames()]

    assert {path.parts[0] for path in paths if len(path.parts) > 1} == PUBLISHED
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= {str(path) for path in paths}


def test_the_wheel_builds_from_the_source_distribution(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()

    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"outbox", "dispatchers"}
    assert "outbox/_migrations/versions/0001_first.py" in names


def test_the_metadata_has_the_version_that_the_publisher_accepts(sdist: Path, wheel: zipfile.ZipFile) -> None:
    """By default hatchling writes 2.5, which Twine refuses before its version 7."""
    with tarfile.open(sdist) as archive:
        (source,) = [archive.extractfile(name) for name in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name)]
        assert source is not None
        described = [source.readline()]
    described += [wheel.read(name).splitlines()[0] for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]

    assert [line.strip() for line in described] == [b"Metadata-Version: 2.4"] * 2


def test_the_wheel_holds_each_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    """Templates, styles and py.typed too, which an import does not miss."""
    packaged = [path for package in ("outbox", "dispatchers") for path in (ROOT / package).rglob("*") if path.is_file()]
    ours = {str(path.relative_to(ROOT)) for path in packaged if "__pycache__" not in path.parts}

    assert {"outbox/py.typed", "dispatchers/py.typed", "dispatchers/dashboard/templates/base.html"} <= ours
    assert ours == {name for name in wheel.namelist() if ".dist-info/" not in name and "/_migrations/" not in name}


def test_the_wheel_has_absolute_links_and_the_licences_of_what_it_vendors(wheel: zipfile.ZipFile) -> None:
    """An index resolves no relative link and draws no mermaid."""
    names = wheel.namelist()
    (metadata,) = [wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]

    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    assert "mermaid" not in metadata
    assert all((ROOT / link.partition("/main/")[2].partition("#")[0]).exists() for link in links if "/main/" in link)
    vendored = {path.name for path in (ROOT / "dispatchers").rglob("*.LICENSE.txt")}
    assert vendored
    assert vendored | {"LICENSE"} == {Path(name).name for name in names if ".dist-info/licenses/" in name}


def test_the_table_of_extras_names_every_extra() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]

    rows = rows_of((ROOT / "docs" / "install.md").read_text(), "extra", "for")

    named = [name.strip("` ") for row in rows for name in row["extra"].split(",")]
    assert sorted(named) == sorted(extras)
