"""The examples, as their readers run them: processes of their own, real HTTP and SMTP, and an imitation of Stripe."""

import base64
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email import message_from_bytes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, text
from support.docs_pages import ROOT, snippets_of
from support.mail_servers import Mailbox, running_mailbox
from support.python_processes import PythonProcess, forked_commands, run_python

from dispatchers.testing.service_faults import ServiceFault
from dispatchers.testing.stripe_core import API_KEY
from dispatchers.testing.stripe_service import RunningStripe, running_stripe
from examples.fastapi_shop.effects import effects
from examples.fastapi_shop.orders import Order

MAX_SECONDS = 60
CART = {"email": "ada@example.com", "amount": 2000}
TABLES = "from examples.{}.{} import create_tables; create_tables()"


def environment_of(directory: Path, stripe_url: str, **more: str) -> dict[str, str]:
    """What an example's processes find there, and nothing else that is ours."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("OUTBOX_", "DATABASE_"))}
    return {
        **outer,
        "PYTHONUNBUFFERED": "1",
        "DATABASE_URL": f"sqlite:///{directory / 'example.db'}",
        "OUTBOX_SECRET": f"k1:{base64.b64encode(bytes(range(32))).decode()}",
        "OUTBOX_ENV": "example",
        "STRIPE_API_KEY": API_KEY,
        "STRIPE_URL": stripe_url,
        **more,
    }


def python(environment: Mapping[str, str], *arguments: str) -> str:
    """What a Python process prints that ends by itself."""
    return run_python(*arguments, cwd=ROOT, env=environment, check=True, timeout=MAX_SECONDS).stdout


@contextmanager
def running(log: Path, environment: Mapping[str, str], *arguments: str) -> Iterator[PythonProcess]:
    """A Python process that runs until the block ends, and then stops at SIGTERM in good order. Its output goes to `log`."""
    with log.open("wb") as output:
        process = PythonProcess(*arguments, cwd=ROOT, env=environment, stdout=output, stderr=output)
        try:
            yield process
            process.terminate()
            status = process.wait(MAX_SECONDS)
        finally:
            process.kill()
            process.wait()
    assert status in {0, -signal.SIGTERM}, log.read_text()  # uvicorn ends in order, and then by the signal


def wait_for(what: Callable[[], Any], *logs: Path) -> Any:
    """What `what` returns, once that is true."""
    latest = time.monotonic() + MAX_SECONDS
    while time.monotonic() < latest:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("\n".join(log.read_text() for log in logs))


def address_in(log: Path) -> str | None:
    found = re.search(r"running on (http://\S+)", log.read_text())
    return found and found[1]


# --- examples/fastapi_shop


class Shop:
    """The shop as its customers and its far sides see it."""

    def __init__(self, url: str, stripe: RunningStripe, mails: Mailbox, logs: tuple[Path, ...]) -> None:
        self._http = httpx.Client(base_url=url, headers={"Authorization": "Bearer ada-token"}, trust_env=False)
        self.stripe = stripe
        self.mails = mails
        self.logs = logs

    def place(self, key: str | None, *, as_customer: str = "ada", **cart: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {as_customer}-token"} | ({"Idempotency-Key": key} if key else {})
        return self._http.post("/orders", headers=headers, json=CART | cart)

    def show(self, number: str, as_customer: str = "ada") -> httpx.Response:
        return self._http.get(f"/orders/{number}", headers={"Authorization": f"Bearer {as_customer}-token"})

    def ended(self, number: str) -> dict[str, Any]:
        """The order, once none of its effects is under way."""

        def look() -> dict[str, Any] | None:
            order: dict[str, Any] = self.show(number).json()
            return order if {"delivered", "failed", "uncertain"}.issuperset(order["effects"].values()) else None

        found: dict[str, Any] = wait_for(look, *self.logs)
        return found

    def charges_of(self, number: str) -> list[int | None]:
        return [charge.amount for charge in self.stripe.ledger.charges if charge.metadata["order"] == number]

    def receipts_of(self, number: str) -> list[Any]:
        mails = [message_from_bytes(content) for content in self.mails.contents]
        return [mail for mail in mails if number in str(mail.get_payload(decode=True))]

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    directory = tmp_path_factory.mktemp("shop")
    logs = directory / "web.log", directory / "sending.log"
    with running_stripe() as stripe, running_mailbox() as (mails, port):
        environment = environment_of(directory, stripe.url, SMTP_HOST="127.0.0.1", SMTP_PORT=str(port))
        python(environment, "-c", TABLES.format("fastapi_shop", "orders"))
        web = ("-m", "uvicorn", "examples.fastapi_shop.app:app", "--port", "0")
        sending = ("-m", "dispatchers", "run", "examples.fastapi_shop.effects:make_dispatcher")
        with running(logs[0], environment, *web), running(logs[1], environment, *sending):
            shop = Shop(wait_for(lambda: address_in(logs[0]), *logs), stripe, mails, logs)
            yield shop
            shop.close()


def test_an_order_placed_twice_is_charged_once_though_its_answer_was_lost(shop: Shop) -> None:
    shop.stripe.force(ServiceFault.LOSE_RESPONSE)

    first, again = shop.place("cart-1"), shop.place("cart-1")
    number = first.json()["order"]
    order = shop.ended(number)

    assert (first.status_code, first.headers["location"]) == (201, f"/orders/{number}")
    assert (again.status_code, again.content) == (201, first.content)
    assert order["state"] == "paid"
    assert order["effects"] == {"stripe.payment_intents.create": "delivered", "email.send": "delivered"}
    assert shop.charges_of(number) == [2000]
    assert [mail["To"] for mail in shop.receipts_of(number)] == ["ada@example.com"]


def test_an_order_whose_card_is_declined_is_unpaid_and_nothing_is_mailed(shop: Shop) -> None:
    number = shop.place("cart-2", card="pm_card_chargeDeclined").json()["order"]

    order = shop.ended(number)

    assert order["state"] == "unpaid"
    assert order["effects"] == {"stripe.payment_intents.create": "failed"}
    assert (shop.charges_of(number), shop.receipts_of(number)) == ([], [])


def test_an_order_whose_charge_is_unknown_yet_waits_for_a_lookup(shop: Shop) -> None:
    shop.stripe.force(ServiceFault.FAIL_AFTER)

    number = shop.place("cart-3").json()["order"]

    def look() -> dict[str, Any] | None:
        order: dict[str, Any] = shop.show(number).json()
        return order if order["effects"] == {"stripe.payment_intents.create": "retry"} else None

    order = wait_for(look, *shop.logs)
    assert order["state"] == "placed"
    assert shop.charges_of(number) == [2000]


def test_an_order_whose_charge_no_lookup_can_find_is_unclear() -> None:
    order = SimpleNamespace(state="placed")
    session: Any = SimpleNamespace(get_one=lambda kind, number: {(Order, "7"): order}[kind, number])
    settlement: Any = SimpleNamespace(entry=SimpleNamespace(payload={"metadata": {"order": "7"}}))

    effects.callbacks["on_uncertain", "stripe.payment_intents.create"](session, settlement)

    assert order.state == "unclear"


def test_two_customers_may_choose_the_same_key(shop: Shop) -> None:
    ada, bob = shop.place("cart-4"), shop.place("cart-4", as_customer="bob")

    assert (ada.status_code, bob.status_code) == (201, 201)
    assert ada.json() != bob.json()
    assert shop.show(ada.json()["order"], as_customer="bob").status_code == 404


def test_a_request_that_cannot_be_answered_is_refused(shop: Shop) -> None:
    shop.place("cart-5")

    answers = [shop.place(None), shop.place("cart-5", amount=1), shop.place("cart-6", as_customer="eve")]

    assert [answer.status_code for answer in answers] == [400, 422, 401]
    assert "was used before with another request" in answers[1].json()["detail"]


def test_the_shop_on_its_stage_prints_the_receipt(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"

    with running(log, os.environ, "-m", "examples.fastapi_shop", "--port", "0") as stage:
        url = wait_for(lambda: address_in(log), log)
        headers = {"Authorization": "Bearer ada-token", "Idempotency-Key": "cart-1"}
        number = httpx.post(f"{url}/orders", headers=headers, json=CART, trust_env=False).json()["order"]
        wait_for(lambda: "mail to ada@example.com" in log.read_text(), log)
        stage.send_signal(signal.SIGINT)
        stage.wait(MAX_SECONDS)

    assert f"mail to ada@example.com: Thank you. You paid 20.00 EUR for order {number}.\n" in log.read_text()
    assert log.read_text().endswith("1 charged\n")


# --- examples/cron


@pytest.fixture
def stripe() -> Iterator[RunningStripe]:
    with running_stripe() as service:
        yield service


@pytest.fixture
def cron(tmp_path: Path, stripe: RunningStripe) -> dict[str, str]:
    """Three invoices: 41 and 42 are due, 43 is not."""
    environment = environment_of(tmp_path, stripe.url)
    python(environment, "-c", TABLES.format("cron", "invoices"))
    today = datetime.now(UTC).date()
    insert = text(
        "INSERT INTO cron_invoice (number, due_on, amount, card, state) VALUES (:number, :due_on, 2000, :card, 'open')"
    )
    engine = create_engine(environment["DATABASE_URL"])
    with engine.begin() as connection:
        for number, days, card in ((41, -30, "pm_card_visa"), (42, 0, "pm_card_visa"), (43, 2, "pm_card_visa")):
            due_on = (today + timedelta(days=days)).isoformat()
            connection.execute(insert, {"number": number, "due_on": due_on, "card": card})
    engine.dispose()
    return environment


NIGHTLY = ("-m", "examples.cron.nightly")


def charged(stripe: RunningStripe) -> list[str]:
    return sorted(charge.metadata["invoice"] for charge in stripe.ledger.charges)


def invoice_states(environment: Mapping[str, str]) -> list[str]:
    engine = create_engine(environment["DATABASE_URL"])
    with engine.connect() as connection:
        found = connection.execute(text("SELECT state FROM cron_invoice ORDER BY number")).scalars().all()
    engine.dispose()
    return list(found)


def test_the_nightly_job_run_twice_charges_what_is_due_once(cron: dict[str, str], stripe: RunningStripe) -> None:
    printed = [python(cron, *NIGHTLY), python(cron, *NIGHTLY)]

    assert printed == ["2 open and due, 2 tried\n", "0 open and due, 0 tried\n"]
    assert charged(stripe) == ["41", "42"]
    assert invoice_states(cron) == ["paid", "paid", "open"]


def test_the_nightly_job_run_again_after_a_lost_answer_charges_once(
    cron: dict[str, str], stripe: RunningStripe
) -> None:
    stripe.force(ServiceFault.LOSE_RESPONSE, ServiceFault.LOSE_RESPONSE)
    first = python(cron, *NIGHTLY)

    def run_again() -> bool:
        python(cron, *NIGHTLY)
        return invoice_states(cron) == ["paid", "paid", "open"]

    wait_for(run_again)

    assert first == "2 open and due, 2 tried\n"
    assert charged(stripe) == ["41", "42"]
    assert stripe.ledger.count("replayed") == 2


def test_the_nightly_job_on_two_machines_at_once_charges_once(
    cron: dict[str, str], stripe: RunningStripe, tmp_path: Path
) -> None:
    with running(tmp_path / "one.log", cron, *NIGHTLY) as one, running(tmp_path / "two.log", cron, *NIGHTLY) as two:
        statuses = [one.wait(MAX_SECONDS), two.wait(MAX_SECONDS)]

    assert statuses == [0, 0]
    assert charged(stripe) == ["41", "42"]
    assert invoice_states(cron) == ["paid", "paid", "open"]


def test_the_job_s_readme_leads_to_three_charges(stripe: RunningStripe, tmp_path: Path) -> None:
    """Its commands, but for the names of this machine: port, database and environment."""
    _, block = snippets_of((ROOT / "examples" / "cron" / "README.md").read_text())
    commands = block.text.replace("http://127.0.0.1:12111", stripe.url)
    commands = commands.replace("sqlite:///invoices.db", f"sqlite:///{tmp_path / 'invoices.db'}")
    commands = commands.replace(".venv/bin/", f"{tmp_path}/")
    variables = dict(os.environ)
    inherited = forked_commands(tmp_path, ["python", "outbox"], variables)
    bash = ["bash", "-euc", commands]
    subprocess.run(bash, cwd=ROOT, env=variables, pass_fds=[inherited], check=True, timeout=MAX_SECONDS)

    assert charged(stripe) == ["41", "42", "43"]
