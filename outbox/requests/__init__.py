"""The idempotency records of requests: claimed, leased, answered and replayed."""
