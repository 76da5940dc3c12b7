"""The public API is what the snapshots beside this file say: a change of a name or a signature is a decision."""

from difflib import unified_diff

import pytest
from support.public_api import (
    MODULES,
    describe,
    documented_names,
    is_in_snapshot,
    public_members,
    read_snapshot,
    snapshot_path,
)

import dispatchers.errors
import outbox.errors
from dispatchers import Completed, Dispatcher, Fleet, SettledEntry, Settlement
from outbox.requests.claim_block import IdempotentBlock
from outbox.requests.inbox import InboxBlock
from outbox.requests.leases import FencedBlock, LeasedBlock

ATTRIBUTES = {
    outbox.Claim: "accept id parent reject replayed require_response respond response",
    outbox.LeasedClaim: "child_key fence parent renew replayed require_response respond response",
    outbox.AsyncLeasedClaim: "child_key fence parent renew replayed require_response respond response",
    outbox.InboxMessage: "duplicate parent",
    outbox.Response: "body headers json status",
    outbox.ParentKey: "key scope source",
    outbox.Entry: "child_key id",
    Dispatcher: "check close run run_once serve unready",
    Fleet: "run serve unready",
    Completed: "completion entries id parent respond response",
    Settlement: "attempts entry reason result state stored_result",
    SettledEntry: "child_key created_at destination discriminator effect id operation options parent payload payload_json",
    IdempotentBlock: "",
    InboxBlock: "",
    LeasedBlock: "",
    FencedBlock: "",
}
"""What autocompletion shows of an object that the library hands to an app, and of what a dispatcher's process runs."""

MANY_CAUSES = {"CallbackError", "ConfigurationError", "SchemaError"}
"""The errors that are no base class, and still a kind of error."""


@pytest.mark.parametrize("package", MODULES)
def test_a_snapshot_has_each_public_module(package: str) -> None:
    assert list(read_snapshot(package)) == list(MODULES[package])


def test_what_the_documents_import_is_in_a_snapshot() -> None:
    assert len(documented_names()) > 50
    assert [each for each in sorted(documented_names()) if not is_in_snapshot(*each)] == []


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
            "A change of the API is a decision: write it into CHANGELOG.md, then write the snapshot again with\n"
            "    python3 dev.py api",
            pytrace=False,
        )


@pytest.mark.parametrize("cls", ATTRIBUTES, ids=lambda cls: cls.__name__)
def test_an_app_sees_of_an_object_only_what_it_may_use(cls: type) -> None:
    shown = {name for name in {*dir(cls), *public_members(cls)} if not name.startswith("_")}

    assert sorted(shown) == ATTRIBUTES[cls].split()


def test_only_a_kind_of_error_has_a_name_that_ends_in_error() -> None:
    errors = {
        each
        for module in (outbox.errors, dispatchers.errors)
        for each in vars(module).values()
        if isinstance(each, type)
    }
    ours = {each for each in errors if issubclass(each, outbox.OutboxError)}
    bases = {each.__name__ for each in ours if any(each in other.__bases__ for other in ours)}
    bases.remove("InvalidValue")  # the one thing that happened, also of an InvalidPayload, which hides its value

    assert {each.__name__ for each in ours if each.__name__.endswith("Error")} == bases | MANY_CAUSES
