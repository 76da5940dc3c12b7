"""What an operator reads and decides, as functions. The command line calls them."""
