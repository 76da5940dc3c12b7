"""The scheduled jobs of a dispatcher: retention, partitions of response bodies, and gauges for monitoring."""
