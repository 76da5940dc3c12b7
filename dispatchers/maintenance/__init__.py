"""Jobs that run beside the sending: retention, partitions of response bodies, figures for monitoring."""
