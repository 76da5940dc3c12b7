"""The adapter for HTTP services and webhooks."""
