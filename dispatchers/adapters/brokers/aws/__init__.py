"""The adapters for the queues, topics and event buses of AWS."""
