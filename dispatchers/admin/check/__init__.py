"""The checks: `doctor` finds what is wrong with the environment and the load, `verify` with the rows."""
