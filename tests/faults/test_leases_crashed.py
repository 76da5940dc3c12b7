"""A charge inside a leased claim, killed at any moment and taken over: Stripe charges once, with its real client library."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.apps.charging_shop import MOMENTS, charge, handle
from support.database import ALL, IMPORT_PATH, Database
from support.leases import Shop
from support.python_processes import PIPE, PythonProcess, run_python

import outbox
from dispatchers.testing.stripe_ledger import StripeLedger
from outbox.requests.leases import LeasedAttempt


@pytest.fixture
def stripe_process(tmp_path: Path) -> Iterator[tuple[str, StripeLedger]]:
    """The payment service as a process of its own: its URL and its books."""
    path = tmp_path / "ledger.sqlite"
    process = PythonProcess("-m", "dispatchers.testing.stripe_service", "--ledger", path, stdout=PIPE)
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    ledger = StripeLedger(path)
    yield f"http://127.0.0.1:{port}", ledger
    ledger.close()
    process.terminate()
    process.wait()
    process.stdout.close()


def handle_elsewhere(database: Database, stripe_url: str, moment: str) -> int:
    url = database.url.render_as_string(hide_password=False)
    script = Path(__file__).parents[1] / "support" / "apps" / "charging_shop.py"
    environment = os.environ | {"PYTHONPATH": IMPORT_PATH}
    return run_python(script, url, stripe_url, moment, env=environment).returncode


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_handler_killed_at_any_moment_and_taken_over_charges_once(
    database: Database, ob: outbox.Outbox, stripe_process: tuple[str, StripeLedger], moment: str
) -> None:
    url, ledger = stripe_process

    assert handle_elsewhere(database, url, moment) == -signal.SIGKILL
    if moment not in ("before the claim", "after the commit"):
        with pytest.raises(outbox.KeyInFlight):
            handle(database, url)
        Shop(database, ob).run_out()
    response = handle(database, url)

    (charged,) = ledger.charges
    assert response.status == 201
    assert response.json() == {"intent": charged.parent}
    assert ledger.count("replayed") == (moment in ("after the charge", "inside the fence", "before the commit"))
    assert database.counts() == ALL


def test_two_owners_who_both_charge_do_it_once_and_the_second_answers(
    database: Database, ob: outbox.Outbox, stripe_process: tuple[str, StripeLedger]
) -> None:
    url, ledger = stripe_process
    shop = Shop(database, ob)

    def be_overtaken_between_two_tries(claim: LeasedAttempt) -> None:
        charge(claim, url)
        shop.run_out()
        assert handle(database, url).status == 201
        charge(claim, url)

    with pytest.raises(outbox.LeaseLost):
        shop.request(be_overtaken_between_two_tries)

    assert len(ledger.charges) == 1
    assert ledger.count("replayed") == 2
    assert database.counts() == ALL
