"""What the documents' tables and diagrams say is what the code does: vectors, limits, settings, statuses, states.

A table of settings comes after `<!-- of outbox.Outbox -->`: one row for each of its parameters, with its default.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, get_args

import pytest
from promela.check import runs
from simulation.mutations import GUARDS
from simulation.seeds import SEEDS_IN_CI, SEEDS_TO_FIND
from support.crash import ROUNDS_IN_CI
from support.docs_pages import PAGES, ROOT, rows_of, snippets_of, tables_of

from dispatchers import Adapter, Breaker, Dispatcher, Limits, Operations, RetryPolicy
from dispatchers.adapters import (
    DbosAdapter,
    EventBridgeAdapter,
    HttpAdapter,
    ImapSearch,
    KafkaAdapter,
    NatsAdapter,
    RabbitMqAdapter,
    RedisAdapter,
    RestateAdapter,
    SmtpAdapter,
    SnsFifoAdapter,
    SqsFifoAdapter,
    StripeAdapter,
    TemporalAdapter,
)
from dispatchers.adapters.http.meanings import MEANINGS
from dispatchers.adapters.http.outcomes import meaning_of, remembered
from dispatchers.delivery import KeyFormat
from dispatchers.settings import GivenSettings
from dispatchers.settings import Settings as DispatcherSettings
from dispatchers.testing.failpoints import POINTS
from outbox import Keyring, Outbox, ParentKey, keys
from outbox.configuration import Configuration, Settings
from outbox.entries.status import State
from outbox.http import HEADER, REPLAYED, Policy
from outbox.http.header import EXAMPLE_KEY, MAX_KEY_BYTES
from outbox.http.openapi import kinds_by_status
from outbox.http.policy import MAX_BODY_BYTES

# --- docs/http-api.md


def test_the_page_for_clients_has_each_refusal_and_the_default_settings() -> None:
    page = (ROOT / "docs" / "http-api.md").read_text()
    policy = Policy(outbox=Outbox(RING, env="test"))

    refusals = [(row["status"], row["type"], row["what to do"]) for row in rows_of(page, "status", "type")]
    assert sorted(refusals) == sorted(
        (str(status), policy.problem_types + kind.name, kind.remedy)
        for status, kinds in kinds_by_status().items()
        for kind in kinds
    )
    assert f"gets the first answer for {policy.retention // timedelta(hours=1)} hours" in page
    assert f"A body may have {MAX_BODY_BYTES // 1024**2} MiB" in page
    assert f"A key has 1 to {MAX_KEY_BYTES} bytes" in page
    assert f"the header `{REPLAYED}: true`" in page
    assert f"`{HEADER}` header: a String of RFC 9651 in double quotes (`{EXAMPLE_KEY}`)" in page.replace("\n  ", " ")
    assert (policy.strict, policy.wait) == (False, None)


# --- docs/keys.md

KEYS = (ROOT / "docs" / "keys.md").read_text()
RING, PUBLIC = Keyring({"k1": bytes(range(32))}), Keyring.public()


def fields_of(row: dict[str, str]) -> keys.KeyFields:
    parent = ParentKey(row["parent"], scope=row["scope"], source=row["source"])
    return keys.key_fields(row["env"], parent, row["operation"], row["discriminator"])


def computed(fields: keys.KeyFields) -> dict[str, str]:
    """Every value that the page may have of one vector, by its column's name."""
    tag, public = keys.derive_tag(RING, "k1", fields), keys.derive_tag(PUBLIC, "public", fields)
    parent = ParentKey(fields.parent, scope=fields.scope, source=fields.source)
    epochs = {n: keys.encode_native(keys.derive_tag(RING, "k1", fields, n)) for n in (1, 2, 10)}
    return {
        "tag, and its `hex` encoding": keys.encode_hex(tag),
        "native": keys.encode_native(tag),
        "uuid": keys.encode_uuid(tag),
        "uuid version 4": keys.encode_uuid(tag, version=4),
        "uuid version 5": keys.encode_uuid(tag, version=5),
        "entry id": str(keys.entry_id(fields)),
        "parent id": str(keys.parent_id(fields.env, parent)),
        "bound, native": keys.encode_native(keys.bind(tag, "POST /api/payment_orders")),
        "bound, uuid": keys.encode_uuid(keys.bind(tag, "POST /api/payment_orders")),
        "epoch 1": epochs[1],
        "epoch 2": epochs[2],
        "epoch 10": epochs[10],
        "public": keys.encode_native(public),
        "public, epoch 1": keys.encode_native(keys.derive_tag(PUBLIC, "public", fields, 1)),
    }


def vectors_of(markdown: str) -> list[tuple[str, str, str]]:
    """The printed values: (vector, column, value)."""
    tables = [rows_of(markdown, column) for column in ("native", "entry id", "epoch 1", "epoch 2", "bound, uuid")]
    rows = [({"vector": "1"} | row) for table in tables for row in table]
    return [(row["vector"], column, value) for row in rows for column, value in row.items() if column != "vector"]


def disagreements(markdown: str) -> list[tuple[str, str, str]]:
    code = {row["vector"]: computed(fields_of(row)) for row in rows_of(markdown, "env", "discriminator")}
    return [(vector, name, value) for vector, name, value in vectors_of(markdown) if code[vector][name] != value]


def test_the_vectors_of_the_page_are_those_of_the_code() -> None:
    assert len(vectors_of(KEYS)) == 7 * (2 + 3 + 3) + 4 + 2
    assert disagreements(KEYS) == []


@pytest.mark.parametrize("vector", vectors_of(KEYS), ids=lambda vector: f"{vector[0]} {vector[1]}")
def test_a_changed_digit_in_a_vector_is_noticed(vector: tuple[str, str, str]) -> None:
    _, _, value = vector
    middle = len(value) // 2
    changed = value[:middle] + ("0" if value[middle] != "0" else "1") + value[middle + 1 :]

    assert disagreements(KEYS.replace(f"`{value}`", f"`{changed}`"))


@pytest.mark.parametrize("column", ["env", "scope", "source", "parent", "operation", "discriminator"])
def test_a_changed_letter_in_a_field_is_noticed(column: str) -> None:
    row = rows_of(KEYS, "env", "discriminator")[6]
    line = next(line for line in KEYS.splitlines() if line.startswith("| 7 |"))

    assert disagreements(KEYS.replace(line, line.replace(f"`{row[column]}`", f"`{row[column]}0`")))


def test_the_examples_of_pae_are_those_of_the_code() -> None:
    printed = {row["parts"]: row["PAE in hex"] for row in rows_of(KEYS, "parts")}

    assert printed == {"none": keys.pae().hex(), "`ab` and the empty text": keys.pae(b"ab", b"").hex()}


def test_the_limits_of_the_fields_are_those_of_the_code() -> None:
    printed = {row["field"]: tuple(map(int, row["bytes"].split("-"))) for row in rows_of(KEYS, "field", "bytes")}

    assert list(printed) == ["env", "scope", "source", "parent", "operation", "discriminator"]
    assert printed == {name: keys.LIMITS[name] for name in printed}
    assert f"`{keys.OPERATION.pattern}`" in KEYS


def test_the_encodings_have_the_printed_lengths() -> None:
    printed = {row["encoding"]: int(row["characters"]) for row in rows_of(KEYS, "encoding")}

    assert printed == {
        name: len(KeyFormat(encoding=name).encode(keys.Tag(bytes(32)))) for name in ("native", "uuid", "hex")
    }


# --- docs/adapter-contract.md


def test_the_declarations_of_the_page_and_their_defaults_are_the_codes() -> None:
    rows = rows_of((ROOT / "docs" / "adapter-contract.md").read_text(), "declaration", "default")

    declared = {name for name, value in vars(Adapter).items() if not name.startswith("_") and not callable(value)}
    of_functions = Operations.operation.__kwdefaults__
    of_classes = {
        "send_batch",
        "as_of",
        "parts",
    }  # a function of an operation sends one delivery, and is for one operation

    assert {row["declaration"] for row in rows} == declared == (set(of_functions) - {"deferred_on"}) | of_classes
    names = {"FOREVER": "FOREVER", "NATIVE": KeyFormat(), "RetryPolicy": RetryPolicy, "timedelta": timedelta}
    for row in rows:
        default = eval(row["default"], names)
        assert default == getattr(Adapter, row["declaration"]), row
        assert default == of_functions.get(row["declaration"]), row


# --- the tables of settings

SETTINGS: dict[str, Callable[..., Any]] = {
    "outbox.Outbox.idempotent": Outbox.idempotent,
    "dispatchers.Dispatcher": Dispatcher,
    "dispatchers.Limits": Limits,
    "dispatchers.Breaker": Breaker,
    "dispatchers.RetryPolicy": RetryPolicy,
    "dispatchers.adapters.StripeAdapter": StripeAdapter,
    "dispatchers.adapters.DbosAdapter": DbosAdapter,
    "dispatchers.adapters.HttpAdapter": HttpAdapter,
    "dispatchers.adapters.KafkaAdapter": KafkaAdapter,
    "dispatchers.adapters.EventBridgeAdapter": EventBridgeAdapter,
    "dispatchers.adapters.NatsAdapter": NatsAdapter,
    "dispatchers.adapters.RabbitMqAdapter": RabbitMqAdapter,
    "dispatchers.adapters.RedisAdapter": RedisAdapter,
    "dispatchers.adapters.RestateAdapter": RestateAdapter,
    "dispatchers.adapters.TemporalAdapter": TemporalAdapter,
    "dispatchers.adapters.SmtpAdapter": SmtpAdapter,
    "dispatchers.adapters.SnsFifoAdapter": SnsFifoAdapter,
    "dispatchers.adapters.SqsFifoAdapter": SqsFifoAdapter,
    "dispatchers.adapters.ImapSearch": ImapSearch,
}
NOT_SET_BY_USERS = {"self", "session", "simulation"}


def settings_of(markdown: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """What each tagged table is of, and its rows."""
    for found in re.finditer(r"^<!-- of (\S+) -->\n\n((?:\|.*\|\n)+)", markdown, re.M):
        yield found[1], rows_of(found[2], "setting", "default")


def disagreeing_settings(function: Callable[..., Any], rows: list[dict[str, str]]) -> list[str]:
    """The names that only one of them has, or has with another default."""
    parameters = dict(inspect.signature(function).parameters)
    if function is Dispatcher:  # its keywords of Settings
        del parameters["settings"]
        given = inspect.signature(DispatcherSettings).parameters
        parameters |= {name: given[name] for name in GivenSettings.__annotations__}
        parameters["limits"] = parameters["limits"].replace(default={})
    names = {
        "timedelta": timedelta,
        "KeyFormat": KeyFormat,
        "Breaker": Breaker,
        "RetryPolicy": RetryPolicy,
        "remembered": remembered,
        "required": inspect.Parameter.empty,
    }
    printed = {row["setting"]: eval(row["default"], names) for row in rows}
    true = {name: parameter.default for name, parameter in parameters.items() if name not in NOT_SET_BY_USERS}
    return sorted(name for name in printed | true if (name, printed.get(name, ...)) != (name, true.get(name, ...)))


def test_every_setting_of_the_pages_has_its_true_default() -> None:
    tables = [table for page in PAGES for table in settings_of(page.read_text())]

    assert sorted(name for name, _ in tables) == sorted([*SETTINGS, "outbox.Outbox"])
    assert {name: disagreeing_settings(SETTINGS[name], rows) for name, rows in tables if name in SETTINGS} == {
        name: [] for name in SETTINGS
    }


def test_the_settings_of_an_outbox_have_the_printed_defaults() -> None:
    ((_, rows),) = [table for page in PAGES for table in settings_of(page.read_text()) if table[0] == "outbox.Outbox"]
    printed = {row["setting"]: row["default"] for row in rows}
    required = {name: value for name, value in printed.items() if value == "required"}
    defaults = {name: eval(value, {"timedelta": timedelta}) for name, value in printed.items() if name not in required}
    ring = Keyring({"k1": bytes(32)})

    assert list(required) == ["keyring", "env"]
    assert {*printed} == {"keyring", *Settings.__annotations__}
    assert Configuration(ring, env="test", **defaults) == Configuration(ring, env="test")


def test_a_setting_that_is_missing_wrong_or_too_much_is_noticed() -> None:
    def function(*, here: int = 1, changed: int = 2, missing: int = 3, needed: int) -> None:
        pass

    rows = [("here", "1"), ("changed", "3"), ("gone", "None"), ("needed", "required")]
    disagreeing = disagreeing_settings(function, [{"setting": name, "default": default} for name, default in rows])

    assert disagreeing == ["changed", "gone", "missing"]


# --- docs/http.md, docs/how-it-works.md


def test_the_statuses_of_the_page_mean_what_the_code_says() -> None:
    markdown = (ROOT / "docs" / "http.md").read_text()
    rows = rows_of(markdown, "status", "by default")
    printed = {
        int(status): row["by default"]
        for row in rows
        for status in re.findall(r"\b\d{3}\b", row["status"])
        if "to" not in row["status"]
    }

    others = [status for status in range(300, 600) if meaning_of(status) != "unknown"]
    assert sorted(status for status, meaning in printed.items() if meaning != "unknown") == others
    assert all(meaning_of(status) == meaning for status, meaning in printed.items())
    names = {name for row in rows_of(markdown, "name", "outcome") for name in re.findall(r'"(\w+)"', row["name"])}
    assert names == MEANINGS


def test_the_diagram_has_every_state() -> None:
    states = (ROOT / "docs" / "how-it-works.md").read_text()
    (diagram,) = [snippet for snippet in snippets_of(states) if snippet.language == "mermaid"]

    drawn = {state for arrow in re.findall(r"(\S+) --> (\S+)", diagram.text) for state in arrow}

    assert drawn - {"[*]"} == set(get_args(State))


def test_the_page_of_states_has_every_state() -> None:
    rows = rows_of((ROOT / "docs" / "how-it-works.md").read_text(), "state", "meaning")

    assert [row["state"] for row in rows] == list(dict.fromkeys(row["state"] for row in rows))
    assert {row["state"] for row in rows} == set(get_args(State))


def test_words_that_cannot_be_kept_occur_only_where_they_are_refused() -> None:
    pages = [
        page
        for page in PAGES
        if re.search("exactly-once delivery|guaranteed delivery|zero data loss", page.read_text(), re.I)
    ]

    assert [page.name for page in pages] == ["how-it-works.md"]


# --- docs/verification.md


def test_the_figures_of_what_was_shown_are_those_of_the_tests() -> None:
    page = (ROOT / "docs" / "verification.md").read_text()
    figures = {row["what"]: int(row["figure"]) for table in tables_of(page) for row in table if "figure" in row}

    assert figures == {
        "seeds in CI": SEEDS_IN_CI,
        "mutants: one rule removed in each": len(GUARDS),
        "seeds within which each mutant is found": SEEDS_TO_FIND,
        "settings of the model": len(runs()),
        "of these in CI, by the recorded verdict": sum(run.takes == "second" for run in runs()),
        "of those in CI, mutants": sum(run.takes == "second" and run.expected == "fails" for run in runs()),
        "of those in CI, checked again by Spin": len(
            {(run.mode, run.expected) for run in runs() if run.takes == "second"}
        ),
        "rounds at each point in CI": ROUNDS_IN_CI,
    }
    assert [row["point"] for row in rows_of(page, "point")] == list(POINTS)


def test_every_row_of_what_can_go_wrong_names_tests_that_there_are() -> None:
    code = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "dispatchers" / "testing").glob("*.py")]
    there = {name for path in code for name in re.findall(r"def (test_\w+)", path.read_text())}
    tables = tables_of((ROOT / "docs" / "verification.md").read_text())
    rows = [row for table in tables for row in table if "shown by" in row]

    unknown = {row["what happens"]: set(re.findall(r"\w+", row["shown by"])) - there for row in rows}

    assert {what: names for what, names in unknown.items() if names} == {}
    assert all(re.search(r"test_\w+", row["shown by"]) for row in rows)
