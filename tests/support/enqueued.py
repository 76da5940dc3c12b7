"""What the tests of transactions and savepoints share: an entry of a parent, and what makes a session forget its objects."""

import sqlalchemy as sa

from support.database import CHARGE, PAYLOAD


def enqueue(ob, session, parent):
    return ob.enqueue(session, CHARGE, PAYLOAD, parent=parent)


def parents(database):
    return sorted(entry.parent for entry in database.entries)


def forget_all(session):
    session.expunge_all()


def expire_all(session):
    session.expire_all()


def listen(session, moment, work):
    """Have `work(session)` done once, at that moment of the session's next flush or commit."""
    sa.event.listen(session, moment, lambda session, *rest: work(session), once=True)
