"""What an operator reads and decides, as functions: the command line and the tests call them."""
