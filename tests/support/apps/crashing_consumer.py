"""A consumer of an SQS queue that kills itself at the n-th moment: run by test_inbox_recipes.py as a process of its own.

For each number n on stdin it forks a child, which runs the recipe of docs/inbox-recipes.md for one message, and ends by
SIGKILL at that moment; it prints how the child ended: -9, or 0 if there are fewer moments than that. Nothing is open before
the fork.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import boto3
import sqlalchemy as sa
from sqlalchemy.orm import Session

import outbox
from support.consumer import Billing
from support.database import Database
from support.recipes import recipe_of

BROKER = "SQS, with boto3"
SETTINGS = {"region_name": "eu-central-1", "aws_access_key_id": "test", "aws_secret_access_key": "test"}


def main(database_url: str, endpoint_url: str, queue_url: str) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            database = Database(sa.make_url(database_url))
            client = boto3.client("sqs", endpoint_url=endpoint_url, **SETTINGS)
            die_at_moment(int(line), database.engine, client)
            consume(
                Billing(database, outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test")),
                client,
                queue_url,
            )
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def die_at_moment(number: int, engine: sa.Engine, client: Any) -> None:
    """The moments: before and after each statement, the commit, and each call to SQS."""
    moment = _killer(number)
    engine.connect().close()  # a connection's first statements are SQLAlchemy's own
    for name in ("before_cursor_execute", "after_cursor_execute", "commit"):
        sa.event.listen(engine, name, moment)
    sa.event.listen(Session, "after_commit", moment)
    for name in ("before-call", "after-call"):
        client.meta.events.register(f"{name}.sqs", moment)


def _killer(number: int) -> Callable[..., None]:
    passed = 0

    def moment(*arguments: object, **named: object) -> None:
        nonlocal passed
        passed += 1
        if passed == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return moment


def consume(billing: Billing, client: Any, queue_url: str) -> None:
    recipe_of(BROKER, billing.handle).run_once(client, queue_url)


if __name__ == "__main__":
    main(*sys.argv[1:])
