"""Programs that the tests start as processes of their own."""
