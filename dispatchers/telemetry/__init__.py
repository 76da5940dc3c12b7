"""What the process reports to monitoring: `telemetry.prometheus`, `telemetry.opentelemetry`, and its health over HTTP.

Each binding needs the extra of its name. Importing this package loads neither.
"""
