"""A shop that kills itself at the n-th moment of a request: run by test_crash_in_transaction.py as a process of its own.

For each number n on stdin it forks a child, which handles the request `retry-<n>` and ends by SIGKILL at that moment; it
prints how the child ended: -9, or 0 if the request has fewer moments than that. Nothing is open before the fork.
"""

import os
import signal
import sys
from datetime import timedelta

import sqlalchemy as sa
import sqlalchemy.dialects.postgresql.psycopg  # loaded here once, not by each child
from sqlalchemy.orm import Session

import outbox
from support.database import CHARGE, PAYLOAD, REQUEST, Database, Order


def main(url: str) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            database = Database(sa.make_url(url))
            die_at_moment(int(line), database.engine)
            place_order(database.engine, int(line))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def die_at_moment(number: int, engine: sa.Engine) -> None:
    """The moments: before and after each statement (BEGIN and SAVEPOINT among them), before and after the commit."""
    passed = 0

    def moment(*arguments: object) -> None:
        nonlocal passed
        passed += 1
        if passed == number:
            os.kill(os.getpid(), signal.SIGKILL)

    # A connection's first statements are SQLAlchemy's own, outside of any transaction.
    engine.connect().close()
    sa.event.listen(engine, "before_cursor_execute", moment)
    sa.event.listen(engine, "after_cursor_execute", moment)
    sa.event.listen(engine, "commit", moment)
    sa.event.listen(Session, "after_commit", moment)


def place_order(engine: sa.Engine, number: int) -> outbox.Response:
    """One order under the key `retry-<number>`. The test makes the retry with this same function."""
    ob = outbox.Outbox(outbox.Keyring({"k1": bytes(range(32))}), env="test")
    with Session(engine) as session, session.begin():
        block = ob.idempotent(session, f"retry-{number}", scope="acct_1", content=REQUEST, wait=timedelta(seconds=5))
        with block as claim:
            if not claim.replayed:
                session.add(Order(customer=f"customer {number}", amount=2000))
                ob.enqueue(session, CHARGE, PAYLOAD)
                claim.respond(201, {"order": number})
    return claim.require_response()


if __name__ == "__main__":
    main(sys.argv[1])
