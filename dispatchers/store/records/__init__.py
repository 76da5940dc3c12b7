"""What is read and recorded beside the queue: identity, heartbeats, counts and gauges."""
