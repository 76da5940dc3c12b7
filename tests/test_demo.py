"""The demo: its audit finds what is wrong, and one real run of it ends well."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dispatchers.testing.stripe_ledger import Effect
from examples.demo.audit import Audit, audit
from examples.demo.receipts import Receipt

ROOT = Path(__file__).resolve().parent.parent
RUN_SECONDS_MAX = 150  # three runs side by side take about thirty, on an idle machine


# --- the audit


def receipt(order_id: str, **fields: Any) -> Receipt:
    """What the client of a good checkout holds."""
    given = {"key": f"key-{order_id}", "customer": "ada", "amount": 2000, "currency": "eur", "order_ids": [order_id]}
    return Receipt(**given | fields)


def charge(order_id: str, **fields: Any) -> Effect:
    """A charge as the payment service's ledger has it."""
    given = {"amount": 2000, "currency": "eur", "customer": "ada", "metadata": {"order_id": order_id}}
    said = {"id": "ch_1", "object": "charge", "account": "acct", "key": "ck1_a", "request_id": "req_1"}
    return Effect(created=datetime(2030, 1, 1, tzinfo=UTC), **said | given | fields)


def audited(
    charges: Sequence[Effect],
    *,
    receipts: Sequence[Receipt] = (receipt("A"), receipt("B")),
    uncertain_max: int = 0,
    orders: int = 2,
    **states: str,
) -> Audit:
    """The audit of two orders, A and B, both delivered unless `states` says otherwise."""
    claimed = {"A": "delivered", "B": "delivered"} | states
    return audit(
        orders=orders,
        receipts=receipts,
        charges=charges,
        states={order: state for order, state in claimed.items() if state},
        uncertain_max=uncertain_max,
        suppressed=0,
    )


ONCE_EACH = (charge("A"), charge("B"))
ONLY_A = (charge("A"),)


@pytest.mark.parametrize(
    ("charges", "rest"),
    [
        pytest.param(ONCE_EACH, {}, id="each delivered and charged once"),
        pytest.param(ONLY_A, {"B": "uncertain", "uncertain_max": 1}, id="one uncertain and not charged"),
        pytest.param(ONCE_EACH, {"B": "uncertain", "uncertain_max": 1}, id="one uncertain and charged once"),
        pytest.param((), {"A": "uncertain", "B": "uncertain", "uncertain_max": 2}, id="as many uncertain as allowed"),
        pytest.param((), {"receipts": (), "orders": 0}, id="no orders at all"),
    ],
)
def test_an_audit_passes_when_ledger_and_outbox_agree(charges: Sequence[Effect], rest: dict[str, Any]) -> None:
    result = audited(charges, **rest)

    assert result.passed
    assert result.problems == []


OWED_AND_CHARGED = "order B: ada owed 2000 eur, and {} was charged {}"


@pytest.mark.parametrize(
    ("charges", "rest", "problem"),
    [
        pytest.param(ONLY_A, {}, "order B: delivered, and charged 0 times", id="a charge is missing"),
        pytest.param(
            (*ONCE_EACH, charge("B")), {}, "order B: delivered, and charged 2 times", id="one is charged twice"
        ),
        pytest.param(
            (*ONLY_A, charge("B", amount=2001)), {}, OWED_AND_CHARGED.format("ada", "2001 eur"), id="a wrong amount"
        ),
        pytest.param(
            (*ONLY_A, charge("B", currency="usd")),
            {},
            OWED_AND_CHARGED.format("ada", "2000 usd"),
            id="a wrong currency",
        ),
        pytest.param(
            (*ONLY_A, charge("B", customer="bob")),
            {},
            OWED_AND_CHARGED.format("bob", "2000 eur"),
            id="a wrong customer",
        ),
        pytest.param(
            (*ONLY_A, charge("B", amount=1)),
            {"B": "uncertain", "uncertain_max": 1},
            OWED_AND_CHARGED.format("ada", "1 eur"),
            id="uncertain, and charged a wrong amount",
        ),
        pytest.param(
            (*ONCE_EACH, charge("B")),
            {"B": "uncertain", "uncertain_max": 1},
            "order B: uncertain, and charged 2 times",
            id="uncertain, and charged twice",
        ),
        pytest.param(
            ONLY_A, {"B": "uncertain"}, "1 orders are uncertain; at most 0 may be", id="more uncertain than allowed"
        ),
        pytest.param(ONCE_EACH, {"B": "failed"}, "order B: failed, and charged 1 times", id="failed, and yet charged"),
        pytest.param(ONLY_A, {"B": "failed"}, "order B: failed, and charged 0 times", id="failed: a good card pays"),
        pytest.param(ONLY_A, {"B": "pending"}, "order B: pending, and charged 0 times", id="never sent"),
        pytest.param(ONCE_EACH, {"B": "retry"}, "order B: retry, and charged 1 times", id="charged, and still waiting"),
        pytest.param(
            ONCE_EACH, {"B": ""}, "order B: without an entry, and charged 1 times", id="an order without an entry"
        ),
        pytest.param(
            ONCE_EACH,
            {"B": "delivered and delivered"},
            "order B: delivered and delivered, and charged 1 times",
            id="an order with two entries",
        ),
        pytest.param(
            (*ONCE_EACH, charge("C")),
            {},
            "order C: charged 1 times, and no client knows of it",
            id="an order of nobody",
        ),
        pytest.param(
            (*ONCE_EACH, charge("", metadata={})),
            {},
            "order : charged 1 times, and no client knows of it",
            id="a charge without an order",
        ),
        pytest.param(
            ONLY_A,
            {"receipts": (receipt("A"), receipt("B", order_ids=[]))},
            "checkout key-B: never answered 201",
            id="a checkout that was never answered",
        ),
        pytest.param(
            (*ONCE_EACH, charge("C")),
            {"receipts": (receipt("A"), receipt("B", order_ids=["B", "C"])), "C": "delivered"},
            "checkout key-B: answered with 2 orders: ['B', 'C']",
            id="a checkout that made two orders",
        ),
        pytest.param(
            ONLY_A,
            {"receipts": (receipt("A"),)},
            "2 checkouts were made, 1 have a receipt",
            id="a checkout without a receipt",
        ),
    ],
)
def test_an_audit_fails_and_names_the_one_thing_that_is_wrong(
    charges: Sequence[Effect], rest: dict[str, Any], problem: str
) -> None:
    result = audited(charges, **rest)

    assert not result.passed
    assert result.problems == [problem]


def test_an_audit_names_every_problem_and_not_just_the_first() -> None:
    result = audited([charge("A"), charge("A"), charge("C")])

    assert result.problems == [
        "order A: delivered, and charged 2 times",
        "order B: delivered, and charged 0 times",
        "order C: charged 1 times, and no client knows of it",
    ]


# --- the whole of it


@contextmanager
def demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run of the demo; whatever it has started ends with the block."""
    command = [sys.executable, "-m", "examples.demo", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)  # a no-op once it has ended


def line(output: str, words: str) -> int:
    """The number that stands behind these words in the tables."""
    found = re.search(rf"│ *{re.escape(words)} *│ *(\d+) *│", output)
    assert found, output
    return int(found[1])


def test_the_demo_charges_every_order_once_on_both_databases_and_fails_where_the_keys_are_forgotten() -> None:
    """Three runs of half a minute, most of it waiting: side by side, and so in one test."""
    with ExitStack() as stack:
        runs = [
            stack.enter_context(demo(*arguments.split()))
            for arguments in ("--orders 20", "--orders 20 --sqlite", "--orders 40 --forgetful --sqlite")
        ]
        postgresql, sqlite, forgetful = (run.communicate(timeout=RUN_SECONDS_MAX)[0] for run in runs)

    for output, run, database in ((postgresql, runs[0], "PostgreSQL"), (sqlite, runs[1], "SQLite")):
        assert run.returncode == 0, output
        assert re.search(rf"│ checkouts, on [\w ]*{database}[^│]*│ 20 │", output), output
        assert line(output, "orders that clients were promised with a 201") == 20
        assert line(output, "charged twice or more") == 0
        assert line(output, "not charged, though the outbox does not say uncertain") == 0
        assert line(output, "times the dispatcher was killed with SIGKILL at work") > 0
        sure = line(output, "charged exactly once, and settled as delivered")
        assert output.endswith(
            f"\nPASSED: {sure} of {sure} settled orders charged exactly once, {20 - sure} uncertain, none twice\n"
        )

    assert runs[2].returncode == 1, forgetful
    assert line(forgetful, "orders that clients were promised with a 201") == 40
    assert line(forgetful, "charged twice or more") > 0
    assert line(forgetful, "duplicates suppressed downstream, by the same child key") == 0
    assert re.search(r"\n  order \S+: delivered, and charged [2-9] times\n", forgetful)
    assert re.search(r"\nFAILED: \d+ problems\n$", forgetful)
