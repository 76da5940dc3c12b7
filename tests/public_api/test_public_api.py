"""The public API is what the snapshots beside this file say: a change of a name or a signature is a decision."""

from difflib import unified_diff

import pytest
from support.public_api import MODULES, describe, read_snapshot, snapshot_path


@pytest.mark.parametrize("package", MODULES)
def test_a_snapshot_has_the_modules_that_the_documents_name(package: str) -> None:
    assert list(read_snapshot(package)) == list(MODULES[package])


@pytest.mark.parametrize(
    ("package", "module"), [(package, each) for package, modules in MODULES.items() for each in modules]
)
def test_names_and_signatures_are_those_of_the_snapshot(package: str, module: str) -> None:
    try:
        present = describe(package, module)
    except ImportError as error:
        pytest.skip(str(error))

    kept = read_snapshot(package)[module]

    diff = "\n".join(unified_diff(kept.splitlines(), present.splitlines(), "snapshot", "code", lineterm="", n=0))
    if diff:
        pytest.fail(
            f"the public API of {module} differs from {snapshot_path(package).name}:\n{diff}\n"
            "A change of the API is a decision: write it into CHANGELOG.md, then write the snapshot anew with\n"
            "    python3 dev.py api",
            pytrace=False,
        )
