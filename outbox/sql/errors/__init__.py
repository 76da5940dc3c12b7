"""What errors say: of drivers, of missing tables, and without the values of statements."""
