"""The store's transactions and their limits, the listener for hints, the watchdog for silent servers, the log of outages."""
