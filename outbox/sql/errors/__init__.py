"""Errors of the database: what drivers report, missing tables, and statements without their values."""
