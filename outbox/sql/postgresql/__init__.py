"""PostgreSQL, and its portable mode."""
