"""One process for several databases: their file, their dispatchers, and the limits that they share."""
