"""What an operator reads, decides and checks, as functions. The command line and the dashboard call them."""
