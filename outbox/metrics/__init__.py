"""Ready-made observers and gauges: `outbox.metrics.prometheus`, `outbox.metrics.opentelemetry`; see docs/monitoring.md.

Each needs the extra of its name. Importing this package loads neither.
"""
