"""The adapter for SMTP, and its status lookup over IMAP."""
