"""What the process reports to monitoring: metrics, traces, unexpected errors, ids in the log, and its health over HTTP.

The bindings `telemetry.prometheus` and `telemetry.opentelemetry` need the extra of their name. Importing this package loads
neither.
"""
