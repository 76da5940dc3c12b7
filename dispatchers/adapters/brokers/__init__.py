"""The adapters for message brokers, one file for each broker."""
