"""The example apps, over real HTTP, as their own pages start them."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from support.python_processes import PIPE, PythonProcess

ROOT = Path(__file__).parents[3]
COMMANDS = {
    "flask": "flask --app examples.flask_shop.app run --port 0",
    "starlette": "uvicorn --factory examples.starlette_shop.app:create_app --port 0",
}
DRIVERS = {"flask": "sqlite", "starlette": "sqlite+aiosqlite"}


@contextmanager
def running(name: str, database: Path) -> Iterator[httpx.Client]:
    environment = {**os.environ, "DATABASE_URL": f"{DRIVERS[name]}:///{database}"}
    with PythonProcess("-m", *COMMANDS[name].split(), cwd=ROOT, env=environment, stderr=PIPE) as process:
        try:
            with httpx.Client(base_url=printed_url(process), timeout=60) as client:
                yield client
        finally:
            process.terminate()


def printed_url(process: PythonProcess) -> str:
    seen = []
    for line in process.stderr or ():
        seen.append(line)
        if found := re.search(r"unning on (http://[\d.:]+)", line):
            return found[1]
    raise AssertionError("".join(seen))


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_places_each_order_once(name: str, tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer ada-token", "Idempotency-Key": "order-1"}
    with running(name, tmp_path / "shop.db") as client:

        def order(amount: int, **changed: str) -> httpx.Response:
            return client.post("/orders", headers=headers | changed, json={"amount": amount})

        first, retry = order(2000), order(2000)
        other = order(3000)
        stranger = order(2000, Authorization="Bearer eve-token")
        large = [order(200_000, **{"Idempotency-Key": "order-2"}) for _ in range(2)]

    assert (first.status_code, first.json()) == (201, {"order": 1})
    assert (retry.status_code, retry.content) == (201, first.content)
    assert (other.status_code, other.headers["content-type"]) == (422, "application/problem+json")
    assert stranger.status_code == 401
    assert [answer.json() for answer in large] == [{"error": "at most 100000 in one order"}] * 2
    replayed = [answer.headers.get("idempotent-replayed") for answer in (first, retry, *large)]
    assert replayed == [None, "true", None, "true"]
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", poolclass=sa.NullPool)
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM outbox_entry")) == 1
        assert connection.scalar(sa.text(f"SELECT count(*) FROM {name}_order")) == 1
