"""MySQL: what differs from MariaDB."""
