"""The parts that only MariaDB needs."""
