"""What is wrong: `doctor` checks the environment and the load, `verify` the rows."""
