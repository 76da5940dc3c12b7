"""Builds what a release publishes, into dist/, and checks it: `python3 dev.py build`. See RELEASING.md."""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from readme_renderer import markdown

from support.docs_pages import ROOT
from support.installs import UV, build, run

DIST = ROOT / "dist"


class ReleaseError(Exception):
    """The release is refused. The text says what to change."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev.py build", description=__doc__)
    parser.add_argument(
        "--tag", help="the tag of the release, such as v1.0.0: it must fit pyproject.toml and CHANGELOG.md"
    )
    tag = parser.parse_args(arguments).tag
    try:
        notes = "" if tag is None else notes_of(tag, version(), (ROOT / "CHANGELOG.md").read_text())
        for path in make(DIST, notes):
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(ROOT)}")
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def version() -> str:
    return str(project()["version"])


def notes_of(tag: str, version: str, changelog: str) -> str:
    """The changelog's section about this release, with absolute links, because the page of a release resolves no others.

    Raises `ReleaseError` if the tag, the version and the changelog differ.
    """
    if tag != f"v{version}":
        raise ReleaseError(
            f"the tag is {tag}, and pyproject.toml has the version {version}: the tag must be v{version}"
        )
    found = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'")
    source = project()["urls"]["Source"]
    return re.sub(r"\]\((?!https?:|#)", f"]({source}/blob/{tag}/", found[1].strip()) + "\n"


def make(target: Path, notes: str = "") -> list[Path]:
    """Build everything into an empty folder, and return the files. Raises `ReleaseError`."""
    with TemporaryDirectory() as folder:
        first, second = (Path(folder) / name for name in ("first", "second"))
        built = [build(kind, ROOT, first) for kind in ("sdist", "wheel")]
        for path in built:
            again = build("wheel" if path.suffix == ".whl" else "sdist", ROOT, second)
            if again.read_bytes() != path.read_bytes():
                raise ReleaseError(f"{path.name} is not reproducible: two builds of this checkout differ")
        check_readme(built[1])
        components = Path(folder) / "sbom.cdx.json"
        components.write_text(components_of(built[1], Path(folder) / "environment"))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        made = [Path(shutil.copy(path, target)) for path in (*built, components)]
    if notes:
        (target / "notes.md").write_text(notes)
        made.append(target / "notes.md")
    return made


def check_readme(wheel: Path) -> None:
    """Raises `ReleaseError` if the package index could not show the description as it is meant."""
    shown = description_of(wheel)
    if markdown.render(shown) is None:
        raise ReleaseError("the package index could not render README.md")
    if relative := re.findall(r"\]\((?!https?:|#)([^)]*)\)", shown):
        raise ReleaseError(f"README.md has links that lead nowhere at the package index: {', '.join(relative)}")
    if "```mermaid" in shown:
        raise ReleaseError(
            "README.md has a diagram that the package index shows as text: hatch removes those in pyproject.toml"
        )


def description_of(wheel: Path) -> str:
    """The description in its metadata, which the package index shows."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return str(HeaderParser().parsestr(files.read(name).decode()).get_payload())


def components_of(wheel: Path, environment: Path) -> str:
    """The wheel's components with all extras, in the versions of requirements.lock: a CycloneDX document."""
    run(UV, "venv", "--quiet", "--python", sys.executable, str(environment))
    python = str(environment / "bin" / "python")
    lock = str(ROOT / "requirements.lock")
    run(UV, "pip", "install", "--quiet", "--python", python, "--constraint", lock, f"{wheel}[all]")
    program = Path(sys.executable).parent / "cyclonedx-py"
    options = ("--output-reproducible", "--pyproject", str(ROOT / "pyproject.toml"))
    return subprocess.run([program, "environment", *options, python], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
