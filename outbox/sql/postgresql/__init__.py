"""The parts that only PostgreSQL and its portable mode need."""
