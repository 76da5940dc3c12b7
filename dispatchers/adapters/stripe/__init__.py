"""The adapter for Stripe."""
