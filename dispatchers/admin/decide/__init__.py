"""The decisions of operators, with the rules of each and its record in the audit log."""
