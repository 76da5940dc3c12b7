"""For tests: those of an app, which drain its outbox or kill it on the way, and those of an adapter, which it must pass.

- `draining`: send all that was enqueued, now. `failpoints`: die, or do anything else, at a named point.
- `postgres`: a real PostgreSQL for a test run. `stripe_service`: a strict imitation of Stripe's API.
- `conformance`, `conformance_http`, `conformance_lookups`: the suites that every adapter passes. `faulty_http`: their service.

This package loads none of them: the suites need pytest, and no app that runs does. The whole: docs/testing.md, docs/adapters.md.
"""
