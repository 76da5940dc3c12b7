"""The outbox in the database: its tables, the dialects, locks and ordering, connections and errors."""
