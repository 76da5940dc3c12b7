"""The tables, and how their statements differ between databases."""
