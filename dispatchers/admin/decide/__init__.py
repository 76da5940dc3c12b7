"""What an operator decides, with the rules of each decision and its record in the audit log."""
