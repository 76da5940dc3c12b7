"""The adapters for workflow engines, one file for each engine."""
