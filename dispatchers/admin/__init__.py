"""The functions for operators: what they read, decide and check. The command line and the dashboard show and call them."""
