"""The dispatcher's other rows and queries: identity, heartbeats, counts and gauges."""
