"""What the outbox does at the events of a SQLAlchemy session: it writes entries at the flush and sends hints after the commit."""
