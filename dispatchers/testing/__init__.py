"""Tools for tests of apps (send what was enqueued, or kill the process at a point) and for tests of adapters.

- `draining`: send all that was enqueued, now. `failpoints`: kill the process, or call a function, at a named point.
- `postgres`: a real PostgreSQL for a test run. `stripe_service`: a strict imitation of Stripe's API.
- `conformance`, `conformance_http`, `conformance_lookups`: the test suites for adapters. `faulty_http`: the server that they use.

This package imports none of these modules, because the suites need pytest. See docs/testing.md and docs/adapters.md.
"""
